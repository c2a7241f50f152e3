"""The CUDA and Transformer Engine adapters, with stand-ins of dense math for their kernels.

What is proved here is everything that the adapters do themselves: which arguments they build,
which rows they gather, how they pad heads, where rows and gradients go back to. That the real
kernels mean by those arguments what the stand-ins do, `benchmarks/gpu_check.py` proves on a GPU.
"""

import sys
from types import ModuleType

import pytest
import torch

from longpack.kernels import KernelCall, Segments, varlen
from longpack.kernels.impl import dense, flash_attn_pkg, flash_torch_cuda, te
from longpack.kernels.varlen import attend_varlen

# name: (bounds, num_queries, num_keys, are queries packed already, are keys)
TABLE = {
    "packed": (((0, 3, 0, 3), (3, 8, 3, 8), (8, 9, 8, 9)), 9, 9, True, True),
    "straddle": (((0, 4, 0, 11), (4, 7, 11, 14)), 7, 14, True, True),
    "shared keys": (((0, 3, 0, 3), (3, 6, 0, 12)), 6, 12, True, False),
    "tail padding": (((0, 3, 0, 3), (3, 5, 3, 5)), 8, 8, False, False),
    "padding anywhere": (((2, 5, 1, 4), (6, 8, 4, 9)), 10, 12, False, False),
    "padding only": ((), 5, 3, False, False),
    "no rows": ((), 0, 0, True, True),
}


def packed_attention(query, key, value, cu_q, cu_k, max_q, max_k, scale, causal):
    """Attend packed rows the way the varlen kernels do: causal at the bottom right."""
    assert causal
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    for x in (query, key, value):
        assert x.stride(-1) == 1
        assert not any(n % 8 for n in (*x.stride()[:-1], x.storage_offset()))  # 16 bytes, unchecked
    q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max_q, max_k) == (max(q_lengths), max(k_lengths))
    assert sum(q_lengths) == query.shape[0]
    assert sum(k_lengths) == key.shape[0]
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    for q, k, v in zip(
        query.split(q_lengths), key.split(k_lengths), value.split(k_lengths), strict=True
    ):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def stand_in(query, key, value, index, scale):
    lengths = (index.cu_seqlens_q, index.cu_seqlens_k, index.max_seqlen_q, index.max_seqlen_k)
    return packed_attention(query, key, value, *lengths, scale, causal=True)[0]


def fake_flash_attn(monkeypatch):
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return packed_attention(q, k, v, *lengths, softmax_scale, causal)[0]

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return flash_attn_pkg.attend


def fake_te(monkeypatch):
    class DotProductAttention:
        def __init__(
            self,
            *,
            num_attention_heads,
            kv_channels,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            softmax_scale,
        ):
            assert attention_dropout == 0.0
            assert qkv_format == "thd"
            assert attn_mask_type == "padding_causal_bottom_right"
            self.shapes = (num_attention_heads, kv_channels, num_gqa_groups)
            self.scale = softmax_scale

        def __call__(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
            assert self.shapes == (q.shape[1], q.shape[2], k.shape[1])
            assert all(x.is_contiguous() for x in (q, k, v))
            lengths = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
            return packed_attention(q, k, v, *lengths, self.scale, causal=True)[0].flatten(1)

    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    return te.attend


def fake_torch_cuda(monkeypatch):
    rng_state, unused = torch.tensor([1, 2]), torch.tensor([3])

    def forward_op(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, return_debug_mask, *, scale):
        assert dropout == 0.0
        assert return_debug_mask is False
        out, lse = packed_attention(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal)
        return out, lse, rng_state, unused, torch.empty(0)

    def backward_op(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, un, *, scale
    ):
        assert dropout == 0.0
        assert torch.equal(rng, rng_state)
        assert torch.equal(un, unused)
        assert grad.is_contiguous()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = packed_attention(*leaves, cu_q, cu_k, max_q, max_k, scale, causal)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        return torch.autograd.grad(again[0], leaves, grad)

    monkeypatch.setattr(flash_torch_cuda, "_forward_op", forward_op)
    monkeypatch.setattr(flash_torch_cuda, "_backward_op", backward_op)
    return flash_torch_cuda.attend


def plain(monkeypatch):
    return lambda *args: attend_varlen(stand_in, *args)


ADAPTERS = [plain, fake_flash_attn, fake_te, fake_torch_cuda]


def leaves_for(segments, dims, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = [
        (segments.num_queries, 4, dims[0]),
        (segments.num_keys, 2, dims[0]),
        (segments.num_keys, 2, dims[1]),
        (segments.num_queries, 4, dims[1]),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def run(attend, leaves, segments):
    *inputs, grad_out = leaves
    out = attend(*inputs, segments, 0.3)
    assert out.requires_grad
    return out, *torch.autograd.grad(out, inputs, grad_out.detach())


@pytest.mark.parametrize("dims", [(8, 8), (5, 5), (16, 3), (4, 12)], ids=str)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_equals_dense(adapter, name, dims, monkeypatch):
    segments = Segments(*TABLE[name][:3])
    leaves = leaves_for(segments, dims)
    actual = run(adapter(monkeypatch), leaves, segments)
    expected = run(dense.attend, leaves, segments)
    for part, a, e in zip(("out", "dquery", "dkey", "dvalue"), actual, expected, strict=True):
        assert a.shape == e.shape, part
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-14)
    for start, stop in segments.padding:
        assert not actual[0][start:stop].any()
        assert not actual[1][start:stop].any()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_heads_that_begin_anywhere_are_aligned(adapter, monkeypatch):
    """Keys and values are halves of shared rows of 28 numbers; queries begin one number late."""
    segments = Segments(((0, 4, 0, 6), (4, 7, 6, 9)), 7, 9)
    query, key, value, grad_out = leaves_for(segments, (16, 12))
    late = torch.nn.functional.pad(query.detach().flatten(), (1, 0))[1:].view(query.shape)
    shared = torch.cat([key, value], dim=-1).detach().split([16, 12], dim=-1)
    moved = [x.requires_grad_() for x in (late, *shared)]
    actual = run(adapter(monkeypatch), [*moved, grad_out], segments)
    expected = run(dense.attend, [query, key, value, grad_out], segments)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TABLE)
def test_rows_are_gathered_only_where_they_must_be(name):
    bounds, num_queries, num_keys, queries_packed, keys_packed = TABLE[name]
    index = Segments(bounds, num_queries, num_keys).packed(torch.device("cpu"))
    assert (index.query_index is None) == queries_packed
    assert (index.key_index is None) == keys_packed


def test_packed_arguments_in_numbers():
    segments = Segments(((2, 5, 1, 4), (6, 8, 2, 7)), 10, 12)
    index = segments.packed(torch.device("cpu"))
    assert index.cu_seqlens_q.tolist() == [0, 3, 5]
    assert index.cu_seqlens_k.tolist() == [0, 3, 8]
    assert (index.max_seqlen_q, index.max_seqlen_k) == (3, 5)
    assert index.query_index is not None
    assert index.query_index.tolist() == [2, 3, 4, 6, 7]
    assert index.key_index is not None
    assert index.key_index.tolist() == [1, 2, 3, 2, 3, 4, 5, 6]


def test_shared_keys_sum_their_gradients_in_float32(monkeypatch):
    """The dtype of the sum is looked at, because on CPU a bfloat16 sum would not stall at 256."""
    summed, original = [], torch.Tensor.index_add_

    def spy(total, *args):
        summed.append(total.dtype)
        return original(total, *args)

    monkeypatch.setattr(torch.Tensor, "index_add_", spy)
    segments = Segments(tuple((i, i + 1, 0, 1) for i in range(512)), 512, 1)
    query, key = torch.zeros(512, 1, 8).bfloat16(), torch.zeros(1, 1, 8).bfloat16()
    value = torch.ones(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    out = attend_varlen(stand_in, query, key, value, segments, 1.0)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    assert grad.flatten().tolist() == [512.0] * 8
    assert summed == [torch.float32]


@pytest.mark.parametrize("kernel", [flash_attn_pkg, flash_torch_cuda, te])
def test_reasons_name_every_obstacle(kernel, monkeypatch):
    call = KernelCall("cpu", torch.float32, 4, 2, 64, 512)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reasons = "; ".join(kernel.reasons_against(call))
    assert "runs on cuda, not cpu" in reasons
    assert "no CUDA device" in reasons
    assert "torch.float32 is not float16 or bfloat16" in reasons
    assert "heads of 512 are larger than 256" in reasons


@pytest.mark.parametrize(
    ("kernel", "installed", "reason"),
    [
        (flash_attn_pkg, "2.0.9", "needs flash-attn 2.1, 2.0.9 is installed"),
        (flash_attn_pkg, "2.8.3", None),
        (te, "1.7.0", "needs transformer-engine 1.8, 1.7.0 is installed"),
        (te, "2.4.0", None),
    ],
)
def test_a_capable_device_is_refused_only_for_an_old_package(
    kernel, installed, reason, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(varlen, "installed_version", lambda package: installed)
    call = KernelCall("cuda", torch.bfloat16, 4, 2, 128, 128)
    assert kernel.reasons_against(call) == ([reason] if reason else [])


def test_an_old_device_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    call = KernelCall("cuda", torch.bfloat16, 4, 2, 128, 128)
    assert "needs compute capability 8.0, the device has 7.5" in te.reasons_against(call)
