"""The results as tables to read."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from gpu_check.cases import Measured
from gpu_check.merge_cost import MergeCost
from gpu_check.parity import Parity
from gpu_check.ranks import SplitTime
from gpu_check.report import compare


def show_parity(console: Console, parities: list[Parity], refused: dict[str, list[str]]) -> None:
    """Print how many checks failed, each that did, and what did not run with its reasons."""
    table = Table("kernel", "dtype", "checks", "failed", "worst error ratio", title="Parity")
    for kernel, dtype in dict.fromkeys((p.kernel, p.dtype) for p in parities):
        mine = [p for p in parities if (p.kernel, p.dtype) == (kernel, dtype)]
        failed = sum(not p.passed for p in mine)
        worst = max(p.worst for p in mine)
        table.add_row(kernel, dtype, str(len(mine)), str(failed), f"{worst:.2f}")
    console.print(table)
    for parity in parities:
        if not parity.passed:
            console.print(f"FAILED {parity}", markup=False)
    for kernel, reasons in refused.items():
        console.print(f"not run: {kernel}: {', '.join(reasons)}", markup=False)


def show_timing(console: Console, measured: Measured) -> None:
    """Print everything that was timed, and what was not."""
    matmul, copy = measured.one("matmul"), measured.one("copy")
    console.print(f"matrix product {_number(matmul)} TFLOP/s, copy {_number(copy)} GB/s")
    for table in (*_split_tables(measured), _segment_table(measured), *_merge_tables(measured)):
        if table.row_count:
            console.print(table)
    for name in measured.left_out:
        console.print(f"left out, no time: {name}", markup=False)
    for name, error in measured.raised.items():
        console.print(f"RAISED {name}: {error}", markup=False)


def _split_tables(measured: Measured) -> Iterator[Table]:
    splits: list[SplitTime] = measured.results["splits"]
    for alike in dict.fromkeys((s.kernel, s.heads, s.row) for s in splits):
        kernel, heads, row = alike
        table = Table("cp", "layout", title=f"Ranks in turn: {kernel}, {heads}, {row} row")
        for column in ("sum ms", "slowest", "TFLOP/s", "matmul", "1 call", "causal"):
            table.add_column(column, justify="right")
        for split in splits:
            if (split.kernel, split.heads, split.row) == alike:
                table.add_row(*_split_cells(split, measured))
        table.caption = (
            "fractions of the rates of a matrix product, of one call over the whole row, and of "
            "torch's dense causal call"
        )
        yield table


def _split_cells(split: SplitTime, measured: Measured) -> Iterator[str]:
    fractions = compare(split, measured)
    yield from (str(split.cp), split.layout)
    yield from map(_number, (split.sum_ms, split.slowest_ms, split.tflops))
    yield from map(
        _percent, (fractions.of_matmul, fractions.of_whole_call, fractions.of_causal_call)
    )


def _segment_table(measured: Measured) -> Table:
    table = Table("kernel", "heads", "lengths", title="What one more segment adds")
    for column in ("forward us", "backward us", "worst misfit"):
        table.add_column(column, justify="right")
    for cost in measured.results["segment_cost"]:
        numbers = (_number(cost.forward_us), _number(cost.backward_us))
        table.add_row(
            cost.kernel, str(cost.heads), cost.lengths, *numbers, _percent(cost.worst_misfit)
        )
    return table


def _merge_tables(measured: Measured) -> Iterator[Table]:
    table = Table("kernel", "heads", title="Two parts, merged, against one call: ms")
    for column in ("one forward", "backward", "two forward", "backward"):
        table.add_column(column, justify="right")
    for cost in measured.results["merge_cost"]:
        table.add_row(cost.kernel, str(cost.heads), *_merge_cells(cost))
    yield table
    table = Table("heads", "tokens", "ms", "GB/s", "of copy", title="merge_ alone")
    copy = measured.one("copy")
    for op in measured.results["merge_op"]:
        fraction = _percent(op.gb_per_s / copy if copy else None)
        table.add_row(str(op.heads), str(op.tokens), _number(op.ms), _number(op.gb_per_s), fraction)
    yield table


def _merge_cells(cost: MergeCost) -> tuple[str, ...]:
    if cost.note:
        return (cost.note,)
    times = (
        cost.one_call_forward_ms,
        cost.one_call_backward_ms,
        cost.two_parts_forward_ms,
        cost.two_parts_backward_ms,
    )
    return tuple(map(_number, times))


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{x:.0%}"
