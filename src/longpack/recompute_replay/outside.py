"""Run work outside the checkpoint: unseen by autograd, by selective checkpointing, by channels."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

R = TypeVar("R")


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


def is_outside() -> bool:
    """Return True inside work that runs outside the checkpoint; every channel is off there."""
    return _DEPTH.value > 0


def run_outside(fn: Callable[[], R]) -> R:
    """Call `fn` with no gradient, no dispatch mode and no channel; its random draws count.

    A checkpointed block must do the same countable work in forward and in recompute. Work that
    runs in only one of them must not be counted: saved tensors are counted by the checkpoint,
    ops by selective checkpointing, decisions by channels.
    """
    # The C calls take 0.1 us; the `torch.no_grad()` context takes 1.1 us.
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    _DEPTH.value += 1
    try:
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                return fn()
        return fn()
    finally:
        _DEPTH.value -= 1
        torch._C._set_grad_enabled(grad)


def run_uncounted(fn: Callable[[], R]) -> R:
    """Call `fn` outside the checkpoint and put the random stream back afterwards.

    For what a block builds on its first run and finds built on its second, such as a table made
    by `if self.table is None: self.table = run_uncounted(build)`.
    """
    before = RandomState.capture()
    try:
        return run_outside(fn)
    finally:
        before.restore()


@dataclass(slots=True)  # frozen would cost 0.3 us a decision
class RandomState:
    """The random streams of the CPU and of the current accelerator device, at one moment."""

    cpu: torch.Tensor
    device: tuple[Any, tuple[int, ...], torch.Tensor] | None

    @classmethod
    def capture(cls) -> "RandomState":
        """Copy both streams; 0.6 us and 5,056 bytes for the CPU."""
        return cls(torch.default_generator.get_state(), _device_state())

    def restore(self) -> None:
        """Continue both streams from here."""
        torch.default_generator.set_state(self.cpu)
        if self.device is not None:
            module, index, state = self.device
            module.set_rng_state(state, *index)

    @property
    def nbytes(self) -> int:
        return self.cpu.nbytes + (0 if self.device is None else self.device[2].nbytes)


def _device_state() -> tuple[Any, tuple[int, ...], torch.Tensor] | None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":  # one device, which its functions do not name
        return module, (), module.get_rng_state()
    if not module.is_initialized():
        return None
    index = (module.current_device(),)
    return module, index, module.get_rng_state(*index)
