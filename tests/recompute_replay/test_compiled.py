"""Compiled blocks record and replay through an opaque operator."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from longpack.recompute_replay import (
    IdCodec,
    RecomputeReplay,
    compiled_decision,
    compose,
    save_decisions,
)

ROUTES: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes", on_miss="raise")
RUNS: list[int] = []


def choose(scores: torch.Tensor, k: int) -> torch.Tensor:
    RUNS.append(1)  # another choice at every run
    return torch.topk(scores * (-1) ** len(RUNS), k).indices


def shape(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int64)


choose_once = compiled_decision(ROUTES, choose, name="choose", fake=shape, codec=IdCodec(8))


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scores = x @ weight
    ids = choose_once(scores, 2)
    shifted = (ids + 1) % scores.shape[-1]  # may reuse the memory of ids
    picked = scores.gather(-1, ids) + scores.gather(-1, shifted).sin()
    return picked.exp().sin()


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]


def expected() -> list[torch.Tensor]:
    RUNS.clear()
    given = tensors()
    return list(torch.autograd.grad(block(*given).sum(), given))


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_block_inside_a_checkpoint_decides_once(backend: str) -> None:
    wanted = expected()
    RUNS.clear()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    given = tensors()
    out = checkpoint(compiled, *given, use_reentrant=False, context_fn=compose(ROUTES)).sum()
    for _ in range(2):
        assert_close(list(torch.autograd.grad(out, given, retain_graph=True)), wanted)
    assert len(RUNS) == 1


def test_the_memory_of_a_result_may_be_reused() -> None:
    """A compiler writes into buffers that it needs no more, and no version counter tells."""
    first = compiled_decision(ROUTES, arange, name="first_ids")
    given: list[list[int]] = []

    def reuse(x: torch.Tensor) -> torch.Tensor:
        ids = first(x)
        given.append(ids.tolist())
        ids.fill_(7)
        return x.sin().exp()

    x = torch.ones(4, requires_grad=True)
    checkpoint(reuse, x, use_reentrant=False, context_fn=compose(ROUTES)).sum().backward()
    assert given == [[0, 1, 2, 3]] * 2


def arange(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0])


def test_a_checkpoint_inside_a_compiled_region_saves_the_decision() -> None:
    wanted = expected()
    RUNS.clear()
    context_fn = partial(create_selective_checkpoint_contexts, save_decisions())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, weight, use_reentrant=False, context_fn=context_fn).sum()

    given = tensors()
    assert_close(list(torch.autograd.grad(region(*given), given)), wanted)
    assert len(RUNS) == 1


def test_the_policy_saves_decisions_in_eager_and_asks_the_other_policy() -> None:
    wanted = expected()
    RUNS.clear()
    asked = []

    def other(ctx, op, *args, **kwargs):
        asked.append(op)
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, save_decisions(other))
    given = tensors()
    out = checkpoint(block, *given, use_reentrant=False, context_fn=context_fn).sum()
    assert_close(list(torch.autograd.grad(out, given)), wanted)
    assert len(RUNS) == 1
    assert torch.ops.aten.mm.default in asked
    assert not any(op.namespace == "longpack_replay" for op in asked)


def test_a_plain_decision_in_a_compiled_block_breaks_the_graph_and_is_right() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("scale", on_miss="raise")
    runs = []

    def draw() -> int:
        runs.append(1)
        return 2 * len(runs)

    @torch.compile(backend="eager")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * channel.decide(draw)).exp()

    x = torch.linspace(0, 1, 4).requires_grad_()
    checkpoint(scaled, x, use_reentrant=False, context_fn=compose(channel)).sum().backward()
    plain = x.detach().clone().requires_grad_()
    (plain.sin() * 2).exp().sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert len(runs) == 1
