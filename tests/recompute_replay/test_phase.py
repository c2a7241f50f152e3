"""The forward pass and its recompute are told apart, so that a metric is counted once."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack.recompute_replay import is_recomputing, once_per_forward


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_is_recognised(use_reentrant: bool) -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_recomputing())
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()


def test_nested_forward_inside_an_outer_recompute_is_a_recompute() -> None:
    seen = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_recomputing())
        return x.sin().exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x, use_reentrant=False).sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_a_metric_in_a_checkpointed_block_is_counted_once() -> None:
    counts = {"tokens": 0}

    @once_per_forward
    def count(tokens: int) -> int:
        counts["tokens"] += tokens
        return tokens

    def block(x: torch.Tensor) -> torch.Tensor:
        count(x.numel())
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert counts["tokens"] == 3
