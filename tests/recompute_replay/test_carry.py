"""Ambient state of the forward is current again in its recompute, wherever and whenever it runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from longpack.errors import ReplayError
from longpack.recompute_replay import (
    CarryContextVars,
    CarryState,
    RecomputeReplay,
    carry_sdpa_backends,
    compose,
)
from longpack.testing.recompute import run_interleaved

SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@contextmanager
def scaled(by: float) -> Iterator[None]:
    token = SCALE.set(by)
    try:
        yield
    finally:
        SCALE.reset(token)


def block(x: torch.Tensor) -> torch.Tensor:
    return (x * SCALE.get()).sin().exp()


CARRIES = {
    "variables": CarryContextVars(SCALE),
    "factory": CarryState(SCALE.get, scaled),
}


def slope(x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.cos(scale * x) * torch.exp(torch.sin(scale * x))


@pytest.mark.parametrize("carry", CARRIES.values(), ids=CARRIES)
def test_two_microbatches_outstanding_and_backward_after_the_context_closed(carry) -> None:
    inputs = [torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_() for _ in range(2)]

    def forward(x: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with scaled(scale):
                return checkpoint(block, x, use_reentrant=False, context_fn=compose(carry)).sum()

        return run

    forwards = [forward(inputs[0], 3.0), forward(inputs[1], 5.0)]
    run_interleaved(forwards, ["F0", "F1", "B0", "B1"])
    for x, scale in zip(inputs, (3.0, 5.0), strict=True):
        torch.testing.assert_close(x.grad, slope(x.detach(), scale), rtol=1e-12, atol=0)
    assert SCALE.get() == 1.0


@pytest.mark.parametrize("carry", CARRIES.values(), ids=CARRIES)
def test_recompute_on_another_thread_and_twice(carry) -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    with scaled(3.0):
        out = checkpoint(block, x, use_reentrant=False, context_fn=compose(carry)).sum()
    found = []
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: found.append(torch.autograd.grad(out, x, retain_graph=True)[0])
        )
        thread.start()
        thread.join()
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], slope(x.detach(), 3.0), rtol=1e-12, atol=0)


def test_nested_calls_carry_what_the_outer_call_carried() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    channel: RecomputeReplay[int] = RecomputeReplay("any")
    context_fn = compose(channel, CARRIES["variables"])

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sin()

    with scaled(3.0):
        expected = torch.autograd.grad(outer(x).sum(), x)
        out = checkpoint(outer, x, use_reentrant=False, context_fn=context_fn).sum()
    assert torch.equal(torch.autograd.grad(out, x)[0], expected[0])


def test_a_variable_without_a_value_is_refused() -> None:
    bare: ContextVar[int] = ContextVar("bare")
    with pytest.raises(ReplayError, match="'bare' has no value"):
        compose(CarryContextVars(bare))()


def test_attention_backends_are_carried() -> None:
    enabled = torch.backends.cuda.flash_sdp_enabled
    seen = []

    def attend(x: torch.Tensor) -> torch.Tensor:
        seen.append(enabled())
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        out = checkpoint(
            attend, x, use_reentrant=False, context_fn=compose(carry_sdpa_backends())
        ).sum()
    outside = enabled()
    out.backward()
    assert seen == [False, False]
    assert enabled() == outside
