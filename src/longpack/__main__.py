"""`python -m longpack`: the same as the `longpack` command, as torchrun starts it."""

import sys

from longpack.cli import main

if __name__ == "__main__":
    sys.exit(main())
