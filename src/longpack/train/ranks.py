"""The ranks of a run: process group, (dp, cp) mesh, device."""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longpack.collectives import Transport, as_transport, collect_votes, report_exit
from longpack.errors import LongpackError, RunError, rank_prefix
from longpack.train.config import ParallelSection

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the run.

    Args:
        mesh: dimensions `dp` (rows differ) and `cp` (one row is shared).
        device: of this rank.
    """

    mesh: DeviceMesh
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank among all."""
        return dist.get_rank()

    @property
    def cp_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's row."""
        return self.mesh["cp"]

    @property
    def world(self) -> Transport:
        """What moves rows between all ranks."""
        return as_transport(dist.group.WORLD)

    @property
    def replica(self) -> int:
        """Which of the dp replicas this rank belongs to."""
        return self.mesh.get_local_rank("dp")

    @property
    def flat_mesh(self) -> DeviceMesh:
        """All ranks, in one dimension."""
        return self.mesh["dp", "cp"]._flatten("ranks")


@contextmanager
def join_ranks(parallel: ParallelSection) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or be a world of one.

    A process group that is already there is used and left alone. One that is started here ends
    with the block; where that ends with an error, the other ranks are told of it first.

    Raises:
        RunError: the world has not cp * dp ranks, or `device = "cuda"` without GPUs enough.
    """
    started = not dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if started else dist.get_world_size()
    if world_size != parallel.cp * parallel.dp:
        raise RunError(
            f"parallel.cp = {parallel.cp} times parallel.dp = {parallel.dp} needs "
            f"{parallel.cp * parallel.dp} ranks but {world_size} were started: change them, or "
            f"start with torchrun --nproc-per-node {parallel.cp * parallel.dp} -m longpack train"
        )
    device = _device(parallel)
    if started:
        _start(world_size, device, datetime.timedelta(seconds=parallel.timeout_s))
    try:
        yield Ranks(_mesh(parallel, device), device)
    except BaseException as error:
        if started:
            report_exit(error)
            if device.type == "cpu":  # NCCL would wait for peers that do not end theirs
                dist.destroy_process_group()
        raise
    if started:
        dist.destroy_process_group()


def agree(prepare: Callable[[], T], identity: Callable[[T], str]) -> T:
    """Return `prepare()`, having made sure that every rank got the same.

    Args:
        prepare: may raise a `LongpackError`, which is told to the other ranks.
        identity: what must be equal on every rank.

    Raises:
        RunError: on every rank that could prepare, where another could not or got other things;
            a rank that could not prepare raises its own error.
    """
    made: list[T] = []

    def vote() -> str:
        made.append(prepare())
        return identity(made[0])

    votes = gather(vote, "begin")
    for rank, theirs in enumerate(votes):
        if theirs != identity(made[0]):
            raise RunError(
                f"{_prefix()}the run is {identity(made[0])} here but {theirs} on rank {rank}: give "
                "every rank the same run file, and machines the same data"
            )
    return made[0]


def gather(work: Callable[[], T], doing: str) -> list[T]:
    """Return what `work` gives on every rank, in rank order; every rank calls it.

    Args:
        work: gives something picklable; may raise a `LongpackError`, which is told to the others.
        doing: what it does, for the message.

    Raises:
        RunError: on every rank that could do it, where another could not; a rank that could not
            raises its own error.
    """
    value: T | None = None
    error: LongpackError | None = None
    try:
        value = work()
    except LongpackError as raised:
        error = raised
    world = as_transport(dist.group.WORLD)
    world.enter(doing)
    votes = collect_votes(world, value, None if error is None else str(error))
    if error is not None:
        raise error
    for rank, vote in enumerate(votes):
        if vote.failure is not None:
            raise RunError(f"{_prefix()}rank {rank} cannot {doing}, so none does: {vote.failure}")
    return [vote.value for vote in votes]  # pyright: ignore[reportReturnType]


def _prefix() -> str:
    return rank_prefix(dist.get_rank(), dist.get_world_size(), "world")


def _mesh(parallel: ParallelSection, device: torch.device) -> DeviceMesh:
    """Return the mesh; groups of its dimensions wait as long for each other as all ranks do."""
    mesh = init_device_mesh(device.type, (parallel.dp, parallel.cp), mesh_dim_names=("dp", "cp"))
    timeout = datetime.timedelta(seconds=parallel.timeout_s)
    for name in ("dp", "cp"):
        # torch gives them its default, and the argument for it only by a backend's own options
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(name))
    return mesh


def _device(parallel: ParallelSection) -> torch.device:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if parallel.device != "cpu" else 0
    if parallel.device == "cuda" and gpus < local_size:
        raise RunError(
            f"parallel.device = 'cuda' but this machine has {gpus} GPUs for {local_size} ranks"
        )
    if not gpus or gpus < local_size:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _start(world_size: int, device: torch.device, timeout: datetime.timedelta) -> None:
    # Votes and checkpoints talk from the host, so gloo is there on GPUs too.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if world_size > 1 or dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
