"""Every kernel there is, in the order of preference within a backend."""

from longpack.kernels.call import Kernel, TiledKernel
from longpack.kernels.impl import dense, flash_attn_pkg, flash_cpu, flash_torch_cuda, te

# torch's CUDA kernels are flash-attn's, and attend in parts, so that an exchange hides behind them;
# the package itself serves where torch is built without them.
IMPLEMENTATIONS: tuple[Kernel, ...] = (
    flash_torch_cuda,
    flash_attn_pkg,
    flash_cpu,
    te,
    dense,
)
KERNELS: dict[str, Kernel] = {kernel.NAME: kernel for kernel in IMPLEMENTATIONS}
TILED: dict[str, TiledKernel] = {
    name: kernel for name, kernel in KERNELS.items() if isinstance(kernel, TiledKernel)
}
