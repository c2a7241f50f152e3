"""decide(): one decision a forward, aligned with what torch counts, whatever it is made of."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longpack.errors import ReplayError
from longpack.recompute_replay import (
    AgreeOnMiss,
    RecomputeReplay,
    RecomputeReplayRecorder,
    compose,
    is_recomputing,
    run_uncounted,
)
from longpack.testing.recompute import assert_no_leak, flip_ties

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Layout:
    counts: tuple[int, ...]
    order: torch.Tensor


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, save_matmuls)


def gradients(block, x: torch.Tensor, weights, context_fn=None, **options) -> list[torch.Tensor]:
    """Gradients of `block`, checkpointed unless `context_fn` is None."""
    if context_fn is not None:
        block = partial(checkpoint, block, use_reentrant=False, context_fn=context_fn, **options)
    return list(torch.autograd.grad(block(x).pow(2).sum(), [x, *weights]))


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class Routed(torch.nn.Module):
    """A router of near ties and two linear experts; `decide` makes or replays the routes."""

    def __init__(self, channel: RecomputeReplay | None, ties: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.channel, self.ties = channel, ties
        self.gate = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.experts = torch.nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64))
        # Every expert has the same score but for 1e-9 that prefers the first.
        torch.nn.init.constant_(self.gate.weight, 0.1)
        self.gate.bias.data = torch.linspace(0, -1e-9, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)

        def choose() -> torch.Tensor:
            near = flip_ties(scores) if self.ties else scores
            return near.detach().topk(2, dim=-1).indices

        ids = choose() if self.channel is None else self.channel.decide(choose, site="gate")
        weights = scores.softmax(-1).gather(-1, ids)
        return torch.einsum("tk,tkij,tj->ti", weights, self.experts[ids], x).sin()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(6, 8, dtype=torch.float64, requires_grad=True)


def test_a_near_tie_that_flips_in_the_recompute_replays_the_recorded_choice(x) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes")
    expected_model = Routed(None, ties=False)
    expected = gradients(expected_model, x, expected_model.parameters())
    model = Routed(channel)
    found = gradients(model, x, model.parameters(), compose(channel))
    assert_equal(found, expected)

    unbound = Routed(None)
    wrong = gradients(unbound, x, unbound.parameters(), lambda: compose(channel)())
    assert not torch.equal(wrong[0], expected[0])  # torch says nothing


def test_a_layout_that_is_built_in_another_order_is_replayed(x) -> None:
    channel: RecomputeReplay[list[int]] = RecomputeReplay("layout")

    def block(x: torch.Tensor) -> torch.Tensor:
        order = list(range(6))
        permuted = channel.decide(lambda: order[::-1] if is_recomputing() else order)
        return x[permuted].cumsum(0).sin()

    assert_equal(
        gradients(block, x, [], compose(channel)), gradients(lambda x: x.cumsum(0).sin(), x, [])
    )


@pytest.mark.parametrize("selective_outside", [True, False])
def test_selective_checkpointing_is_not_misaligned_by_a_skipped_decision(
    x, selective_outside: bool
) -> None:
    """Decision and block use matmuls of equal shape: shifted by one, torch says nothing."""
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order")
    torch.manual_seed(2)
    router, weight = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    weight.requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        order = channel.decide(lambda: (x @ router).argsort(0))
        return (x.sin() @ weight).gather(0, order).sin() @ weight

    expected = gradients(block, x, [weight])
    parts = (SELECTIVE, channel) if selective_outside else (channel, SELECTIVE)
    assert_equal(gradients(block, x, [weight], compose(*parts)), expected)


def test_lazily_built_state_under_selective_checkpointing(x) -> None:
    """`if self.table is None` runs in forward only; built uncounted it shifts nothing."""
    torch.manual_seed(3)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def make_block():
        tables: list[torch.Tensor] = []

        def build() -> torch.Tensor:
            return torch.rand(6, 8, dtype=torch.float64) @ weight  # a matmul and random numbers

        def block(x: torch.Tensor) -> torch.Tensor:
            if not tables:
                tables.append(run_uncounted(build))
            return F.dropout(x * tables[0], 0.5).sin() @ weight

        return block

    torch.manual_seed(4)
    expected = gradients(make_block(), x, [weight])
    torch.manual_seed(4)
    assert_equal(gradients(make_block(), x, [weight], SELECTIVE), expected)


@pytest.mark.parametrize("recompute_draws", [True, False])
def test_random_decisions_leave_the_dropout_stream_alone(x, recompute_draws: bool) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order")
    masks = []

    def block(x: torch.Tensor) -> torch.Tensor:
        x = x[channel.decide(lambda: torch.randperm(6))]
        dropped = F.dropout(x, 0.5)
        masks.append(dropped.detach() == 0)
        return dropped.sin().exp()

    context_fn = compose(channel)
    torch.manual_seed(5)
    expected = gradients(block, x, [])
    torch.manual_seed(5)
    if recompute_draws:
        with channel.verify() as report:
            found = gradients(block, x, [], context_fn)
        assert (report.checked, report.drifts) == (1, [])
    else:
        found = gradients(block, x, [], context_fn)
    assert_equal(found, expected)
    assert len(masks) == 3
    assert torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("draws", [True, False])
def test_a_checkpoint_that_keeps_no_random_state_leaves_the_stream_where_it_was(draws, x) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order")

    def block(x: torch.Tensor) -> torch.Tensor:
        order = channel.decide(lambda: torch.randperm(6) if draws else torch.arange(6))
        return x[order].sin().exp()

    out = checkpoint(
        block, x, use_reentrant=False, context_fn=compose(channel), preserve_rng_state=False
    ).sum()
    torch.rand(3)
    before = torch.get_rng_state()
    out.backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_random_streams_stay_aligned_through_nested_checkpoints(preserve_rng_state, x) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("order", on_miss="raise")

    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x[channel.decide(lambda: torch.randperm(6))], 0.5).sin().exp()

    def call(body, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            body,
            x,
            use_reentrant=False,
            context_fn=compose(channel),
            preserve_rng_state=preserve_rng_state,
        )

    def outer(x: torch.Tensor, call) -> torch.Tensor:
        x = x[channel.decide(lambda: torch.randperm(6))]
        return F.dropout(call(inner, x), 0.5).sin()

    torch.manual_seed(5)
    expected = torch.autograd.grad(outer(x, lambda body, x: body(x)).sum(), x)
    torch.manual_seed(5)
    out = call(partial(outer, call=call), x).sum()
    if preserve_rng_state:  # without, only what follows a decision of the same call is repeated
        assert_equal(list(torch.autograd.grad(out, x)), list(expected))
    else:
        before = torch.get_rng_state()
        torch.autograd.grad(out, x)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_copied_model_shares_its_channel() -> None:
    model = Routed(RecomputeReplay("routes"))
    assert copy.deepcopy(model).channel is model.channel


@pytest.mark.parametrize(
    "value",
    [
        3,
        None,
        [1, 2, 3],
        Pair(1, "two"),
        {"ids": torch.arange(3), "n": 4},
        Layout((1, 2), torch.arange(3)),
        object(),
        [Pair(torch.arange(2), {"deep": (1.5, float("nan"))})],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_kind_of_decision_comes_back_as_the_same_object(value: Any, x) -> None:
    channel: RecomputeReplay[Any] = RecomputeReplay("any")
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(channel.decide(lambda: value if not is_recomputing() else "fresh"))
        return x.sin().exp()

    gradients(block, x, [], compose(channel))
    assert len(seen) == 2
    assert seen[0] is value
    assert seen[1] is value


def test_tensors_with_a_graph_are_recorded_detached(x) -> None:
    channel: RecomputeReplay[Any] = RecomputeReplay("any")
    forward, recompute = channel.checkpoint_context_fn(None)()
    with forward:
        graph = x.sin()
        given = channel.decide(lambda: [Layout((1,), graph), {"x": Pair(x * 2, 3)}])
        recorder, _ = channel.current() or pytest.fail("not bound")
        recorder.record([graph])
    assert not given[0].order.requires_grad
    assert torch.equal(given[0].order, graph)
    assert (type(given[1]["x"]), given[1]["x"].right) == (Pair, 3)
    with recompute:
        assert channel.decide(list) is given
        (again,) = recorder.take() or pytest.fail("no record")
        assert not again.requires_grad


@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "view", "nested"])
def test_a_record_that_is_changed_in_place_is_found_and_named(kind: str, x) -> None:
    channel: RecomputeReplay[Any] = RecomputeReplay("layout")
    ids = torch.arange(4)
    make, change = {
        "tensor": (lambda: ids, lambda r: r.add_(1)),
        "list": (lambda: [1, 2], lambda r: r.append(3)),
        "dict": (lambda: {"a": 1}, lambda r: r.update(a=2)),
        "view": (lambda: ids, lambda r: ids[1:].zero_()),
        "nested": (lambda: (Layout((1,), ids), 2), lambda r: r[0].order.zero_()),
    }[kind]

    def block(x: torch.Tensor) -> torch.Tensor:
        record = channel.decide(make, site="counts")
        if not is_recomputing():
            change(record)
        return x.sin().exp()

    with pytest.raises(ReplayError, match=r"'layout', site 'counts'.*changed in place"):
        gradients(block, x, [], compose(channel))


def test_a_taken_record_that_was_changed_in_place_is_found() -> None:
    recorder: RecomputeReplayRecorder[torch.Tensor] = RecomputeReplayRecorder()
    ids = torch.arange(3)
    recorder.record(ids)
    ids[0] = 9
    with pytest.raises(ReplayError, match=r"record 0.*changed in place"):
        recorder.take()


def test_decisions_inside_a_decision_are_part_of_it(x) -> None:
    outer: RecomputeReplay[int] = RecomputeReplay("outer")
    inner: RecomputeReplay[int] = RecomputeReplay("inner")
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        first = outer.decide(lambda: inner.decide(lambda: 1, site="inside") + 1, site="outside")
        seen.append((first, inner.decide(lambda: 5 + len(seen), site="after")))
        return x.sin().exp()

    gradients(block, x, [], compose(outer, inner))
    assert seen == [(2, 5), (2, 5)]


def test_a_decision_that_raises_records_nothing() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("any")
    forward, _ = channel.checkpoint_context_fn(None)()

    def fail() -> int:
        raise KeyError

    with forward:
        with pytest.raises(KeyError):
            channel.decide(fail)
        recorder, mode = channel.current() or pytest.fail("not bound")
        assert (len(recorder), mode) == (0, "record")
        assert torch.is_grad_enabled()


def test_outside_a_checkpoint_a_decision_is_made_the_same_way(x) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("any")
    assert not channel.decide(lambda: x * 2).requires_grad


@pytest.mark.parametrize("with_backward", [True, False])
def test_a_record_with_an_unused_gradient_branch_is_freed_after_the_step(with_backward) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("probs")
    weight = torch.ones(4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        probs = (x * weight).exp()  # a side branch that no backward goes through
        bound = channel.current() or pytest.fail("not bound")
        if bound[1] == "record":
            bound[0].record(probs)
        channel.decide(lambda: probs)
        return (x * weight).sin()

    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        out = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel))
        if with_backward:
            torch.autograd.grad(out.sum(), x)

    assert_no_leak(step)
    assert channel.usage().live_bytes == 0
    assert channel.usage().peak_bytes > 0


def test_records_are_freed_as_each_block_ends_while_the_loss_is_held() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("ids", preserve_random=False)
    live = []

    def block(x: torch.Tensor) -> torch.Tensor:
        channel.decide(lambda: torch.zeros(100, dtype=torch.uint8))
        return x.sin().exp()

    x = torch.ones(4, requires_grad=True)
    hidden = x
    for _ in range(3):
        hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=compose(channel))
        hidden.register_hook(lambda g: live.append(channel.usage().live_bytes))
    assert channel.usage().live_bytes == 300
    loss = hidden.sum()
    loss.backward()
    assert live == [300, 200, 100]
    assert channel.usage().live_bytes == 0


def test_checkpoint_wrapper(x) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes")
    plain = Routed(None, ties=False)
    expected = gradients(plain, x, plain.parameters())
    wrapped = checkpoint_wrapper(Routed(channel), context_fn=compose(channel))
    for _ in range(2):
        found = torch.autograd.grad(wrapped(x).pow(2).sum(), [x, *wrapped.parameters()])
        assert_equal(list(found), expected)


def test_a_vote_on_misses_is_not_counted_by_selective_checkpointing(x) -> None:
    weight = torch.linspace(0, 1, 64, dtype=torch.float64).view(8, 8).requires_grad_()

    def any_rank(missing: bool) -> bool:
        return bool((x.detach() @ weight.detach()).sum().isnan())  # a matmul like the block's

    channel: RecomputeReplay[int] = RecomputeReplay("scale", on_miss=AgreeOnMiss(any_rank))

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ weight * channel.decide(lambda: 2)).sin() @ weight

    expected = gradients(block, x, [weight])
    assert_equal(gradients(block, x, [weight], compose(channel, SELECTIVE)), expected)


class Accelerator:
    """The random functions of a device module; of one device with no number, or of several."""

    def __init__(self, numbered: bool) -> None:
        self.state, self.numbered = torch.tensor([1]), numbered

    def is_initialized(self) -> bool:
        assert self.numbered  # torch.mps has no such function
        return True

    def current_device(self) -> int:
        assert self.numbered
        return 3

    def get_rng_state(self, *device: int) -> torch.Tensor:
        assert device == ((3,) if self.numbered else ())
        return self.state

    def set_rng_state(self, state: torch.Tensor, *device: int) -> None:
        assert device == ((3,) if self.numbered else ())
        self.state = state


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_random_stream_of_the_device_is_kept(kind: str, monkeypatch) -> None:
    module = Accelerator(numbered=kind != "mps")
    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    channel: RecomputeReplay[int] = RecomputeReplay("any")

    def draw() -> int:
        module.state = module.state + 1
        return 5

    forward, recompute = channel.checkpoint_context_fn(None)()
    with forward:
        channel.decide(draw)
    assert module.state.item() == 2
    module.state = torch.tensor([1])  # as the checkpoint sets it
    with recompute:
        channel.decide(draw)
        assert module.state.item() == 2
    assert module.state.item() == 1
