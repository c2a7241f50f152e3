"""Merging by log-sum-exp: exact, stable, and quiet where a side has seen nothing."""

import pytest
import torch

from longpack.kernels.merge import merge_


def softmax_parts(scores, value):
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("offset", [0.0, 700.0, -700.0, 5000.0])
def test_merge_of_parts_is_attention_over_the_whole(offset):
    """Scores that differ by hundreds between the parts overflow nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 7, 12, generator=generator, dtype=torch.float64)
    scores[..., 5:] += offset
    value = torch.randn(4, 12, 3, generator=generator, dtype=torch.float64)
    out, lse = softmax_parts(scores[..., :5], value[:, :5])
    merge_(out, lse, *softmax_parts(scores[..., 5:], value[:, 5:]))
    expected_out, expected_lse = softmax_parts(scores, value)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-14, atol=0)


def test_a_side_that_has_seen_nothing_changes_nothing():
    seen, nothing = torch.tensor([[1.5, -2.0]]), torch.zeros(1, 2)
    lse, empty = torch.tensor([0.25]), torch.tensor([-torch.inf])
    for first, second in (((seen, lse), (nothing, empty)), ((nothing, empty), (seen, lse))):
        out, out_lse = (x.clone() for x in first)
        merge_(out, out_lse, *second)
        assert torch.equal(out, seen)
        assert torch.equal(out_lse, lse)
    out, out_lse = nothing.clone(), empty.clone()
    merge_(out, out_lse, nothing, empty)
    assert torch.equal(out, nothing)
    assert torch.equal(out_lse, empty)


def test_low_precision_is_merged_in_the_precision_of_lse():
    """The average of 1 and 1 + 2**-7 in bfloat16 is one rounding away from the exact 1 + 2**-8."""
    out, other = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[1.0 + 2**-7]]).bfloat16()
    lse, other_lse = torch.tensor([0.0]), torch.log(torch.tensor([3.0]))
    merge_(out, lse, other, other_lse)
    assert out.dtype == torch.bfloat16
    assert out.item() == torch.tensor(1.0 + 0.75 * 2**-7).bfloat16().item()
    torch.testing.assert_close(lse, torch.log(torch.tensor([4.0])))
