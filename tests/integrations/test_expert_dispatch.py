"""Expert-parallel dispatch: exact against one rank, and its layout decided once."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack.collectives import Loopback, Transport
from longpack.errors import ReplayError, UnsupportedError
from longpack.integrations.expert_dispatch import DispatchLayout, ExpertDispatch
from longpack.recompute_replay import RecomputeReplay, compose, is_recomputing

EXPERTS, CHOICES, DIM = 4, 2, 6


def weights() -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64, generator=source)


def tokens(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, expert ids and weights of one rank; its own generator, as ranks are threads."""
    source = torch.Generator().manual_seed(rank + 1)
    x = torch.randn(count, DIM, dtype=torch.float64, generator=source)
    ids = torch.rand(count, EXPERTS, generator=source).topk(CHOICES).indices
    return x, ids, torch.rand(count, CHOICES, dtype=torch.float64, generator=source)


def dense(x, ids, gates, experts) -> torch.Tensor:
    return torch.einsum("tk,tkij,tj->ti", gates, experts[ids], x).sin()


class Counted:
    """A transport that counts its exchanges of counts, which are integers."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.count_exchanges = transport, 0
        self.rank, self.world_size = transport.rank, transport.world_size

    def all_to_all(self, x, send_counts, receive_counts, direct=False):
        self.count_exchanges += not x.is_floating_point()
        return self._transport.all_to_all(x, send_counts, receive_counts, direct)

    def __getattr__(self, name):
        return getattr(self._transport, name)


@pytest.mark.parametrize("counts", [(5,), (5, 3), (4, 0), (1, 2, 0, 3)], ids=str)
@pytest.mark.parametrize("checkpointed", [True, False])
def test_gradients_equal_one_rank_and_counts_are_exchanged_once(counts, checkpointed) -> None:
    channel: RecomputeReplay[DispatchLayout] = RecomputeReplay("dispatch")
    world_size = len(counts)
    owned = EXPERTS // world_size

    def body(transport: Transport):
        counted = Counted(transport)
        dispatch = ExpertDispatch(channel, counted, EXPERTS)
        x, ids, gates = tokens(transport.rank, counts[transport.rank])
        mine = weights()[transport.rank * owned :][:owned].clone().requires_grad_()
        x.requires_grad_()
        gates.requires_grad_()

        def block(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
            # A recompute that would permute the tokens of an expert: the record is replayed.
            layout = dispatch.layout(ids.flip(1) if is_recomputing() else ids)
            rows = dispatch.dispatch(x, layout).split(layout.tokens_per_expert)
            out = torch.cat([r @ w.T for r, w in zip(rows, mine, strict=True)])
            return dispatch.combine(out, gates, layout).sin()

        if checkpointed:
            out = checkpoint(
                block, x, gates, use_reentrant=False, context_fn=compose(channel), early_stop=False
            )
        else:
            out = block(x, gates)
        return [*torch.autograd.grad(out.sum(), [x, gates, mine])], counted.count_exchanges

    found = Loopback(world_size).run(body)

    experts = weights().requires_grad_()
    given = [tokens(rank, count) for rank, count in enumerate(counts)]
    total = torch.zeros_like(experts)
    for rank, (x, ids, gates) in enumerate(given):
        leaves = [x.requires_grad_(), gates.requires_grad_(), experts]
        for_x, for_gates, for_experts = torch.autograd.grad(
            dense(x, ids, gates, experts).sum(), leaves
        )
        torch.testing.assert_close(found[rank][0][0], for_x, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[rank][0][1], for_gates, rtol=1e-12, atol=1e-13)
        total += for_experts
    for rank in range(world_size):
        mine = total[rank * owned :][:owned]
        torch.testing.assert_close(found[rank][0][2], mine, rtol=1e-12, atol=1e-13)
        assert found[rank][1] == 1


def test_a_lost_layout_raises_before_its_collective() -> None:
    channel: RecomputeReplay[DispatchLayout] = RecomputeReplay("dispatch")
    _, recompute = channel.checkpoint_context_fn(None)()

    def body(transport: Transport) -> None:
        counted = Counted(transport)
        dispatch = ExpertDispatch(channel, counted, EXPERTS)
        with recompute, pytest.raises(ReplayError, match=r"channel 'dispatch', site 'layer 3'"):
            dispatch.layout(torch.zeros(2, CHOICES, dtype=torch.int64), site="layer 3")
        assert counted.count_exchanges == 0

    Loopback(2).run(body)


def test_experts_must_divide() -> None:
    def body(transport: Transport) -> None:
        with pytest.raises(UnsupportedError, match="3 experts do not divide over 2 ranks"):
            ExpertDispatch(RecomputeReplay("dispatch"), transport, 3)

    Loopback(2).run(body)
