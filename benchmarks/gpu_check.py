"""Prove every CUDA attention kernel of longpack on this machine, and time it: one command.

    python benchmarks/gpu_check.py                # on a GPU: at most five minutes
    python benchmarks/gpu_check.py --cpu --quick  # the same checks with the CPU kernel, in seconds

One device takes the part of each rank of 2, 4 and 8 in turn, with the plan that the ranks would
have. What is measured, and how, stands in the modules of `gpu_check/`:

- `parity.py`: outputs and gradients of all ranks put together, against dense float64 attention,
  in one call and, where a kernel can, in parts that merge.
- `ranks.py`: time of every rank, and rates as fractions of one call over the whole row.
- `segment_cost.py`: what one more segment adds.
- `merge_cost.py`: what it costs to attend in two parts and merge them.

Prints tables and writes JSON. Timed cases that do not fit in the limit are named as left out.

Exit status: 0 every kernel that can run is right, 1 one is not, 2 there is no CUDA device.
"""

import sys

from gpu_check.command import main  # the package beside this file

if __name__ == "__main__":
    sys.exit(main())
