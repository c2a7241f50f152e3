"""Recompute on an autograd device thread: run by test_on_fake_accelerator.py in its own process.

The engine counts devices at its first backward, so the accelerator must be there before that.
"""

import threading
from contextvars import ContextVar
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longpack.recompute_replay import (
    CarryContextVars,
    RecomputeReplay,
    compose,
    is_recomputing,
    once_per_forward,
    run_uncounted,
)
from longpack.testing.recompute import (
    assert_no_leak,
    fake_accelerator,
    flip_ties,
    run_interleaved,
    zero_bubble_backward,
)

DEVICE = fake_accelerator()
SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


def leaf(start: float = -1.0) -> torch.Tensor:
    return torch.linspace(start, 1, 6, dtype=torch.float64).to(DEVICE).requires_grad_()


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu")


def test_recompute_runs_on_a_worker_thread() -> None:
    names, binding, phases = [], [], []
    channel: RecomputeReplay[int] = RecomputeReplay("any")

    def block(x: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread() is threading.main_thread())
        binding.append((channel.current() or pytest.fail("not bound"))[1])
        phases.append(is_recomputing())
        return x.sin().exp()

    x = leaf()
    checkpoint(block, x, use_reentrant=False, context_fn=compose(channel)).sum().backward()
    assert names == [True, False]
    assert binding == ["record", "replay"]
    assert phases == [False, True]
    plain = host(x).requires_grad_()
    plain.sin().exp().sum().backward()
    assert torch.equal(host(x.grad), plain.grad)


def test_thread_local_state_of_the_caller_is_lost_and_carried_state_is_not() -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(SCALE.get())
        return (x * SCALE.get()).sin().exp()

    for context_fn, expected in ((compose(CarryContextVars(SCALE)), 3.0), (None, 1.0)):
        seen.clear()
        options = {} if context_fn is None else {"context_fn": context_fn}
        token = SCALE.set(3.0)
        checkpoint(block, leaf(), use_reentrant=False, **options).sum().backward()
        SCALE.reset(token)
        assert seen == [3.0, expected]


@pytest.mark.parametrize("order", [["F0", "F1", "B0", "B1"], ["F0", "F1", "B1", "B0"]])
def test_two_microbatches_outstanding(order: list[str]) -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("scale", on_miss="raise")
    draws = iter(range(2, 100))

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * channel.decide(lambda: next(draws), site="scale") * SCALE.get()

    inputs = [leaf(), leaf(0.0)]
    context_fn = compose(channel, CarryContextVars(SCALE))

    def forward(at: int) -> torch.Tensor:
        token = SCALE.set(10.0 * (at + 1))
        out = checkpoint(block, inputs[at], use_reentrant=False, context_fn=context_fn)
        SCALE.reset(token)
        return out.sin().sum()

    run_interleaved([lambda: forward(0), lambda: forward(1)], order)
    for x, factor in zip(inputs, (2 * 10.0, 3 * 20.0), strict=True):
        plain = host(x).requires_grad_()
        (plain.sin() * factor).sin().sum().backward()
        torch.testing.assert_close(host(x.grad), plain.grad, rtol=1e-12, atol=1e-14)


def test_near_ties_dropout_repeats_and_nesting() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order", on_miss="raise")
    weight = torch.ones(6, dtype=torch.float64).to(DEVICE).requires_grad_()
    decided = []

    def block(x: torch.Tensor, checkpointed: bool = True) -> torch.Tensor:
        def choose() -> torch.Tensor:
            decided.append(1)
            return flip_ties(torch.linspace(0, -1e-9, 6, dtype=torch.float64)).topk(3).indices

        order = channel.decide(choose, site="order") if checkpointed else choose()
        return F.dropout((x * weight).sin(), 0.5)[..., order.to(DEVICE)].exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel))
        return inner.sin()

    x = leaf()
    torch.manual_seed(0)
    expected = torch.autograd.grad(block(x, checkpointed=False).sin().sum(), [x, weight])
    decided.clear()
    torch.manual_seed(0)
    out = checkpoint(outer, x, use_reentrant=False, context_fn=compose(channel)).sum()
    (for_x,), ((for_weight,),) = zero_bubble_backward(out, [x], [[weight]])
    assert torch.equal(host(for_x), host(expected[0]))
    assert torch.equal(host(for_weight), host(expected[1]))
    assert len(decided) == 1


def test_records_on_the_device_are_freed_on_its_thread() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("probs")
    weight = torch.ones(6, dtype=torch.float64).to(DEVICE).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        channel.decide(lambda: (x * weight).exp())
        return (x * weight).sin()

    def step() -> None:
        x = leaf()
        out = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel))
        torch.autograd.grad(out.sum(), x)

    assert_no_leak(step)
    assert channel.usage().live_bytes == 0


def test_permuted_layout_metric_and_second_backward() -> None:
    channel: RecomputeReplay[list[int]] = RecomputeReplay("layout", on_miss="raise")
    counted, recorded = [], [0, 2, 4, 1, 3, 5]
    count = once_per_forward(counted.append)

    def block(x: torch.Tensor) -> torch.Tensor:
        count(x.numel())
        order = channel.decide(lambda: recorded[::-1] if is_recomputing() else recorded)
        return x[order].cumsum(0).sin()

    x = leaf()
    out = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel)).sum()
    plain = host(x).requires_grad_()
    plain[recorded].cumsum(0).sin().sum().backward()
    for _ in range(2):
        (grad,) = torch.autograd.grad(out, x, retain_graph=True)
        assert torch.equal(host(grad), plain.grad)
    assert counted == [6]


def test_selective_checkpointing_with_lazily_built_state_and_a_decision() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order", on_miss="raise")
    weight = torch.linspace(0, 1, 36, dtype=torch.float64).view(6, 6)
    tables: list[torch.Tensor] = []

    def save_matmuls(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        matmul = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor) -> torch.Tensor:
        on = weight.to(x.device)
        if not tables:
            tables.append(run_uncounted(lambda: on @ on))
        order = channel.decide(lambda: host(x[None] @ on).argsort(-1)[0])
        return ((x * 2)[None] @ on).sin()[:, order.to(x.device)] @ on @ tables[0].to(x.device)

    x = leaf()
    context_fn = compose(channel, partial(create_selective_checkpoint_contexts, save_matmuls))
    out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    (grad,) = torch.autograd.grad(out.sum(), x)
    plain = host(x).requires_grad_()
    tables.clear()
    (expected,) = torch.autograd.grad(block(plain).sum(), plain)
    assert torch.equal(host(grad), expected)
