"""The results as tables to read."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from gpu_check.cases import Measured
from gpu_check.merge_cost import MergeCost
from gpu_check.parity import Parity
from gpu_check.problems import Heads
from gpu_check.ranks import SplitTime
from gpu_check.report import compare


def show_parity(console: Console, parities: list[Parity], refused: dict[str, list[str]]) -> None:
    """Print how many checks failed, each that did, and what did not run with its reasons."""
    table = _table("Parity", ("kernel", "dtype"), ("checks", "failed", "worst error ratio"))
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
        title = f"Ranks in turn: {kernel}, {heads}, {row} row"
        figures = ("sum ms", "slowest", "TFLOP/s", "matmul", "1 call", "causal")
        table = _table(title, ("cp", "layout"), figures)
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
    figures = ("forward", "backward", "misfit", "beyond")
    table = _table("What one more segment adds, in us", ("kernel", "heads", "cut"), figures)
    for cost in measured.results["segment_cost"]:
        fitted = (_number(cost.forward_us), _number(cost.backward_us), _percent(cost.worst_misfit))
        names = (cost.kernel, _short(cost.heads), cost.lengths)
        table.add_row(*names, *fitted, _number(cost.beyond_area_us))
    table.caption = (
        "fitted over area and number of segments; and all time, forward and backward, beyond "
        "the area at the rate of one segment"
    )
    return table


def _merge_tables(measured: Measured) -> Iterator[Table]:
    figures = ("forward", "two/one", "backward", "two/one")
    table = _table("One call, in ms, and two merged parts over it", ("kernel", "heads"), figures)
    costs: list[MergeCost] = measured.results["merge_cost"]
    for cost in costs:
        table.add_row(cost.kernel, _short(cost.heads), *_merge_cells(cost))
    noted = dict.fromkeys(f"{cost.kernel}: {cost.note}" for cost in costs if cost.note)
    table.caption = "\n".join(noted)
    yield table
    table = _table("merge_ alone", ("heads",), ("tokens", "ms", "GB/s", "of copy"))
    copy = measured.one("copy")
    for op in measured.results["merge_op"]:
        fraction = _percent(op.gb_per_s / copy if copy else None)
        figures = (str(op.tokens), _number(op.ms), _number(op.gb_per_s), fraction)
        table.add_row(_short(op.heads), *figures)
    yield table


def _merge_cells(cost: MergeCost) -> Iterator[str]:
    one = (cost.one_call_forward_ms, cost.one_call_backward_ms)
    two = (cost.two_parts_forward_ms, cost.two_parts_backward_ms)
    for one_ms, two_ms in zip(one, two, strict=True):
        yield _number(one_ms)
        yield _number(two_ms / one_ms if one_ms and two_ms else None)


def _short(heads: Heads) -> str:
    """Return `9/3 of 64` for 9 query heads and 3 key/value heads of 64, so that tables fit."""
    return f"{heads.num_heads}/{heads.num_kv_heads} of {heads.head_dim}"


def _table(title: str, names: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right")
    return table


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{x:.0%}"
