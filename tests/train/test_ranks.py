"""The ranks of a run: how long they wait for each other."""

import datetime

import torch
import torch.distributed as dist

from longpack.train.config import ParallelSection
from longpack.train.ranks import join_ranks


def check_timeouts(rank, world_size):
    parallel = ParallelSection(cp=2, dp=2, timeout_s=8.0, device="cpu")
    with join_ranks(parallel) as ranks:
        groups = [ranks.cp_mesh.get_group(), ranks.mesh["dp"].get_group()]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        assert dist.group.WORLD not in groups
        return [backend.options._timeout for backend in backends]


def test_ranks_of_a_row_and_of_a_replica_wait_as_long_as_all(on_ranks):
    for timeouts in on_ranks(check_timeouts, world_size=4):
        assert timeouts == [datetime.timedelta(seconds=8)] * 2
