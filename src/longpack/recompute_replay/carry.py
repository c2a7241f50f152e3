"""Ambient state: captured where the forward of a checkpointed call starts, entered again in its
recompute, which may run later, elsewhere, and while other state is current."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from longpack.errors import ReplayError

S = TypeVar("S")


@runtime_checkable
class Carry(Protocol):
    """State to carry from the forward of a checkpointed call to its recompute."""

    def capture(self) -> AbstractContextManager[Any]:
        """Return a context that makes the state of this moment current.

        It is entered once a recompute: any number of times, and on any thread.
        """
        ...


class CarryState(Generic[S]):
    """Carries what `read` returns; `enter` of it is the context of the recompute.

    Arguments:
        read: returns the state that is current.
        enter: returns a context that makes a state current; called once a recompute, so that a
            `@contextmanager` function will do.
    """

    def __init__(
        self, read: Callable[[], S], enter: Callable[[S], AbstractContextManager[Any]]
    ) -> None:
        self._read, self._enter = read, enter

    def capture(self) -> AbstractContextManager[Any]:
        """Return a context that enters the state that is current now."""
        return Reentered(self._enter, self._read())


class Reentered(Generic[S]):
    """A context that can be entered again, out of a function that makes contexts."""

    __slots__ = ("_enter", "_open", "_state")

    def __init__(self, enter: Callable[[S], AbstractContextManager[Any]], state: S) -> None:
        self._enter, self._state = enter, state
        self._open: dict[int, list[AbstractContextManager[Any]]] = {}

    def __enter__(self) -> None:
        context = self._enter(self._state)
        context.__enter__()
        self._open.setdefault(get_ident(), []).append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._open[get_ident()].pop().__exit__(kind, error, trace)


class CarryContextVars:
    """Carries the values of context variables.

    A `ContextVar` set around a forward has its default again when the recompute runs: the `with`
    has ended, or another microbatch has set it, or the recompute runs on another thread.
    """

    def __init__(self, *variables: ContextVar[Any]) -> None:
        self._variables = variables

    def capture(self) -> AbstractContextManager[Any]:
        """Return a context that sets the variables to the values they have now.

        Raises:
            ReplayError: for a variable that has neither a value nor a default.
        """
        values = []
        for variable in self._variables:
            try:
                values.append((variable, variable.get()))
            except LookupError:
                raise ReplayError(
                    f"{variable.name!r} has no value where the checkpointed call starts, so there "
                    "is none to carry to its recompute; set it before the call, or give the "
                    "ContextVar a default="
                ) from None
        return Reentered(_SetVariables, tuple(values))


class _SetVariables:
    def __init__(self, values: tuple[tuple[ContextVar[Any], Any], ...]) -> None:
        self._values = values
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] = []

    def __enter__(self) -> None:
        self._tokens = [(variable, variable.set(value)) for variable, value in self._values]

    def __exit__(self, *exception: object) -> None:
        for variable, token in reversed(self._tokens):
            variable.reset(token)


def carry_sdpa_backends() -> Carry:
    """Carry which backends `scaled_dot_product_attention` may use, as set by `sdpa_kernel`."""
    return CarryState(_enabled_sdpa_backends, sdpa_kernel)


def _enabled_sdpa_backends() -> list[SDPBackend]:
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    return [backend for backend, is_enabled in enabled.items() if is_enabled()]
