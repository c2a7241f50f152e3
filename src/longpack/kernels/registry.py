"""Every kernel there is, in the order of preference within a backend."""

from longpack.kernels.call import Kernel, TiledKernel
from longpack.kernels.impl import dense, flash_attn_pkg, flash_cpu, flash_torch_cuda, te

IMPLEMENTATIONS: tuple[Kernel, ...] = (
    flash_attn_pkg,
    flash_torch_cuda,
    flash_cpu,
    te,
    dense,
)
KERNELS: dict[str, Kernel] = {kernel.NAME: kernel for kernel in IMPLEMENTATIONS}
TILED: dict[str, TiledKernel] = {
    name: kernel for name, kernel in KERNELS.items() if isinstance(kernel, TiledKernel)
}
