"""The public test kit: rows that break things, ranks that stay alive, checks to build on."""

from longpack.testing.rows import DANGEROUS_ROWS, packed_rows

__all__ = ["DANGEROUS_ROWS", "packed_rows"]
