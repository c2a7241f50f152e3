"""Drive checkpointed code the way pipelines, accelerators and near ties do, on a laptop.

`run_interleaved` and `zero_bubble_backward` run backwards in the orders of pipeline schedules,
`flip_ties` makes a recompute choose differently, `assert_no_leak` counts tensors that stay, and
`fake_accelerator` recomputes on an autograd device thread without an accelerator.
"""

import atexit
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from longpack.errors import UnsupportedError
from longpack.recompute_replay import is_recomputing


def run_interleaved(
    forwards: Sequence[Callable[[], torch.Tensor]], order: Sequence[str]
) -> list[torch.Tensor]:
    """Run the forwards and backwards of several microbatches in a given order.

    Arguments:
        forwards: one function a microbatch, returning its scalar loss.
        order: "F0" runs the forward of microbatch 0 and "B0" its backward, as in
            `["F0", "F1", "B0", "B1"]`.

    Returns:
        The detached losses by microbatch.
    """
    losses: dict[int, torch.Tensor] = {}
    for action, microbatch in ((step[0], int(step[1:])) for step in order):
        if action == "F":
            losses[microbatch] = forwards[microbatch]()
        elif action == "B":
            losses[microbatch].backward()
            losses[microbatch] = losses[microbatch].detach()
        else:
            raise UnsupportedError(f"order={order!r}: a step is F or B and a number, as in 'F0'")
    return [losses[microbatch].detach() for microbatch in range(len(forwards))]


def zero_bubble_backward(
    loss: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weight_groups: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Take input gradients first and weight gradients later, group by group, from one graph.

    A checkpointed frame between them is recomputed once for the inputs and once a weight group.

    Returns:
        The gradients of `inputs`, and those of each group.
    """
    input_grads = list(torch.autograd.grad(loss, list(inputs), retain_graph=True))
    weight_grads = [
        list(torch.autograd.grad(loss, list(group), retain_graph=at + 1 < len(weight_groups)))
        for at, group in enumerate(weight_groups)
    ]
    return input_grads, weight_grads


def flip_ties(scores: torch.Tensor, by: float = 1e-6) -> torch.Tensor:
    """Return `scores` in forward, and in a recompute with a ramp over the last dim of `by` at most.

    Where the best scores of a row are closer than `by`, a top-k chooses other indices in the
    recompute. The gradient is that of `scores`.
    """
    ramp = torch.linspace(0, by, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return scores + (ramp if is_recomputing() else torch.zeros_like(ramp))


def live_tensors() -> int:
    """Return how many tensors Python can reach, after a garbage collection."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def assert_no_leak(step: Callable[[], Any], warmup_steps: int = 2, steps: int = 3) -> None:
    """Run `step` and assert that it leaves no more tensors after a run than after the warm-up.

    Records that keep their gradient graph leak through C++, where no garbage collector sees the
    cycle; they show here as one more tensor a step.
    """
    for _ in range(warmup_steps):
        step()
    expected = live_tensors()
    for at in range(steps):
        step()
        found = live_tensors()
        assert found <= expected, (
            f"{found - expected} tensors more after step {at + 1} than after warm-up ({expected})"
        )


class FakeDeviceTensor(torch.Tensor):
    """A tensor that says it is on the fake accelerator; its numbers are in `host`, on the CPU."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "FakeDeviceTensor":
        fake = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("fake", 0),
        )
        fake.host = host
        return fake

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _on_host(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"fake({self.host!r})"


@cache
def fake_accelerator() -> torch.device:
    """Register an accelerator named "fake" in this process and return its device.

    `tensor.to("fake")` and `module.to("fake")` work, and backward of such tensors runs on a
    worker thread of autograd, as on a real accelerator: thread-local state set by the caller of
    backward is not seen there. The engine counts devices when it first starts, so call this
    before the first backward of the process, in a process of its own. The device guard of torch
    for Python backends cannot unwind: an exception inside a backward ends the process.
    """
    _setup_privateuseone_for_python_backend(rename="fake", backend_module=_FakeModule())
    for name in ("empty.memory_format", "empty_strided"):
        _LIBRARY.impl(name, _factory(name), "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    # The worker leaves its guards, which call Python, after it has woken the caller of backward.
    atexit.register(time.sleep, 0.1)
    return torch.device("fake", 0)


_LIBRARY = torch.library.Library("aten", "IMPL")  # registrations live as long as this object


class _FakeModule:
    """What `torch.fake` must answer: one device, and the random stream of the CPU."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def device(self, index: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, index: Any = 0) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, index: Any = 0) -> None:
        torch.default_generator.set_state(state)


def _factory(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: _on_host(op, args, kwargs)


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    _host(target).copy_(_host(source))
    return target


def _on_host(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on the host tensors and give its results the device that was asked for."""
    device = kwargs.get("device")
    host_args, host_kwargs = tree_map(_host, (args, kwargs))
    if device is not None:
        host_kwargs["device"] = torch.device("cpu")
    result = op(*host_args, **host_kwargs)
    if device is not None and torch.device(device).type == "cpu":
        return result
    # An in-place op returns its argument, and must return the same fake tensor.
    fakes = {id(leaf.host): leaf for leaf in tree_flatten((args, kwargs))[0]
             if isinstance(leaf, FakeDeviceTensor)}  # fmt: skip
    return tree_map(lambda leaf: _fake(leaf, fakes), result)


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, FakeDeviceTensor) else leaf


def _fake(leaf: Any, fakes: dict[int, FakeDeviceTensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return fakes[id(leaf)] if id(leaf) in fakes else FakeDeviceTensor(leaf)
