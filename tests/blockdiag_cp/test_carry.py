"""carry_step: models that do not pass the step recompute with the step they ran forward with."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from longpack import CpStep, PackedRow, carry_step, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp.state import cp_attn_fire_count, reset_cp_attn_fire_count
from longpack.collectives import as_transport
from longpack.recompute_replay import compose

A, B = PackedRow.from_lengths([3, 5]), PackedRow.from_lengths([6, 2])


def step_of(row):
    return CpStep.make(plan_step(row, 1), as_transport(None))


def block(x):
    """A model's attention: it knows nothing of steps."""
    return cp_blockdiag_sdpa(x, x * 0.5, x + 1.0)


def expected_gradient(row, x):
    x = x.detach().clone().requires_grad_()
    cp_blockdiag_sdpa(x, x * 0.5, x + 1.0, step=step_of(row)).sum().backward()
    return x.grad


def forward(row, x):
    with step_of(row):
        return checkpoint(block, x, use_reentrant=False, context_fn=compose(carry_step())).sum()


def make():
    return torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("on_another_thread", [False, True])
def test_two_microbatches_outstanding_after_their_blocks_have_closed(on_another_thread):
    a, b = make(), make()
    losses = [forward(A, a), forward(B, b)]
    for loss in losses:
        if on_another_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
    assert torch.equal(a.grad, expected_gradient(A, a))
    assert torch.equal(b.grad, expected_gradient(B, b))
    assert not torch.equal(a.grad, expected_gradient(B, a))


def test_an_open_block_of_another_microbatch_does_not_interfere():
    a = make()
    loss = forward(A, a)
    with step_of(B):
        loss.backward()
    assert torch.equal(a.grad, expected_gradient(A, a))


def test_repeated_and_nested_recomputes():
    a, plain = make(), make()
    plain.data.copy_(a.data)
    context_fn = compose(carry_step())

    def outer(x):
        return checkpoint(block, x, use_reentrant=False, context_fn=context_fn).square()

    with step_of(A):
        loss = checkpoint(outer, a, use_reentrant=False, context_fn=context_fn).sum()
        block(plain).square().sum().backward()
    reset_cp_attn_fire_count()
    first = torch.autograd.grad(loss, a, retain_graph=True)[0]
    assert cp_attn_fire_count() == 2  # the outer recompute and the inner one
    assert torch.equal(first, plain.grad)
    assert torch.equal(torch.autograd.grad(loss, a)[0], first)


def test_no_step_in_forward_is_no_step_in_the_recompute():
    a = make()
    out = checkpoint(block, a, use_reentrant=False, context_fn=compose(carry_step()))
    with step_of(B):
        out.sum().backward()
    plain = a.detach().clone().requires_grad_()
    F.scaled_dot_product_attention(plain, plain * 0.5, plain + 1.0).sum().backward()
    assert torch.equal(a.grad, plain.grad)


def test_nothing_is_carried_outside_a_recompute():
    a = make()
    loss = forward(A, a)
    loss.backward()
    plain = F.scaled_dot_product_attention(a, a * 0.5, a + 1.0)
    assert torch.equal(block(a), plain)
