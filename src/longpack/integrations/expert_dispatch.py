"""Send tokens to the ranks of their experts and back, with a layout that is decided once.

The layout needs a sort, an exchange of counts and a wait of the host for them. All three are one
decision: the checkpoint recompute replays it, and only moves the tokens again.
"""

from dataclasses import dataclass

import torch

from longpack.collectives import Route, Transport, exchange_rows
from longpack.errors import UnsupportedError
from longpack.recompute_replay import RecomputeReplay


@dataclass(frozen=True, eq=False)
class DispatchLayout:
    """One rank's way of its tokens to the experts and back.

    `there` brings the rows of this rank's experts together, sorted by expert, `tokens_per_expert`
    of each; `back` returns them to their tokens, in the order of the flattened expert ids.
    """

    there: Route
    back: Route
    tokens_per_expert: tuple[int, ...]


class ExpertDispatch:
    """Moves tokens between the ranks of an expert-parallel axis.

    Expert `e` lives on rank `e // (num_experts / P)`. Every rank calls every method in the same
    order; checkpoint such a block with `early_stop=False`, since ranks may save different tensors.

    Arguments:
        channel: records the layouts.
        transport: the expert-parallel axis.
        num_experts: over all ranks; a multiple of the world size.
    """

    def __init__(
        self, channel: RecomputeReplay[DispatchLayout], transport: Transport, num_experts: int
    ) -> None:
        if num_experts % transport.world_size:
            raise UnsupportedError(
                f"{num_experts} experts do not divide over {transport.world_size} ranks; "
                "num_experts must be a multiple of the world size"
            )
        self._channel, self._transport, self._num_experts = channel, transport, num_experts

    def layout(self, ids: torch.Tensor, site: str = "") -> DispatchLayout:
        """Return the layout for expert ids `[T, k]`, made in forward and replayed in recompute.

        A collective: it exchanges counts and waits for them.
        """
        return self._channel.decide(
            lambda: plan_dispatch(ids, self._transport, self._num_experts),
            site=site,
            collective=True,
            inputs=ids,
        )

    def dispatch(self, x: torch.Tensor, layout: DispatchLayout) -> torch.Tensor:
        """Return the rows `[R, D]` of this rank's experts, sorted by expert, from tokens `[T, D]`.

        Backward: the gradients of a token's copies travel home and are added.
        """
        return exchange_rows(x, self._transport, layout.there)

    def combine(
        self, y: torch.Tensor, weights: torch.Tensor, layout: DispatchLayout
    ) -> torch.Tensor:
        """Return `[T, D]`, the sum over a token's experts of weight `[T, k]` times row of `y`."""
        rows = exchange_rows(y, self._transport, layout.back)
        return (rows.view(*weights.shape, y.shape[-1]) * weights.unsqueeze(-1)).sum(1)


def plan_dispatch(ids: torch.Tensor, transport: Transport, num_experts: int) -> DispatchLayout:
    """Decide how the tokens of expert ids `[T, k]` travel; exchanges counts, waits for them."""
    tokens, choices = ids.shape
    world_size = transport.world_size
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)  # by expert, and so by rank
    counts = flat.bincount(minlength=num_experts)
    one_each = [1] * world_size
    arriving = transport.all_to_all(counts.view(world_size, -1), one_each, one_each)
    sent = tuple(counts.view(world_size, -1).sum(1).tolist())
    received = tuple(arriving.sum(1).tolist())

    local_expert = torch.arange(arriving.shape[1], device=ids.device).repeat(world_size)
    by_expert = local_expert.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
    rows = sum(received)
    there = Route("a2a", order // choices, sent, received, tokens + by_expert, rows)
    back = Route(
        "a2a", by_expert.argsort(), received, sent, rows + order.argsort(), tokens * choices
    )
    return DispatchLayout(there, back, tuple(arriving.sum(0).tolist()))
