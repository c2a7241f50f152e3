"""A frame is recomputed never, once or many times, and inside itself: always the same choices."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack.errors import ReplayError
from longpack.recompute_replay import RecomputeReplay
from longpack.testing.recompute import run_interleaved, zero_bubble_backward


class Block(torch.nn.Module):
    """Scales its input by a power of two that is another one at every run of `draw`."""

    def __init__(self, channel: RecomputeReplay[int], decisions: int = 2) -> None:
        super().__init__()
        self.channel, self.decisions = channel, decisions
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.drawn: list[int] = []

    def draw(self) -> int:
        self.drawn.append(len(self.drawn) + 1)
        return self.drawn[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.decisions):
            x = (x * self.weight).sin() * 2.0 ** self.channel.decide(self.draw, site="scale")
        return x


@pytest.fixture
def channel() -> RecomputeReplay[int]:
    return RecomputeReplay("scale", on_miss="raise")


def call(block: Callable, x: torch.Tensor, channel: RecomputeReplay, **options) -> torch.Tensor:
    return checkpoint(
        block, x, use_reentrant=False, context_fn=channel.checkpoint_context_fn(None), **options
    )


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)


def plain_gradients(x: torch.Tensor, order: int = 1) -> tuple[torch.Tensor, ...]:
    """The gradients for (x, weight) of the same choices with no checkpoint."""
    block = Block(RecomputeReplay("plain"))
    gradients = torch.autograd.grad(block(x).sum(), (x, block.weight), create_graph=order > 1)
    if order == 1:
        return gradients
    return torch.autograd.grad(gradients[0].pow(2).sum(), (x, block.weight))


def assert_equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("early_stop", [True, False])
def test_retain_graph_and_backward_twice(channel, early_stop: bool) -> None:
    block, x = Block(channel), leaf()
    out = call(block, x, channel, early_stop=early_stop).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(out, (x, block.weight), retain_graph=True)
        assert_equal(gradients, plain_gradients(x))
    assert block.drawn == [1, 2]


def test_partial_gradients(channel) -> None:
    block, x = Block(channel), leaf()
    out = call(block, x, channel).sum()
    (for_x,) = torch.autograd.grad(out, x, retain_graph=True)
    (for_weight,) = torch.autograd.grad(out, block.weight)
    assert_equal((for_x, for_weight), plain_gradients(x))
    assert block.drawn == [1, 2]


def test_double_backward(channel) -> None:
    block, x = Block(channel), leaf()
    out = call(block, x, channel).sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    second = torch.autograd.grad(first.pow(2).sum(), (x, block.weight))
    assert_equal(second, plain_gradients(x, order=2))
    assert block.drawn == [1, 2]


def test_zero_bubble_recomputes_three_times(channel) -> None:
    block, x = Block(channel), leaf()
    runs = []
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return block(x + bias)

    out = call(counted, x, channel).sum()
    (for_x,), ((for_weight,), (for_bias,)) = zero_bubble_backward(
        out, [x], [[block.weight], [bias]]
    )
    assert len(runs) == 4
    assert_equal((for_x, for_weight), plain_gradients(x))
    assert torch.equal(for_bias, for_x)
    assert block.drawn == [1, 2]


@pytest.mark.parametrize(
    "order",
    [
        ["F0", "F1", "B0", "B1"],
        ["F0", "F1", "B1", "B0"],
        ["F0", "B0", "F1", "B1"],
    ],
)
def test_two_microbatches_outstanding(channel, order: list[str]) -> None:
    block = Block(channel, decisions=1)
    inputs = [leaf(), leaf()]
    run_interleaved([lambda x=x: call(block, x, channel).sum() for x in inputs], order)
    assert block.drawn == [1, 2]
    for x, scale in zip(inputs, (2.0, 4.0), strict=True):
        expected = scale * block.weight * torch.cos(x * block.weight)
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("depth", [2, 3])
def test_nested_checkpoints_decide_once(channel, depth: int) -> None:
    block, x, runs = Block(channel), leaf(), []

    def wrap(body: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
        return lambda x: call(body, x, channel).sin()

    def innermost(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return block(x)

    body = innermost
    for _ in range(depth):
        body = wrap(body)
    found = torch.autograd.grad(body(x).sum(), (x, block.weight))
    assert len(runs) == depth + 1
    assert block.drawn == [1, 2]

    plain = Block(RecomputeReplay("plain"))
    out = plain(x)
    for _ in range(depth):
        out = out.sin()
    assert_equal(found, torch.autograd.grad(out.sum(), (x, plain.weight)))


def test_nested_checkpoints_side_by_side_find_their_own_logs(channel) -> None:
    block, x = Block(channel, decisions=1), leaf()

    def outer(x: torch.Tensor) -> torch.Tensor:
        x = call(block, x, channel)
        x = x * channel.decide(block.draw)
        return call(block, x, channel).sin()

    def plain(x: torch.Tensor) -> torch.Tensor:
        x = 2.0 * (x * block.weight).sin() * 2
        return (8.0 * (x * block.weight).sin()).sin()

    out = call(outer, x, channel).sum()
    for _ in range(2):
        gradients = torch.autograd.grad(out, (x, block.weight), retain_graph=True)
        assert_equal(gradients, torch.autograd.grad(plain(x).sum(), (x, block.weight)))
    assert block.drawn == [1, 2, 3]


@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_taken_inside_the_block_reads_a_partial_log(channel, early_stop: bool) -> None:
    block, x, slopes = Block(channel, decisions=1), leaf(), []

    def body(x: torch.Tensor) -> torch.Tensor:
        out = block(x)
        slopes.append(torch.autograd.grad(out.sum(), x, retain_graph=True)[0])
        return block(out)

    gradients = torch.autograd.grad(
        call(body, x, channel, early_stop=early_stop).sum(), (x, block.weight)
    )
    for slope in slopes:
        assert torch.equal(slope, 2.0 * block.weight * torch.cos(x * block.weight))
    # Without early stop the recompute inside the forward runs past the log and decides again;
    # the forward then records the next number, and that is what its own recompute replays.
    last = block.drawn[-1]
    assert last == (2 if early_stop else 3)
    expected = 2.0**last * (2.0 * (x * block.weight).sin() * block.weight).sin()
    assert_equal(gradients, torch.autograd.grad(expected.sum(), (x, block.weight)))


def test_early_stop_leaves_records_unread_without_an_error(channel) -> None:
    block, x = Block(channel, decisions=1), leaf()

    def body(x: torch.Tensor) -> torch.Tensor:
        out = block(x)
        channel.decide(block.draw)  # after the last saved tensor: early stop never comes here
        return out

    call(body, x, channel).sum().backward()
    assert block.drawn == [1, 2]
    assert channel.current() is None


def test_an_exception_in_forward_leaves_no_binding(channel) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        channel.decide(lambda: 1)
        raise KeyError("forward")

    with pytest.raises(KeyError, match="forward"):
        call(body, leaf(), channel)
    assert channel.current() is None
    assert channel.usage().live_bytes == 0


def test_an_exception_in_recompute_leaves_no_binding_and_can_be_repeated(channel) -> None:
    block, x, fail = Block(channel), leaf(), [False]

    def body(x: torch.Tensor) -> torch.Tensor:
        out = block(x)
        if fail[0]:
            raise KeyError("recompute")
        return out.sin()

    out = call(body, x, channel).sum()
    fail[0] = True
    with pytest.raises(KeyError, match="recompute"):
        torch.autograd.grad(out, x, retain_graph=True)
    assert channel.current() is None


def test_no_grad_and_no_backward_keep_nothing(channel) -> None:
    block, x = Block(channel), leaf()
    with torch.no_grad():
        call(block, x, channel)
    call(block, x.detach(), channel)
    assert channel.usage().live_bytes == 0


def test_a_generator_context_is_refused_on_its_second_entry(channel) -> None:
    from contextlib import contextmanager, nullcontext

    @contextmanager
    def single_use():
        yield

    block, x = Block(channel), leaf()
    context_fn = channel.checkpoint_context_fn(lambda: (nullcontext(), single_use()))
    out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum()
    torch.autograd.grad(out, x, retain_graph=True)
    with pytest.raises(ReplayError, match=r"single_use.*second time"):
        torch.autograd.grad(out, x)
    assert channel.current() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_the_channel_is_not_bound_to_is_refused(use_reentrant: bool) -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("scale")
    out = checkpoint(Block(channel), leaf(), use_reentrant=use_reentrant).sum()
    with pytest.raises(ReplayError, match=r"channel 'scale', site 'scale'.*not bound to"):
        out.backward()


def test_a_channel_switched_off_decides_again(channel) -> None:
    block, x = Block(channel, decisions=1), leaf()

    def body(x: torch.Tensor) -> torch.Tensor:
        with channel.scope(None, "replay"):
            return block(x)

    checkpoint(body, x, use_reentrant=False, early_stop=False).sum().backward()
    assert block.drawn == [1, 2]
