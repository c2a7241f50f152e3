"""Equal blocks of rows, and how a tensor's rows are read and written as such."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Name equal blocks of rows: block b is the rows `starts[b] + [0, length)`.

    Blocks ascend and share no row. Where each follows the one before, they are read and written
    as a view; others are gathered and scattered.
    """

    starts: tuple[int, ...]
    length: int

    @cached_property
    def adjacent(self) -> bool:
        """Say whether the blocks are one range of rows."""
        return self.starts[-1] - self.starts[0] == (len(self.starts) - 1) * self.length

    @cached_property
    def index(self) -> Tensor:
        """The blocks' rows, int64 on the host; built once."""
        return (torch.tensor(self.starts)[:, None] + torch.arange(self.length)).flatten()


class BlockedRows:
    """Read and write rows `[T, H, ...]` of a tensor as blocks `[count, H, length, ...]`.

    A document of few tokens is viewed fourteen times, forward and backward, which is much of its
    time: so a view is one call, and what views of one tensor share is looked up once.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._heads, *self._shape = rows.shape[1:]
        self._row_stride, self._head_stride, *self._strides = rows.stride()
        self._offset = rows.storage_offset()

    def read(self, blocks: Blocks) -> Tensor:
        """Return blocks: a view where they are adjacent, else a copy."""
        count, length = len(blocks.starts), blocks.length
        if not blocks.adjacent:
            gathered = self.rows.index_select(0, blocks.index)
            return gathered.unflatten(0, (count, length)).transpose(1, 2)
        return self.rows.as_strided(
            (count, self._heads, length, *self._shape),
            (length * self._row_stride, self._head_stride, self._row_stride, *self._strides),
            self._offset + blocks.starts[0] * self._row_stride,
        )

    def write(self, blocks: Blocks, values: Tensor) -> None:
        """Overwrite blocks."""
        if blocks.adjacent:
            self.read(blocks).copy_(values)
        else:
            scattered = values.transpose(1, 2).flatten(0, 1).to(self.rows.dtype)
            _widen(self.rows).index_copy_(0, blocks.index, _widen(scattered))

    def add(self, blocks: Blocks, values: Tensor) -> None:
        """Add to blocks, in the dtype of the rows."""
        total = self.read(blocks).add_(values)
        # index_add_ into every other half row of bfloat16 took a thousand times as long as this
        if not blocks.adjacent:
            self.write(blocks, total)


def _widen(rows: Tensor) -> Tensor:
    """View rows as elements of 16 bytes where they divide: index_copy_ takes a third of the time.

    It copies element by element, and looks into none.
    """
    size = rows.element_size()
    places = (*rows.stride()[:-1], rows.shape[-1], rows.storage_offset())
    divides = all(place * size % 16 == 0 for place in places)
    return rows.view(torch.complex128) if divides else rows
