"""Documents: where they are in a packed row, read from any convention. Integers only."""

from longpack.packing.batch import (
    DOCUMENT_KEYS,
    LENGTH_KEYS,
    PADDED_KEYS,
    PRIMARY,
    batch_shape,
    read_documents,
)
from longpack.packing.row import PackedRow, first_difference

__all__ = [
    "DOCUMENT_KEYS",
    "LENGTH_KEYS",
    "PADDED_KEYS",
    "PRIMARY",
    "PackedRow",
    "batch_shape",
    "first_difference",
    "read_documents",
]
