"""Pytest fixtures: `on_ranks` runs a check on live gloo ranks. Load with `-p`.

    def check_sum(rank: int, world_size: int) -> None:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        assert x.item() == sum(range(world_size))

    def test_sum(on_ranks):
        on_ranks(check_sum, world_size=4)

Checks are top-level functions that assert on the rank itself and return small plain values.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from longpack.testing.ranks import Check, RanksError, World


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[int, World]]:
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.kill()


@pytest.fixture
def on_ranks(_worlds: dict[int, World]) -> Callable[..., list[Any]]:
    """Run `check(rank, world_size, *args)` on every rank and return the ranks' values."""

    def run(check: Check, *args: Any, world_size: int, timeout_s: float = 60.0) -> list[Any]:
        world = _worlds.get(world_size)
        if world is None or not world.processes:
            world = _worlds[world_size] = World.start(world_size)
        try:
            return world.run(check, *args, timeout_s=timeout_s)
        except RanksError as failed:
            pytest.fail(str(failed), pytrace=False)

    return run
