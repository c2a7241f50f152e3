"""One local variable-length attention call, and the kernels that can run it."""

from longpack.kernels.api import Choice, attend, choose_kernel
from longpack.kernels.call import KernelCall
from longpack.kernels.registry import KERNELS
from longpack.kernels.segments import Segments

__all__ = ["KERNELS", "Choice", "KernelCall", "Segments", "attend", "choose_kernel"]
