"""Tell the forward pass from its recompute."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def is_recomputing() -> bool:
    """Return True while autograd runs this code again for a checkpoint.

    The autograd engine gives every backward a number, and code that runs with such a number
    runs inside a backward: a checkpointed region there is being recomputed, with
    `use_reentrant` True or False alike. Grad mode is no such sign: a reentrant forward runs with
    it off and its recompute with it on. Tensor hooks and custom backwards also answer True.
    Inside `torch.compile` the question breaks the graph.
    """
    return torch._C._current_graph_task_id() != -1


def once_per_forward(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Make `fn` run in the forward pass only; in a recompute it returns None.

    For what must happen once a step although its block runs twice: counters, metrics, logs.
    """

    @wraps(fn)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return None if is_recomputing() else fn(*args, **kwargs)

    return guarded
