"""What a model keeps when a step is over: numbers that it counted, and graphs that it holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Numbers = Mapping[str, torch.Tensor]


def kept_numbers(model: torch.nn.Module) -> Numbers:
    """Return the model's buffers, and the numbers and tensors that its modules hold, by name."""
    found: dict[str, Any] = dict(model.named_buffers())
    for name, value in _attributes(model):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value), dtype=torch.float64)
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}


def changed_numbers(ours: Numbers, theirs: Numbers, tolerance: float) -> list[str]:
    """Return the names of what differs by more than a tolerance, relative to the largest value."""
    both = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    return [name for name in both if not _is_near(ours[name], theirs[name], tolerance)]


def kept_graphs(model: torch.nn.Module) -> list[str]:
    """Return the attributes of modules that keep activations alive after backward.

    Backward frees what it passes; a tensor of a branch that no loss needs still holds its own.
    """
    held = (
        name
        for name, value in _attributes(model)
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and _holds_activations(leaf)
    )
    return list(dict.fromkeys(held))


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield f"{path}.{name}".lstrip("."), value


def _is_near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    scale = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _holds_activations(tensor: torch.Tensor) -> bool:
    seen, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if any(isinstance(value, torch.Tensor) and not value.is_leaf for value in _saved(node)):
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


def _saved(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                yield from tree_leaves(getattr(node, name))
            except RuntimeError:  # torch: backward has freed them
                return
