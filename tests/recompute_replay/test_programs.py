"""Any tree of checkpointed calls, in any order of backwards, decides once and is exact."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from longpack.recompute_replay import RecomputeReplay, compose

# A block is a list: None is a decision, and a list is a checkpointed call inside.
BLOCKS = st.recursive(
    st.lists(st.none(), min_size=1, max_size=3),
    lambda inner: st.lists(st.none() | inner, min_size=1, max_size=3),
    max_leaves=6,
)


def run(block: list, x: torch.Tensor, decide: Callable, call: Callable, site: str) -> torch.Tensor:
    for at, step in enumerate(block):
        if step is None:
            x = (x * decide(f"{site}.{at}")).sin()
        else:
            x = call(partial(run, step, decide=decide, call=call, site=f"{site}.{at}"), x).exp()
    return x


def decisions(block: list) -> int:
    return sum(1 if step is None else decisions(step) for step in block)


def numbers() -> Iterator[float]:
    return iter(1.0 + n / 7 for n in range(10_000))  # another one at every draw


@settings(deadline=None, max_examples=40)
@given(blocks=st.lists(BLOCKS, min_size=1, max_size=2), backwards=st.data(), stop=st.booleans())
def test_a_program_of_checkpointed_calls(blocks, backwards, stop) -> None:
    channel: RecomputeReplay[float] = RecomputeReplay("numbers", on_miss="raise")
    options = {"use_reentrant": False, "context_fn": compose(channel), "early_stop": stop}
    inputs = [torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_() for _ in blocks]

    plain = numbers()
    expected = [
        torch.autograd.grad(
            run(block, x, lambda site: next(plain), lambda body, x: body(x), "b").sum(), x
        )[0]
        for block, x in zip(blocks, inputs, strict=True)
    ]

    drawn, source = [], numbers()

    def draw() -> float:
        drawn.append(1)
        return next(source)

    def decide(site: str) -> float:
        return channel.decide(draw, site=site)

    def call(body: Callable, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x, **options)

    losses = [
        call(partial(run, block, decide=decide, call=call, site="b"), x).sum()
        for block, x in zip(blocks, inputs, strict=True)
    ]
    microbatches = list(range(len(blocks))) * 2  # every frame twice
    for at in backwards.draw(st.permutations(microbatches)):
        (grad,) = torch.autograd.grad(losses[at], inputs[at], retain_graph=True)
        assert torch.equal(grad, expected[at])
    assert len(drawn) == sum(map(decisions, blocks))
    losses.clear()
    assert channel.usage().live_bytes == 0
