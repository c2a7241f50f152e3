"""Run work outside the checkpoint: unseen by autograd, by selective checkpointing, by channels."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import (
    _len_torch_dispatch_stack,
    _set_grad_enabled,
    default_generator,
    is_grad_enabled,
)
from torch.utils._python_dispatch import _disable_current_modes

R = TypeVar("R")


class _Outside(threading.local):
    def __init__(self) -> None:
        self.running: list[Callable[[], Any]] = []  # by this thread, innermost last


_OUTSIDE = _Outside()


def is_outside() -> bool:
    """Return True inside work that runs outside the checkpoint; every channel is off there."""
    return bool(_OUTSIDE.running)


def run_outside(fn: Callable[[], R]) -> R:
    """Call `fn` with no gradient, no dispatch mode and no channel; its random draws count.

    A checkpointed block must do the same countable work in forward and in recompute. Work that
    runs in only one of them must not be counted: saved tensors are counted by the checkpoint,
    ops by selective checkpointing, decisions by channels.
    """
    # The C calls take 0.1 us; the `torch.no_grad()` context takes 1.1 us.
    running, grad = _OUTSIDE.running, is_grad_enabled()
    running.append(fn)
    _set_grad_enabled(False)
    try:
        if _len_torch_dispatch_stack():
            with _disable_current_modes():
                return fn()
        return fn()
    finally:
        _set_grad_enabled(grad)
        running.pop()


def run_uncounted(fn: Callable[[], R]) -> R:
    """Call `fn` outside the checkpoint and put the random stream back afterwards.

    For what a block builds on its first run and finds built on its second, such as a table made
    by `if self.table is None: self.table = run_uncounted(build)`.
    """
    before = RandomState()
    try:
        return run_outside(fn)
    finally:
        before.restore()


class RandomState:
    """The random streams of the CPU and of the current accelerator device, as they are now.

    A copy takes 0.5 us and 5,056 bytes for the CPU. To find out whether a decision drew numbers, so
    that one that did not needs no copy, costs more: the CPU generator has no counter, and comparing
    two copies takes 0.7 us and a dispatch mode 1.8 us.
    """

    __slots__ = ("_cpu", "_device")

    def __init__(self) -> None:
        self._cpu = default_generator.get_state()
        accelerator = torch.accelerator.current_accelerator()
        self._device = None if accelerator is None else _device_state(accelerator)

    def restore(self) -> None:
        """Continue both streams from here."""
        default_generator.set_state(self._cpu)
        if self._device is not None:
            module, index, state = self._device
            module.set_rng_state(state, *index)

    @property
    def nbytes(self) -> int:
        return self._cpu.nbytes + (0 if self._device is None else self._device[2].nbytes)


def _device_state(accelerator: torch.device) -> tuple[Any, tuple[int, ...], torch.Tensor] | None:
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":  # one device, which its functions do not name
        return module, (), module.get_rng_state()
    if not module.is_initialized():
        return None
    index = (module.current_device(),)
    return module, index, module.get_rng_state(*index)
