"""One file per kernel: `NAME`, `BACKEND`, `reasons_against` and `attend`."""
