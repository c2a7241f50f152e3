"""One local variable-length attention call, and the kernels that can run it."""

from longpack.kernels.api import Choice, attend, choose_kernel, scale_fault
from longpack.kernels.call import KernelCall, TiledKernel
from longpack.kernels.packed import Tiles
from longpack.kernels.registry import KERNELS, TILED
from longpack.kernels.segments import Segments
from longpack.kernels.tiles import Tile, full_tiles

__all__ = [
    "KERNELS",
    "TILED",
    "Choice",
    "KernelCall",
    "Segments",
    "Tile",
    "TiledKernel",
    "Tiles",
    "attend",
    "choose_kernel",
    "full_tiles",
    "scale_fault",
]
