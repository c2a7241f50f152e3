"""The report's pictures, as SVG. They need matplotlib (extra `plot`)."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

OWN, STILL, ROUNDING, LEAK = "#2166ac", "#f7f7f7", "#d9d9d9", "#b2182b"
MOST_NUMBERED = 12  # documents whose cells still have room for a number


def draw_boundaries(moved: Sequence[Sequence[float]], limit: float, lengths: Sequence[int]) -> str:
    """Draw which documents move when one is changed; only the diagonal should.

    Args:
        moved: by changed and by looked-at document, relative to the largest logit.
        limit: what rounding may move.
        lengths: tokens of each document.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    number = len(moved)
    kinds = [[_kind(d, e, moved[d][e], limit) for e in range(number)] for d in range(number)]
    size = 2.6 + 0.55 * min(number, MOST_NUMBERED)
    figure = Figure(figsize=(size + 3.2, size), layout="constrained")
    axes = figure.subplots()
    colors = [STILL, ROUNDING, LEAK, OWN]
    axes.imshow(kinds, cmap=ListedColormap(colors), vmin=0, vmax=3)
    if number <= MOST_NUMBERED:
        for d in range(number):
            for e in range(number):
                color = "white" if kinds[d][e] > 1 else "black"
                axes.text(e, d, _short(moved[d][e]), ha="center", va="center", color=color, size=8)
    names = [f"{i}  ({n} token{'s' * (n != 1)})" for i, n in enumerate(lengths)]
    axes.set_xticks(range(number), names, rotation=45, ha="right")
    axes.set_yticks(range(number), names)
    axes.set_xlabel("document whose logits are compared")
    axes.set_ylabel("document whose tokens were changed")
    axes.set_xticks([i - 0.5 for i in range(1, number)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, number)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    meaning = {
        OWN: "moved by its own change (right)",
        STILL: "did not move (right)",
        ROUNDING: "moved by rounding alone (right)",
        LEAK: "moved by another document (a leak)",
    }
    used = {colors[kind] for row in kinds for kind in row}
    patches = [
        Patch(facecolor=color, edgecolor="gray", label=text)
        for color, text in meaning.items()
        if color in used
    ]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)
    return _svg(figure)


def draw_gradients(
    all_ranks: Mapping[str, float],
    one_rank: Mapping[str, float],
    budget: Mapping[str, float],
    world_size: int,
) -> str:
    """Draw the error of every parameter's gradient beside what is allowed, layer by layer.

    Args:
        all_ranks, one_rank, budget: relative errors by quantity, in the model's order.
        world_size: ranks.
    """
    from matplotlib.figure import Figure

    names = [name for name in all_ranks if name != "logits"]
    values = [v for table in (all_ranks, one_rank, budget) for v in table.values()]
    above = [v for v in values if v > 0 and math.isfinite(v)]
    floor, top = min(above, default=1e-9) / 5, max(above, default=1.0) * 5
    clip = lambda v: min(max(v, floor), top) if math.isfinite(v) else top  # noqa: E731
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    x = range(len(names))
    allowed = [budget[n] - floor for n in names]
    axes.bar(x, allowed, bottom=floor, width=1.0, color="#e5e5e5", label="allowed for the dtype")
    one = [clip(one_rank.get(n, 0.0)) for n in names]
    axes.plot(x, one, "o", markersize=7, mfc="none", mec="#4d4d4d", label="packed on 1 rank")
    for color, label, wanted in (
        (OWN, f"packed on {world_size} ranks", False),
        (LEAK, f"packed on {world_size} ranks, more than allowed", True),
    ):
        at = [i for i, n in enumerate(names) if (not all_ranks[n] <= budget[n]) is wanted]
        if at:
            axes.plot(
                at, [clip(all_ranks[names[i]]) for i in at], "o", color=color, markersize=4,
                label=label,
            )  # fmt: skip
    _mark_layers(axes, names)
    axes.set_yscale("log")
    axes.set_ylim(floor, top)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylabel("difference of the gradient\nfrom documents one by one, relative")
    axes.set_xlabel("parameters, in the model's order")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return _svg(figure)


def _mark_layers(axes: Any, names: Sequence[str]) -> None:
    """Name groups of parameters of one layer on the x axis, as many as there is room for."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(layer_of(name), []).append(i)
    middles = [sum(at) / len(at) for at in groups.values()]
    every = math.ceil(len(groups) / 24)
    axes.set_xticks(middles[::every], list(groups)[::every], rotation=30, ha="right")
    axes.tick_params(axis="x", length=0)
    for at in groups.values():
        axes.axvline(at[-1] + 0.5, color="white", linewidth=1.5)


def layer_of(parameter: str) -> str:
    """Return the part of a parameter's name that says its layer, as `layers.3` or `norm`."""
    parts = parameter.split(".")[:-1] or [parameter]
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[max(i - 1, 0) : i + 1])
    return parts[-1]


def _kind(changed: int, looked_at: int, moved: float, limit: float) -> int:
    if changed == looked_at:
        return 3 if moved else 0
    return 0 if moved == 0 else 1 if moved <= limit else 2


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()
