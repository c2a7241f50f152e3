"""Who waits for whom: what a rank says of itself, and the story that the others make of it."""

import datetime
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longpack.collectives import Loopback, as_transport, monitor, report_exit
from longpack.collectives.rank_status import NoStatus, Operation, RankStatus, explain_failure
from longpack.collectives.status_server import Address, StatusServer, ask
from longpack.errors import CollectiveError
from longpack.testing.ranks import World


def at(number, waiting=True):
    operation = Operation(number, "all_to_all of (3, 2) float32", "layer 3 of batch 9, forward")
    return RankStatus(operation, operation if waiting else None, 4.0, "load (data.py:7)")


GONE, UNKNOWN = NoStatus("has ended", is_late=True), NoStatus("could not be asked", is_late=False)


def test_the_story_names_those_who_are_not_there():
    ranks = [at(8), at(8), at(7, waiting=False), GONE, UNKNOWN]
    said = str(
        explain_failure(
            1, "cp", ranks, "[/a/b.cc:537] Connection closed. This is typically caused by"
        )
    )
    assert said.splitlines()[0] == (
        "rank 1 of 5 (cp): all_to_all of (3, 2) float32 (layer 3 of batch 9, forward) failed after "
        "4.0 s, waiting for ranks 2, 3: Connection closed"
    )
    assert "  rank 0 has waited 4.0 s in operation 8, all_to_all of (3, 2) float32 (layer 3" in said
    assert "  rank 2 has started operation 7, all_to_all" in said
    assert "and for 4.0 s has been in load (data.py:7)" in said
    assert "  rank 3 has ended\n" in said
    assert "  rank 4 could not be asked" in said
    assert "longer timeout" in said


@pytest.mark.parametrize(
    ("other", "whom"),
    [(at(8), "no rank"), (at(9), "no rank"), (UNKNOWN, "a rank that cannot be asked")],
)
def test_the_story_blames_nobody_who_is_there(other, whom):
    said = str(explain_failure(0, "dp", [at(8), other], "late"))
    assert said.startswith("rank 0 of 2 (dp): all_to_all of (3, 2) float32 (layer 3 of batch 9, ")
    assert f"waiting for {whom}: late" in said
    assert ("they run different programs" in said) == (whom == "no rank")


def test_an_awaited_operation_is_named_not_the_last_that_was_started():
    """Stages: several operations are on their way when the first of them fails."""
    awaited, last = (Operation(n, f"all_to_all of ({n}, 2) float32") for n in (7, 9))
    mine = RankStatus(last, awaited, 1.0, "")
    said = str(explain_failure(0, "cp", [mine, at(7, waiting=False)], "late"))
    assert "all_to_all of (7, 2) float32 failed after 1.0 s, waiting for no rank" in said
    assert "rank 0 has waited 1.0 s in operation 7, all_to_all of (7, 2)" in said


@pytest.fixture
def server():
    server = StatusServer(lambda question: {"heard": question})
    yield server
    server.close()


def test_a_server_answers_those_who_know_its_token(server):
    assert ask(server.address, [1, "two"]) == {"heard": [1, "two"]}
    with pytest.raises(ConnectionResetError):
        ask(replace(server.address, token="guess"), "who?")
    token = server.address.token.encode()
    deep = token + b" " + b"[" * 60_000 + b"\n"
    for noise in (b"\n", b"5\n", b"\xff\xfe\n", b"", b"[" * 70_000, deep, token + b" {\n"):
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            connection.sendall(noise)
    assert ask(server.address, None) == {"heard": None}  # noise did not close it
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server.address, None)


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(server, monkeypatch):
    with socket.create_connection((server.address.host, server.address.port)):
        monkeypatch.setattr("longpack.collectives.status_server.ANSWER_S", 1.0)
        assert ask(server.address, 1) == {"heard": 1}


def test_a_forked_child_does_not_answer_for_its_parent(server):
    """A data loader's worker, say: it would keep the socket of a parent that was killed."""
    child = os.fork()
    if child == 0:
        os._exit(0 if server._listener.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(server.address, 2) == {"heard": 2}


def test_a_stopped_process_is_told_from_one_that_has_ended(monkeypatch):
    """The kernel still takes connections for a stopped process, which nobody answers."""
    monkeypatch.setattr("longpack.collectives.status_server.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(TimeoutError):
        ask(Address(*mute.getsockname(), "here", "token"), None)


@pytest.mark.parametrize(
    ("address", "error", "why", "is_late"),
    [
        (None, None, "no vote has told where", False),
        (Address("127.0.0.1", 1, "another machine", ""), None, "set MASTER_ADDR", False),
        (Address("127.0.0.1", 1, "", ""), ConnectionRefusedError("no"), "has ended", True),
        (Address("127.0.0.1", 1, "", ""), TimeoutError("no"), "is stopped, or out of", True),
        (Address("10.0.0.1", 1, "b", ""), OSError(101, "no network"), "not be asked", False),
    ],
)
def test_only_a_rank_that_is_known_to_be_gone_is_late(monkeypatch, address, error, why, is_late):
    def refuse(address, question):
        raise error

    mine = monitor.Monitor(0, 2, "cp")
    if address and not address.machine:
        address = replace(address, machine=socket.gethostname())
    mine.set_peers([mine.address, address])
    monkeypatch.setattr(monitor, "ask", refuse)
    found = mine._find(1)
    mine.close()
    assert why in found.why
    assert found.is_late == is_late


def test_an_answer_in_other_words_hides_no_error(monkeypatch):
    mine = monitor.Monitor(0, 2, "cp")
    mine.set_peers([mine.address, mine.address])
    for answer in ({"field": 1}, [], None, {"awaited": None, "started": {"x": 1}}):
        monkeypatch.setattr(monitor, "ask", lambda *_, answer=answer: answer)
        assert "in other words" in mine._find(1).why
    mine.close()


def check_own_error(rank, world_size):
    """An error of this rank's own stays what it is."""
    transport = as_transport(dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"[Ss]plit sizes") as caught:
        transport.all_to_all(torch.zeros(3, 1), (1, 1), (1, 1))
    assert type(caught.value) is RuntimeError


def test_an_error_of_ones_own_is_not_blamed_on_others(on_ranks):
    on_ranks(check_own_error, world_size=2)


def check_slow_peer(rank, world_size):
    """Rank 1 sleeps past the timeout: rank 0 says where."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1), group_desc="mesh_cp")
    transport = as_transport(group)
    transport.all_gather_object(None)  # tells where to ask
    if rank == 1:
        fall_asleep()
        return ""
    transport.enter("layer 5 of batch 2, backward")
    with pytest.raises(CollectiveError) as caught:
        transport.all_to_all(torch.zeros(2, 3), (0, 2), (0, 2))
    return str(caught.value)


def fall_asleep():
    time.sleep(4)


def test_a_slow_rank_is_found_asleep(on_ranks):
    said, _ = on_ranks(check_slow_peer, world_size=2)
    assert said.startswith(
        "rank 0 of 2 (cp): all_to_all of (2, 3) float32 (layer 5 of batch 2, backward) failed after"
    )
    assert "waiting for rank 1: " in said
    assert "rank 1 has started operation 1, all_gather_object, and for" in said
    assert "has been in fall_asleep (test_monitor.py:" in said


def check_farewell(rank, world_size):
    transport = as_transport(dist.new_group(timeout=datetime.timedelta(seconds=2)))
    transport.all_gather_object(None)
    if rank == 2:
        report_exit(ZeroDivisionError("of planted number"))
        return ""
    with pytest.raises(CollectiveError) as caught:
        transport.all_reduce(torch.zeros(2))
    return str(caught.value)


def test_a_rank_that_ends_with_an_error_tells_the_others(on_ranks):
    *said, _ = on_ranks(check_farewell, world_size=3)
    for story in said:
        assert "waiting for rank 2: " in story
        assert "rank 2 ended with ZeroDivisionError: of planted number" in story


def check_sums(rank, world_size):
    transport = as_transport(dist.group.WORLD)
    x = torch.full((2,), float(rank))
    assert transport.all_reduce(x) is x
    return x.tolist()


def test_all_reduce_adds_in_place_over_both_kinds_of_ranks(on_ranks):
    assert on_ranks(check_sums, world_size=2) == [[1.0, 1.0]] * 2

    def body(t):
        x = torch.full((2,), float(t.rank))
        assert t.all_reduce(x) is x
        return x.tolist()

    assert Loopback(3).run(body) == [[3.0, 3.0]] * 3


def test_threads_that_wait_too_long_say_for_whom():
    release = threading.Event()
    said = {}

    def dawdle():
        release.wait(20)

    def body(t):
        t.enter("layer 1 of batch 4, forward")
        if t.rank == 2:
            dawdle()
            return
        try:
            t.all_gather(torch.zeros(1))
        except CollectiveError as error:
            said[t.rank] = str(error)
            if len(said) == 2:
                release.set()
            release.wait(20)  # else this rank, too, has ended when the other asks

    Loopback(3, timeout_s=0.3).run(body)
    for rank in (0, 1):
        assert said[rank].startswith(f"rank {rank} of 3 (cp): all_gather (layer 1 of batch 4, fo")
        assert "waiting for rank 2: not all came within 0.3 s" in said[rank]
        assert "rank 2 has started no operation" in said[rank]
        assert "dawdle (test_monitor.py:" in said[rank]


def test_the_next_run_at_a_meeting_point_starts_anew():
    meeting = Loopback(2, timeout_s=20)
    with pytest.raises(KeyError):
        meeting.run(lambda t: {}["lost"] if t.rank else t.all_gather(torch.zeros(1)))
    assert meeting.run(lambda t: t.all_gather(torch.ones(1)).tolist()) == [[1.0, 1.0]] * 2


def test_a_server_listens_where_the_first_rank_is_reached(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    server = StatusServer(lambda question: os.getpid())
    assert server.address.host in ("127.0.0.1", "::1")
    assert ask(server.address, {}) == os.getpid()
    server.close()


def test_what_threads_send_may_change_once_it_is_sent():
    def body(t):
        wrong = 0
        for n in range(50):
            x = torch.full((2, 1), float(n))
            got = t.all_gather(x)
            swapped = t.all_to_all(x, (1, 1), (1, 1))
            x.fill_(-1.0)
            wrong += int((got != n).any() or (swapped != n).any())
        return wrong

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert Loopback(2).run(body) == [0, 0]
    finally:
        sys.setswitchinterval(before)


def test_a_rank_that_comes_once_others_have_given_up_is_told():
    gave_up = threading.Event()

    def body(t):
        if t.rank == 2:
            gave_up.wait(20)
        try:
            t.all_gather(torch.zeros(1))
        except CollectiveError as error:
            gave_up.set()
            return str(error)
        return "met"

    said = Loopback(3, timeout_s=0.3).run(body)
    assert said[2].startswith("rank 2 of 3 (cp): all_gather failed")


def check_one_dies(rank, world_size, how):
    """Rank 2 is killed or stopped; in a halo not every rank waits for it directly."""
    transport = as_transport(dist.new_group(timeout=datetime.timedelta(seconds=2)))
    transport.all_gather_object(None)
    if rank == 2:
        os.kill(os.getpid(), how)
    transport.enter("layer 0 of batch 1, forward")
    counts = [0] * world_size
    send, receive = counts.copy(), counts.copy()
    if rank + 1 < world_size:
        send[rank + 1] = 1
    if rank:
        receive[rank - 1] = 1
    for _ in range(3):
        transport.all_to_all(torch.zeros(sum(send), 2), send, receive, direct=True)
        transport.all_to_all(torch.zeros(world_size, 2), [1] * 4, [1] * 4)


@pytest.mark.parametrize(
    ("how", "says"),
    [(signal.SIGKILL, "rank 2 has ended, its process"), (signal.SIGSTOP, "rank 2 gives no answer")],
)
def test_four_ranks_end_when_one_is_killed_or_stopped(how, says):
    world = World.start(4)
    try:
        world.run(check_sums)  # all are up
        outcomes = world.outcomes(check_one_dies, how, grace_s=20, timeout_s=30)
        for rank in (0, 1, 3):
            said = outcomes[rank].failure
            assert f"CollectiveError: rank {rank} of 4 (cp): " in said
            assert "layer 0 of batch 1, forward) failed after" in said
            assert f"  {says}" in said
    finally:
        world.kill()
