"""What a kernel is asked to run, and the interface that every kernel has."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from longpack.errors import UnsupportedError
from longpack.kernels.packed import Tiles
from longpack.kernels.segments import Segments


@dataclass(frozen=True)
class KernelCall:
    """Describe one attention call by what decides whether a kernel can run it.

    Raises:
        UnsupportedError: the query heads cannot be shared out among the key/value heads.
    """

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads: "
                "each key/value head serves an equal number of query heads; give `key` and "
                "`value` a number of heads that divides the heads of `query`"
            )

    def __str__(self) -> str:
        head_dims = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            head_dims += f" (value {self.v_head_dim})"
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {head_dims}"
        return f"{dtype} on {self.device_type}, {heads}"


class Kernel(Protocol):
    """Implement one way to attend; a module in `kernels/impl` is one."""

    NAME: str
    BACKEND: str

    def reasons_against(self, call: KernelCall) -> list[str]:
        """List why this machine cannot run `call` with this kernel; empty means it can."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        """Attend as `longpack.kernels.attend` says, with arguments that it has checked."""
        ...


@runtime_checkable
class TiledKernel(Kernel, Protocol):
    """Attend tile by tile into buffers of the caller, so that keys may come in several tensors."""

    def lse_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of log-sum-exps, and of sums that are rounded once."""
        ...

    def forward_tiles(
        self,
        tiles: Tiles,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attend into `out` and `lse`; a tile that continues is merged into what is there."""
        ...

    def backward_tiles(
        self,
        tiles: Tiles,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        grad_query: Tensor,
        grad_key: Tensor,
        grad_value: Tensor,
        fresh_keys: bool = False,
    ) -> None:
        """Send `grad_out` back through the tiles, given the merged `out` and `lse`.

        A tile that continues adds to `grad_query`; all add to `grad_key` and `grad_value`, unless
        those are fresh and no two tiles share keys.
        """
        ...
