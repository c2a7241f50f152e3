"""Structured but wrong values: odd scalars, and mutations of tensors that were right."""

import array
import enum
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Shade(enum.Enum):
    FLASH = "flash"


class TextShade(enum.StrEnum):
    FLASH = "flash"


NUMBERS: list[Any] = [
    True, False, 0, 1, 2, 3, -1, -7, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30,
    0.0, 0.5, 1.0, 2.0, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, 2 + 0j, 1j,
    np.int64(2), np.int8(-1), np.uint64(2**63 + 5), np.float32(1.5), np.float64("nan"),
    np.bool_(False), np.bool_(True), np.longdouble(2), np.datetime64("2020-01-01"),
]  # fmt: skip
THINGS: list[Any] = [
    None, "", " ", "x", "2", "nan", "\ud800", "\x00", "ü" * 300, b"", b"flash", bytearray(b"2"),
    [], [1], [[1, 2], [3]], (), (1, 2), {}, {"a": 1}, {1, 2}, range(3), object(), print, int,
    slice(1), Shade.FLASH, TextShade.FLASH, NotImplemented, ..., memoryview(b"ab"),
    array.array("i", [1, 2]), np.array(3), np.array([]), np.array(["a"]), np.array([None]),
]  # fmt: skip


def anything(rng: random.Random) -> Any:
    """Return some odd value."""
    makers = (torch.tensor, lambda n: torch.full((2, 2), n), lambda n: torch.tensor([n]))
    if rng.random() < 0.1:
        return rng.choice(makers)(rng.choice([0, 1, 3, 0.5, math.nan, True]))
    return rng.choice(rng.choice([NUMBERS, THINGS]))


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.complex64, torch.complex128,
]  # fmt: skip
POKES = [-1, -2, 0, 1, 2, 5, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]
FLOAT_POKES = [0.5, -0.5, math.nan, math.inf, -math.inf, 1e30, 1e19, -1e300]


def _poke(rng: random.Random, x: torch.Tensor, value: Any) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        x.view(-1)[rng.randrange(x.numel())] = value
    return x


def _repeat_neighbour(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().reshape(-1)
    if x.numel() > 1:
        at = rng.randrange(1, x.numel())
        x[at] = x[at - 1]
    return x.view(-1)


def _reshaped(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    sizes = [n for n in range(1, x.numel() + 1) if x.numel() % n == 0] or [1]
    rows = rng.choice(sizes)
    return x.reshape(rows, x.numel() // rows)


def _resized(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    dim = rng.randrange(x.dim()) if x.dim() else 0
    if not x.dim():
        return x
    cut = x.narrow(dim, 0, rng.randrange(x.shape[dim] + 1))
    return rng.choice([cut, torch.cat([x, cut], dim)])


def _array(x: torch.Tensor) -> np.ndarray:
    return np.array(x.tolist()) if x.dtype in (torch.bfloat16, torch.float8_e4m3fn) else x.numpy()


def _object_array(x: torch.Tensor, value: Any) -> np.ndarray:
    out = np.array(x.tolist(), dtype=object)
    if out.size:
        out.reshape(-1)[-1] = value
    return out


MUTATIONS: dict[str, Callable[[random.Random, torch.Tensor], Any]] = {
    "dtype": lambda r, x: x.to(r.choice(DTYPES)),
    "poke": lambda r, x: _poke(r, x.long(), r.choice(POKES)),
    "float_poke": lambda r, x: _poke(r, x.double(), r.choice(FLOAT_POKES)),
    "low_float_poke": lambda r, x: _poke(r, x.bfloat16(), r.choice(FLOAT_POKES)),
    "neighbour": lambda r, x: _repeat_neighbour(r, x).reshape(x.shape),
    "swap": lambda r, x: x.flatten()[torch.randperm(x.numel())].reshape(x.shape),
    "numpy": lambda _, x: _array(x),
    "list": lambda _, x: x.tolist(),
    "tuple": lambda _, x: tuple(x.tolist()) if x.dim() else (x.item(),),
    "tensors": lambda _, x: list(x.reshape(-1)),
    "strings": lambda _, x: [str(n) for n in x.reshape(-1).tolist()],
    "string_array": lambda _, x: _array(x).astype(str),
    "objects": lambda r, x: _object_array(x, r.choice([1, None, "a", 2**70, 0.5, 1 + 0j])),
    "uint64": lambda _, x: _array(x).astype(np.uint64) + np.uint64(2**63),
    "dates": lambda _, x: _array(x).astype("datetime64[s]"),
    "masked": lambda _, x: np.ma.masked_equal(x.tolist(), 1),
    "ragged": lambda _, x: [[1, 2], *x.tolist()] if x.dim() else [[1], [2, 3]],
    "flat": lambda _, x: x.reshape(-1),
    "one_more_dim": lambda r, x: x.unsqueeze(r.randrange(x.dim() + 1)),
    "transposed": lambda _, x: x.transpose(0, -1) if x.dim() else x,
    "reshaped": _reshaped,
    "resized": _resized,
    "empty": lambda _, x: x.new_empty(0),
    "no_rows": lambda _, x: x.new_empty((0, *x.shape[1:])),
    "scalar": lambda _, x: x.new_tensor(1),
    "expanded": lambda _, x: x.reshape(-1)[:1].expand(x.shape) if x.dim() and x.numel() else x,
    "strided": lambda _, x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    "flipped_numpy": lambda _, x: _array(x)[..., ::-1] if x.dim() else x,
    "meta": lambda _, x: x.to("meta"),
    "sparse": lambda _, x: x.double().to_sparse() if x.dim() else x,
    "csr": lambda _, x: x.double().to_sparse_csr() if x.dim() == 2 else x,
    "nested": lambda _, x: torch.nested.nested_tensor(list(x.float())) if x.dim() > 1 else x,
    "grad": lambda _, x: x.double().requires_grad_(),
    "conjugate": lambda _, x: x.to(torch.complex64).conj(),
    "generator": lambda _, x: iter(x.reshape(-1).tolist()),
    "anything": lambda r, _: anything(r),
}


def mutate(rng: random.Random, x: torch.Tensor) -> Any:
    """Return a tensor of numbers made wrong, or only unusual, in one way."""
    plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested
    if not plain or x.is_meta or x.requires_grad or x.is_conj():  # has been mutated before
        return anything(rng)
    with warnings.catch_warnings(action="ignore"):
        return MUTATIONS[rng.choice(list(MUTATIONS))](rng, x)
