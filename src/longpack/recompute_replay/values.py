"""Read and rebuild recorded values: tensors, numbers and opaque handles, nested in containers.

Containers are lists, tuples (named ones too), dicts and dataclasses. Everything else is one leaf.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of `value`, depth first."""
    children = _children(value)
    if children is None:
        yield value
    else:
        for _, child in children:
            yield from leaves(child)


def detached(value: Any) -> Any:
    """Return `value` with no tensor that requires grad; the same object where there is none.

    A record that keeps its gradient graph is part of a cycle through C++ that the garbage
    collector cannot see: frame -> record -> grad_fn -> saved tensor -> frame.
    """
    if isinstance(value, Tensor):  # the common case, a function call shorter
        return value.detach() if value.requires_grad else value
    return map_tensors(detached, value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `fn` applied to its tensors; parts that do not change are not copied."""
    if isinstance(value, Tensor):
        return fn(value)
    children = _children(value)
    if children is None:
        return value
    changed = [(key, new) for key, old in children if (new := map_tensors(fn, old)) is not old]
    return _with(value, changed) if changed else value


def fingerprint(value: Any) -> Any:
    """Return what an in-place change of `value` would change: versions, identities, constants.

    Tensors tell by their version counter and containers by their content. A leaf of any other
    kind is watched by identity alone.
    """
    if isinstance(value, Tensor):
        try:
            return id(value), value._version
        except RuntimeError:  # an inference tensor has none; asking first costs more
            return id(value), None
    if isinstance(value, _CONSTANTS):
        return (value,)  # a tuple compares by identity first, so that NaN equals itself
    children = _children(value)
    if children is None:
        return id(value)
    return id(value), tuple((key, fingerprint(child)) for key, child in children)


def nbytes(value: Any) -> int:
    """Return the bytes of the leaves of `value`: of a tensor its elements."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(leaf.nbytes if isinstance(leaf, Tensor) else sys.getsizeof(leaf)
               for leaf in leaves(value))  # fmt: skip


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _with(value: Any, changed: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, tuple):
        items = list(value)
        for index, new in changed:
            items[index] = new
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # pyright: ignore
    rebuilt = copy.copy(value)
    for key, new in changed:
        if dataclasses.is_dataclass(rebuilt):
            object.__setattr__(rebuilt, key, new)  # frozen ones too: the copy is ours
        else:
            rebuilt[key] = new
    return rebuilt
