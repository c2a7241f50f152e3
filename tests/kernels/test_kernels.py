"""Every kernel that runs here against an oracle of per-row loops, over one table of segments."""

import math
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longpack.errors import PlanError, UnsupportedError
from longpack.kernels import KERNELS, KernelCall, Segments, attend, choose_kernel
from longpack.kernels.impl import flash_cpu
from longpack.kernels.tiles import CALL_ROWS, GATHERED_ROWS

CPU_KERNELS = ("dense", "flash_cpu")

# name: (bounds, num_queries, num_keys)
TABLE = {
    "one document": ([(0, 9, 0, 9)], 9, 9),
    "tight documents": ([(0, 3, 0, 3), (3, 8, 3, 8), (8, 9, 8, 9)], 9, 9),
    "equal documents": ([(2 * i, 2 * i + 2, 2 * i, 2 * i + 2) for i in range(5)], 10, 10),
    "one-token documents": ([(i, i + 1, i, i + 1) for i in range(6)], 6, 6),
    "straddle": ([(0, 4, 0, 11), (4, 7, 11, 14)], 7, 14),
    "one query, many keys": ([(0, 1, 2, 9)], 1, 9),
    "zigzag shares keys": ([(0, 3, 0, 3), (3, 6, 0, 12)], 6, 12),
    "three parts share keys": ([(0, 2, 0, 2), (2, 4, 0, 6), (4, 6, 0, 11)], 6, 11),
    "padding left, inside, right": ([(2, 5, 1, 4), (6, 8, 4, 9)], 10, 12),
    "equal with a gap in the keys": ([(0, 2, 0, 2), (2, 4, 3, 5)], 4, 5),
    "equal parts apart, keys before": ([(0, 2, 0, 5), (2, 3, 5, 6), (3, 5, 6, 11)], 5, 11),
    "equal parts apart share keys": ([(0, 2, 0, 2), (2, 3, 2, 3), (3, 5, 0, 2)], 5, 3),
    "padding only": ([], 5, 3),
    "padding only, no keys": ([], 5, 0),
    "no rows": ([], 0, 0),
}


def oracle(query, key, value, segments, scale):
    """Attend row by row: nothing but the law in the docstring of Segments."""
    group = query.shape[1] // key.shape[1]
    rows = [query[i].new_zeros(query.shape[1], value.shape[2]) for i in range(query.shape[0])]
    for q_start, q_stop, k_start, k_stop in segments.bounds:
        n = q_stop - q_start
        for i in range(n):
            visible = slice(k_start, k_stop - n + 1 + i)
            k = key[visible].repeat_interleave(group, dim=1)
            v = value[visible].repeat_interleave(group, dim=1)
            weights = (torch.einsum("hd,khd->hk", query[q_start + i], k) * scale).softmax(-1)
            rows[q_start + i] = torch.einsum("hk,khd->hd", weights, v)
    return torch.stack(rows) if rows else query.new_zeros(0, query.shape[1], value.shape[2])


def tensors(segments, dtype=torch.float64, heads=(4, 2), dims=(8, 8), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (segments.num_queries, heads[0], dims[0]),
        (segments.num_keys, heads[1], dims[0]),
        (segments.num_keys, heads[1], dims[1]),
        (segments.num_queries, heads[0], dims[1]),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    *leaves, grad_out = [x.to(dtype) for x in made]
    return [x.requires_grad_() for x in leaves], grad_out


def forward_and_gradients(function, leaves, grad_out):
    out = function(*leaves)
    grads = [None] * len(leaves)
    if out.requires_grad:
        grads = torch.autograd.grad(out, leaves, grad_out, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [out.detach(), *filled]


def assert_close(actual, expected, relative=1e-12):
    for name, a, e in zip(("out", "dquery", "dkey", "dvalue"), actual, expected, strict=True):
        assert a.shape == e.shape, name
        limit = relative * e.abs().max().item() if e.numel() else 0.0
        error = (a - e).abs().max().item() if e.numel() else 0.0
        assert error <= limit, f"{name}: error {error:.3e}, limit {limit:.3e}"


def check(kernel, segments, heads=(4, 2), dims=(8, 8), scale=0.3, seed=0):
    leaves, grad_out = tensors(segments, heads=heads, dims=dims, seed=seed)
    assert attend(kernel, *leaves, segments).requires_grad  # padding alone is in the graph too
    actual = forward_and_gradients(
        lambda q, k, v: attend(kernel, q, k, v, segments, scale), leaves, grad_out
    )
    expected = forward_and_gradients(
        lambda q, k, v: oracle(q, k, v, segments, scale), leaves, grad_out
    )
    assert_close(actual, expected)
    for start, stop in segments.padding:
        assert not actual[0][start:stop].any()
        assert not actual[1][start:stop].any()
    seen = torch.zeros(segments.num_keys, dtype=torch.bool)
    for _, _, k_start, k_stop in segments.bounds:
        seen[k_start:k_stop] = True
    assert not actual[2][~seen].any()
    assert not actual[3][~seen].any()


@pytest.mark.parametrize("dims", [(8, 8), (8, 5), (3, 7)], ids=["equal", "Dk>Dv", "Dk<Dv"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_kernel_equals_the_oracle(kernel, name, heads, dims):
    check(kernel, Segments(*_frozen(*TABLE[name])), heads, dims)


def _frozen(bounds, num_queries, num_keys):
    return tuple(bounds), num_queries, num_keys


@st.composite
def any_segments(draw):
    """Draw segments with padding rows between them and key ranges anywhere, shared or not."""
    bounds, row = [], 0
    num_keys = draw(st.integers(1, 40))
    for _ in range(draw(st.integers(0, 6))):
        row += draw(st.integers(0, 2))
        n = draw(st.integers(1, min(12, num_keys)))
        k_start = draw(st.integers(0, num_keys - n))
        k_stop = draw(st.integers(k_start + n, num_keys))
        bounds.append((row, row + n, k_start, k_stop))
        row += n
    return Segments(tuple(bounds), row + draw(st.integers(0, 2)), num_keys)


@settings(max_examples=60, deadline=None)
@given(
    segments=any_segments(),
    kernel=st.sampled_from(CPU_KERNELS),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (1, 1), (5, 3), (2, 6)]),
    seed=st.integers(0, 100),
)
def test_kernel_equals_the_oracle_on_any_segments(segments, kernel, heads, dims, seed):
    check(kernel, segments, heads, dims, seed=seed)


def documents(lengths, gaps=()):
    """Documents of these lengths, each after so many rows of padding."""
    bounds, row = [], 0
    for n, gap in zip_longest(lengths, gaps[: len(lengths)], fillvalue=0):
        row += gap
        bounds.append((row, row + n, row, row + n))
        row += n
    return Segments(tuple(bounds), row + 1, row + 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=25),
    gaps=st.lists(st.integers(0, 2), max_size=25),
    heads=st.sampled_from([(4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (5, 3)]),
)
def test_short_documents_of_mixed_lengths_cost_one_call_for_each_length(lengths, gaps, heads, dims):
    """Wherever they are in the row; and every row must still land in its place."""
    segments = documents(lengths, gaps)
    check("flash_cpu", segments, heads, dims)
    assert len(segments.tiles) == len(set(lengths))


def mixed_lengths(seed=0):
    """600 documents of 1 to 49 tokens, one-token documents among them, in any order."""
    return torch.randint(1, 50, (600,), generator=torch.Generator().manual_seed(seed)).tolist()


def loop_over_documents(query, key, value, segments, scale):
    """Plain SDPA on each document: what the row costs by hand."""
    out = torch.zeros_like(query)
    for start, stop, *_ in segments.bounds:
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        out[start:stop] = attended[0].transpose(0, 1)
    return out


def test_six_hundred_documents_equal_a_loop_in_a_fifth_of_the_calls(monkeypatch):
    segments = documents(mixed_lengths(), gaps=[0, 0, 3] * 100)
    calls = counted(monkeypatch, flash_cpu, "_forward_op")
    leaves, grad_out = tensors(segments)
    actual, again = (
        forward_and_gradients(
            lambda q, k, v: attend("flash_cpu", q, k, v, segments, 0.3), leaves, grad_out
        )
        for _ in range(2)
    )
    expected = forward_and_gradients(
        lambda q, k, v: loop_over_documents(q, k, v, segments, 0.3), leaves, grad_out
    )
    assert_close(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    long = sum(n > GATHERED_ROWS for n in mixed_lengths())
    short = sum(n for n in mixed_lengths() if n <= GATHERED_ROWS)
    assert len(calls) / 2 <= long + GATHERED_ROWS + 2 * short / CALL_ROWS
    assert all(rows <= CALL_ROWS for rows in calls)


def counted(monkeypatch, module, name):
    """Note the query rows of every call from now on."""
    rows, original = [], getattr(module, name)

    def spy(query, *args, **kwargs):
        rows.append(query.shape[0] * query.shape[2])
        return original(query, *args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return rows


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["straddle", "zigzag", "many parts", "short and mixed"])
def test_low_precision_error_is_at_most_twice_plain_sdpa(kernel, dtype, name):
    """Plain SDPA with the mask, in the same dtype, sets the budget; float64 is the truth."""
    bounds = {
        "straddle": ((0, 200, 0, 500), (200, 256, 500, 556)),
        "zigzag": ((0, 128, 0, 128), (128, 256, 0, 512)),
        "many parts": tuple((32 * i, 32 * i + 32, 0, 64 * i + 64) for i in range(8)),
        "short and mixed": documents([1, 3, 7, 3, 5, 7, 1, 5] * 8).bounds,
    }[name]
    segments = Segments(bounds, 256, max(k_stop for *_, k_stop in bounds))
    leaves, grad_out = tensors(segments, dtype, heads=(4, 2), dims=(32, 32))
    first, stop = segments.key_ranges(torch.device("cpu")).unsqueeze(-1).unbind(1)
    keys = torch.arange(segments.num_keys)
    mask = (keys >= first) & (keys < stop)

    def sdpa(query, key, value):
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    truth = forward_and_gradients(sdpa, exact_leaves, grad_out.double())
    plain = forward_and_gradients(sdpa, leaves, grad_out)
    ours = forward_and_gradients(
        lambda q, k, v: attend(kernel, q, k, v, segments), leaves, grad_out
    )
    for part, exact, budget, got in zip(
        ("out", "dquery", "dkey", "dvalue"), truth, plain, ours, strict=True
    ):
        assert got.dtype == dtype
        allowed = 2 * (budget.double() - exact).norm().item()
        error = (got.double() - exact).norm().item()
        assert error <= allowed, f"{part}: {error:.3e} > {allowed:.3e}"


def test_shared_keys_sum_their_gradients_in_float32():
    """512 contributions of 1 to one bfloat16 row are 512; added in bfloat16 they stop at 256."""
    segments = Segments(tuple((i, i + 1, 0, 1) for i in range(512)), 512, 1)
    query, key = torch.zeros(512, 1, 8).bfloat16(), torch.zeros(1, 1, 8).bfloat16()
    value = torch.ones(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    out = attend("flash_cpu", query, key, value, segments)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    assert grad.flatten().tolist() == [512.0] * 8


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_strides_do_not_matter(kernel):
    """The CPU op reads garbage where the last stride is not 1, so such tensors must be copied."""
    segments = Segments(((0, 5, 0, 9), (5, 8, 9, 12)), 8, 12)
    leaves, grad_out = tensors(segments)
    plain = forward_and_gradients(
        lambda q, k, v: attend(kernel, q, k, v, segments, 0.3), leaves, grad_out
    )

    def odd_strides(x):
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    strided = forward_and_gradients(
        lambda q, k, v: attend(kernel, *map(odd_strides, (q, k, v)), segments, 0.3),
        leaves,
        odd_strides(grad_out),
    )
    assert_close(strided, plain)

    ones = forward_and_gradients(
        lambda q, k, v: attend(kernel, q, k, v, segments, 0.3).sum(), leaves, torch.tensor(1.0)
    )
    full = forward_and_gradients(
        lambda q, k, v: attend(kernel, q, k, v, segments, 0.3), leaves, torch.ones_like(grad_out)
    )
    assert_close(ones, [full[0].sum(), *full[1:]])


def test_padding_rows_may_hold_anything():
    """Padding queries and unseen keys are never read by the flash kernel."""
    segments = Segments(((1, 4, 2, 5),), 6, 7)
    leaves, grad_out = tensors(segments)
    with torch.no_grad():
        leaves[0][[0, 4, 5]] = torch.nan
        for x in leaves[1:]:
            x[[0, 1, 5, 6]] = torch.nan
    results = forward_and_gradients(
        lambda q, k, v: attend("flash_cpu", q, k, v, segments), leaves, grad_out
    )
    assert all(x.isfinite().all() for x in results)


def test_memory_is_linear_in_tokens(monkeypatch):
    """No call that the kernel makes gets or returns more than a few numbers per token."""
    sizes = []
    original = flash_cpu._forward_op

    def spy(*args, **kwargs):
        assert kwargs.keys() == {"is_causal", "scale"}  # no mask
        result = original(*args, **kwargs)
        sizes.append(max(x.numel() for x in (*args, *result)))
        return result

    monkeypatch.setattr(flash_cpu, "_forward_op", spy)
    segments = Segments(((0, 700, 0, 1000), (700, 1000, 700, 1000)), 1000, 1000)
    leaves, _ = tensors(segments)
    attend("flash_cpu", *leaves, segments)
    assert len(sizes) == 3
    assert max(sizes) <= 1000 * 4 * 8


def test_double_backward_raises():
    segments = Segments(((0, 3, 0, 3),), 3, 3)
    leaves, grad_out = tensors(segments)
    out = attend("flash_cpu", *leaves, segments)
    (grad,) = torch.autograd.grad(out, leaves[:1], grad_out.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_two_backwards_of_one_graph_are_equal():
    segments = Segments(((0, 3, 0, 3), (3, 6, 0, 8)), 6, 8)
    leaves, grad_out = tensors(segments)
    out = attend("flash_cpu", *leaves, segments)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_host_work_is_done_once_per_segments():
    segments = Segments(((0, 3, 0, 3),), 3, 3)
    device = torch.device("cpu")
    assert segments.tiles is segments.tiles
    gathered = Segments(((0, 2, 0, 2), (2, 3, 2, 3), (3, 5, 3, 5)), 5, 5).tiles[0].queries
    assert gathered.index is gathered.index
    assert segments.packed(device) is segments.packed(device)
    assert segments.key_ranges(device) is segments.key_ranges(device)


@pytest.mark.parametrize(
    ("bounds", "num_queries", "num_keys"),
    [
        (((0, 0, 0, 1),), 1, 1),
        (((0, 2, 0, 1),), 2, 2),
        (((0, 2, 0, 3),), 2, 2),
        (((0, 3, 0, 3),), 2, 3),
        (((0, 2, 0, 2), (1, 3, 0, 3)), 3, 3),
        (((2, 3, 0, 3), (0, 2, 0, 2)), 3, 3),
        (((0, 1, -1, 1),), 1, 1),
    ],
    ids=["empty", "keys too few", "keys out", "queries out", "overlap", "order", "negative"],
)
def test_bad_bounds_are_refused_with_their_numbers(bounds, num_queries, num_keys):
    with pytest.raises(PlanError, match=r"segment \d has queries \["):
        Segments(bounds, num_queries, num_keys)


def call(**changes):
    facts = {
        "device_type": "cpu",
        "dtype": torch.float32,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "v_head_dim": 64,
    }
    return KernelCall(**{**facts, **changes})


def test_flash_runs_on_cpu_and_says_why():
    choice = choose_kernel("flash", call())
    assert choice.name == "flash_cpu"
    assert "float32 on cpu, 9/3 heads of 64" in str(choice)
    assert "flash_attn (runs on cuda, not cpu" in str(choice)
    assert choose_kernel("dense", call(device_type="mps")).name == "dense"


def test_a_refusal_lists_every_kernel_with_every_reason():
    with pytest.raises(UnsupportedError) as refusal:
        choose_kernel("flash", call(device_type="cuda", head_dim=320, v_head_dim=320))
    text = str(refusal.value)
    for name in ("flash_attn", "flash_torch_cuda", "flash_cpu"):
        assert name in text
    for kernel in ("flash_attn (", "flash_torch_cuda ("):
        reasons = text[text.index(kernel) :]
        assert "torch.float32 is not float16 or bfloat16" in reasons
        assert "heads of 320 are larger than 256" in reasons
    assert "runs on cpu, not cuda" in text

    with pytest.raises(UnsupportedError, match="transformer-engine is not installed"):
        choose_kernel("te", call())
    with pytest.raises(UnsupportedError, match="'sdpa' is not one of dense, flash, te"):
        choose_kernel("sdpa", call())
    with pytest.raises(UnsupportedError, match="int64 is not"):
        choose_kernel("dense", call(dtype=torch.int64))


def test_heads_must_divide():
    with pytest.raises(UnsupportedError, match="9 query heads cannot share 4 key/value heads"):
        call(num_kv_heads=4)


def test_registry_names_are_the_kernels_own():
    assert all(name == kernel.NAME for name, kernel in KERNELS.items())
    assert set(KERNELS) == {"flash_attn", "flash_torch_cuda", "flash_cpu", "te", "dense"}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 2, 4), (3, 2, 4), (3, 2, 4)), "query has 2 rows, segments 3"),
        (((3, 2, 4), (3, 2, 4), (2, 2, 4)), r"\(3, 2\) rows, segments 3"),
        (((3, 2, 4), (3, 2, 4), (3, 1, 4)), "key has 2 heads, value 1"),
        (((3, 2, 4), (3, 2, 5), (3, 2, 4)), "query has head_dim 4, key 5"),
        (((3, 4), (3, 2, 4), (3, 2, 4)), r"\(2, 3, 3\) dims"),
        (((3, 3, 4), (3, 2, 4), (3, 2, 4)), "3 query heads cannot share 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shapes, message):
    segments = Segments(((0, 3, 0, 3),), 3, 3)
    with pytest.raises(UnsupportedError, match=message):
        attend("flash_cpu", *(torch.zeros(shape) for shape in shapes), segments)


def test_mixed_dtypes_and_unusable_names_are_refused():
    segments = Segments(((0, 3, 0, 3),), 3, 3)
    x = torch.zeros(3, 2, 4)
    with pytest.raises(UnsupportedError, match="dtypes are"):
        attend("flash_cpu", x, x, x.bfloat16(), segments)
    with pytest.raises(UnsupportedError, match="kernel 'flash_torch_cuda' cannot run"):
        attend("flash_torch_cuda", x, x, x, segments)
    with pytest.raises(UnsupportedError, match="kernel 'magic' is not one of"):
        attend("magic", x, x, x, segments)


@pytest.mark.parametrize(
    "scale", [0, 0.0, -0.5, math.nan, math.inf, 10**400, True, "1", torch.tensor(0.5)]
)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_scale_that_is_no_positive_number_is_refused(kernel, scale):
    x = torch.zeros(3, 2, 4)
    with pytest.raises(UnsupportedError, match=r"scale=.* \(a number above 0"):
        attend(kernel, x, x, x, Segments(((0, 3, 0, 3),), 3, 3), scale)
