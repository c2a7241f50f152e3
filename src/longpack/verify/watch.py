"""Watch a model run: which module attends with what, what each is given and gives."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.observe import observe_attention
from longpack.recompute_replay import is_recomputing


@dataclass(frozen=True)
class Event:
    """One call of one module: tensors whose first dimension is the rows, by argument name."""

    path: str
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


@dataclass
class Watch:
    """What one rank's forward (and recompute) did.

    Args:
        calls: (module, kernel) of every attention call under a step, in the forward.
        recomputed: attention calls in a recompute.
        stock: modules that attended with torch's own attention or softmax.
        events: every module call, where they were asked for, in the order they ended.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    recomputed: int = 0
    stock: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        """The innermost module that is running."""
        return self._open[-1] if self._open else ""

    def hear(self, kernel: str) -> None:
        """Note an attention call under a step."""
        if is_recomputing():
            self.recomputed += 1
        else:
            self.calls.append((self.module, kernel))


@contextmanager
def ranks_apart() -> Iterator[None]:
    """Let ranks that are threads of one process behave like processes.

    The slot of `with step:` is one for all threads of a process, which holds one rank; here each
    thread gets its own. Enter it once, around all ranks.
    """
    with patch.object(state, "_CP_BLOCKDIAG_STATE", _SlotOfThread()):
        yield


@contextmanager
def watch_recompute() -> Iterator[Watch]:
    """Count attention calls of forward and recompute on this rank."""
    watch = Watch()
    with observe_attention(watch.hear):
        yield watch


@contextmanager
def watch_forward(model: torch.nn.Module, rows: int, tensors: bool = False) -> Iterator[Watch]:
    """Watch one forward of this rank's model; what it raises is noted with the module.

    Args:
        model: called inside.
        rows: local rows; a tensor `[1, rows, ...]` or `[rows, ...]` has something on every row.
        tensors: keep what every module is given and gives.
    """
    with watch_recompute() as watch, _StockAttention(watch, rows):
        handles = []
        for path, module in model.named_modules():
            hooks = _hooks(watch, path or type(model).__name__, rows, tensors)
            handles += [
                module.register_forward_pre_hook(hooks[0], with_kwargs=True),
                module.register_forward_hook(hooks[1], with_kwargs=True),
            ]
        try:
            yield watch
        except BaseException as error:
            error.add_note(watch.module)
            raise
        finally:
            for handle in handles:
                handle.remove()


class _Caught(BaseException):
    """Ends a forward that has shown what it is given."""


@contextmanager
def catch_inputs(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the tensors that the model, or the first part that takes tokens, is given by name.

    The forward ends there.
    """
    given: dict[str, torch.Tensor] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = inspect.signature(module.forward).parameters
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if module is model or {"input_ids", "position_ids"} & named.keys():
            tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
            given.update({k: v.detach().cpu() for k, v in tensors.items()})
            raise _Caught

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    try:
        yield given
    except _Caught:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _hooks(watch: Watch, path: str, rows: int, tensors: bool) -> tuple[Any, Any]:
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch._open.append(path)

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        watch._open.pop()
        if tensors:
            named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
            event = Event(path, _per_row(named, rows), _per_row({"out": out}, rows))
            watch.events.append(event)

    return before, after


def _per_row(values: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors that have rows, rows first, by name and place."""
    found = {}
    for name, value in values.items():
        for place, leaf in enumerate(tree_leaves(value)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dim() > 1 and leaf.shape[:2] == (1, rows):
                found[f"{name}.{place}"] = leaf.detach()[0].to("cpu", copy=True)
            elif leaf.dim() > 0 and leaf.shape[0] == rows:
                found[f"{name}.{place}"] = leaf.detach().to("cpu", copy=True)
    return found


class _StockAttention(TorchFunctionMode):
    """Notice attention that torch computes itself: its fused call, or a softmax of rows by rows."""

    def __init__(self, watch: Watch, rows: int) -> None:
        super().__init__()
        self._watch, self._rows = watch, rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        square = isinstance(out, torch.Tensor) and out.shape[-2:] == (self._rows, self._rows)
        if name == "scaled_dot_product_attention" or ("softmax" in name and square):
            self._watch.stock.append(self._watch.module)
        return out


class _SlotOfThread(threading.local):
    """The step slot of one rank."""

    value: Any = None

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> Any:
        token, self.value = self.value, value
        return token

    def reset(self, token: Any) -> None:
        self.value = token
