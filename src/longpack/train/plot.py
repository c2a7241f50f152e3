"""The demo's picture."""

from collections.abc import Sequence
from pathlib import Path

FLOOR = 1e-9  # equal losses have no place on a logarithmic axis


def plot_losses(one: Sequence[float], two: Sequence[float], about: str, path: Path) -> Path:
    """Draw the losses on one rank and on two, and below them how far they are apart.

    Args:
        one, two: loss of each step.
        about: what trained.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    steps = range(1, len(one) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    above.plot(steps, one, color="#9ecae1", linewidth=6, label="1 rank")
    above.plot(steps, two, color="#08306b", linewidth=1.5, label="2 ranks")
    above.set_ylabel("training loss (nats per token)")
    above.set_title(f"{about}\nthe same rows whole on one rank, and each split over two")
    above.legend()
    apart = [max(abs(a - b), FLOOR) for a, b in zip(one, two, strict=True)]
    below.semilogy(
        steps,
        apart,
        "o",
        color="#a50f15",
        markersize=4,
        label="|2 ranks - 1 rank|, at the bottom 0",
    )
    below.axhline(1e-2, color="gray", linestyle=":", label="about what the eye sees above")
    below.set_ylim(FLOOR / 3, 10)
    below.set_ylabel("difference of losses")
    below.set_xlabel("optimizer step (each on other documents)")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(loc="upper right", ncols=2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
