"""Ranks are threads here: one torch thread each, or they fight for the cores."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_a_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
