"""`longpack bench replay`."""

from typing import Any

from rich.console import Console
from rich.table import Table

from longpack.cli.bench_show import show


def replay(*, rounds: int = 30, json: bool = False) -> int:
    """Time a checkpointed call and a decision on top of plain checkpointing, and count bytes.

    Parameters
    ----------
    rounds
        Timed rounds; figures are medians of differences within a round.
    json
        Print everything as JSON.
    """
    from longpack.bench.replay import run_replay_bench

    return show(run_replay_bench(rounds), json, print_replay)


def print_replay(result: dict[str, Any], console: Console) -> None:
    """Print microseconds with their share of an empty checkpointed block, and bytes."""
    empty_us = result["empty_checkpointed_block_us"]
    console.print(f"empty checkpointed block: {empty_us:.1f} us", highlight=False)
    times = Table("on top of it")
    times.add_column("us", justify="right")
    times.add_column("share", justify="right")
    for name in ("call", "decision", "decision_preserve_random_false"):
        extra = result[name]
        share = f"{extra['share_of_empty_block']:.1%}"
        times.add_row(name.replace("_", " "), f"{extra['extra_us']:.1f}", share)
    console.print(times)
    kept = Table("bytes of a record")
    for column in ("plain", "with codec"):
        kept.add_column(column, justify="right")
    for name, sizes in result["record_bytes"].items():
        kept.add_row(name, f"{sizes['plain']:,}", f"{sizes['codec']:,}")
    console.print(kept)
    dispatch = result["expert_dispatch_on_2_gloo_ranks"]
    console.print(
        f"expert dispatch on 2 gloo ranks: {dispatch['replayed']:.1f} ms replayed, "
        f"{dispatch['decided_twice']:.1f} ms decided twice",
        highlight=False,
        soft_wrap=True,
    )
