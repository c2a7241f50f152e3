"""Put something around the forward of chosen submodules, and take it off again."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from longpack.errors import UnsupportedError

Forward = Callable[..., Any]


class Wrapped:
    """The submodules whose forward is wrapped; `sites` are their names in the model."""

    def __init__(self, model: nn.Module, sites: Iterable[str]) -> None:
        self._model, self.sites = model, tuple(sites)

    def remove(self) -> None:
        """Give the submodules their own forward back."""
        for site in self.sites:
            self._model.get_submodule(site).__dict__.pop("forward", None)


def find_sites(
    model: nn.Module, kind: str, chosen: Callable[[nn.Module], bool] | None
) -> list[str]:
    """Return the names of the submodules that are `chosen`, or whose class name ends in `kind`.

    Raises:
        UnsupportedError: the model has none.
    """
    chosen = chosen or (lambda module: type(module).__name__.endswith(kind))
    sites = [name for name, module in model.named_modules() if chosen(module)]
    if not sites:
        raise UnsupportedError(
            f"{type(model).__name__} has no {kind.lower()}: no module class name ends in "
            f"{kind!r}; pass is_{kind.lower()}="
        )
    return sites


def wrap_forwards(
    model: nn.Module, sites: Iterable[str], wrap: Callable[[str, Forward], Forward]
) -> Wrapped:
    """Replace the forward of the submodules at `sites` by `wrap(site, forward)`.

    Hooks, parameters and the state dict stay as they are.
    """
    wrapped = Wrapped(model, sites)
    for site in wrapped.sites:
        module = model.get_submodule(site)
        module.forward = wrap(site, module.forward)
    return wrapped
