"""What attention refuses before anything moves."""

import math

import numpy as np
import pytest
import torch

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.collectives import Loopback, as_transport
from longpack.errors import CollectiveError, StepError, UnsupportedError


def call(step=None, **changed):
    step = step or CpStep.make(plan_step(PackedRow.from_lengths([4]), 1), as_transport(None))
    tensors = {name: torch.ones(1, 2, 4, 4) for name in ("query", "key", "value")}
    return cp_blockdiag_sdpa(**{**tensors, "step": step, **changed})


@pytest.mark.parametrize(
    "scale", [0.0, -0.5, math.nan, math.inf, 10**400, True, "1", torch.tensor(0.5)]
)
@pytest.mark.parametrize("name", ["flash", "dense"])
def test_a_scale_that_is_no_positive_number(scale, name):
    plan = plan_step(PackedRow.from_lengths([4]), 1)
    with pytest.raises(UnsupportedError, match="scale="):
        call(CpStep.make(plan, as_transport(None), attn_backend=name), scale=scale)


def test_a_scale_of_numpy_is_a_number():
    assert torch.equal(call(scale=np.float64(0.5)), call(scale=0.5))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"query": np.ones((1, 2, 4, 4))}, "query is ndarray, no tensor"),
        ({"key": torch.ones(1, 2, 4, 4).to_sparse()}, "key is a tensor of layout torch.sparse"),
        ({"key": torch.ones(1, 0, 4, 4)}, r"key is \(1, 0, 4, 4\), without heads"),
        ({"query": torch.ones(1, 2, 4, 0)}, "query is .*, without heads"),
        ({"step": "step"}, "step is str"),
    ],
)
def test_what_is_no_attention_input(changed, said):
    with pytest.raises(StepError, match=said):
        call(**changed)


@pytest.mark.parametrize("name", ["attn_mask", "is_causal", "enable_gqa"])
def test_flags_of_another_type(name):
    with pytest.raises(UnsupportedError, match=f"{name}=str"):
        call(**{name: "no"})


@pytest.mark.parametrize("exchange", ["a2a", "allgather"])
def test_ranks_with_other_head_sizes_are_told(exchange):
    plan = plan_step(PackedRow.from_lengths([8]), 2, kv_exchange=exchange)

    def body(t):
        value = torch.ones(1, 2, 4, 4 + t.rank)
        return call(CpStep.make(plan, t), value=value)

    with pytest.raises(CollectiveError, match="different shapes or dtypes"):
        Loopback(2, timeout_s=20).run(body)
