"""Who waits for whom: what a rank says of itself, and the story that the others make of it."""

import datetime
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from longpack.collectives import Loopback, as_transport, say_farewell
from longpack.collectives.door import Door, ask
from longpack.collectives.whereabouts import Whereabouts, tell_story
from longpack.errors import CollectiveError
from longpack.testing.ranks import World


def at(operation, waiting=True, what="all_to_all of (3, 2) float32", frames="load (data.py:7)"):
    return Whereabouts(operation, what, "layer 3 of batch 9, forward", waiting, 4.0, frames)


def test_the_story_names_those_who_are_not_there():
    ranks = [at(8), at(8), at(7, waiting=False), "has ended, its process is gone", None]
    said = str(
        tell_story(1, "cp", ranks, "[/a/b.cc:537] Connection closed. This is typically caused by")
    )
    assert said.splitlines()[0] == (
        "rank 1 of 5 (cp): all_to_all of (3, 2) float32 (layer 3 of batch 9, forward) failed after "
        "4.0 s, waiting for ranks 2, 3: Connection closed"
    )
    assert "  rank 0 has waited 4.0 s in operation 8, all_to_all of (3, 2) float32 (layer 3" in said
    assert "  rank 2 has started operation 7, all_to_all" in said
    assert "and for 4.0 s has been in load (data.py:7)" in said
    assert "  rank 3 has ended, its process is gone" in said
    assert "  rank 4 could not be asked" in said
    assert "longer timeout" in said


@pytest.mark.parametrize(
    ("other", "whom"), [(at(8), "no rank"), (None, "a rank that cannot be asked")]
)
def test_the_story_blames_nobody_who_is_there(other, whom):
    said = str(tell_story(0, "dp", [at(8), other], "late"))
    assert said.startswith("rank 0 of 2 (dp): all_to_all of (3, 2) float32 (layer 3 of batch 9, ")
    assert f"waiting for {whom}: late" in said
    assert ("they run different programs" in said) == (whom == "no rank")


def test_a_door_answers_those_who_know_the_word_while_the_program_is_busy():
    door = Door(lambda question: {"heard": question})
    try:
        assert ask(door.address, [1, "two"]) == {"heard": [1, "two"]}
        stranger = type(door.address)(door.address.host, door.address.port, "guess")
        with pytest.raises(ConnectionResetError):
            ask(stranger, "who?")
        for noise in (b"\n", b"5\n", b"[1]\n", b"\xff\xfe\n", b""):
            with socket.create_connection((door.address.host, door.address.port)) as connection:
                connection.sendall(noise)
        assert ask(door.address, None) == {"heard": None}  # noise did not close it
    finally:
        door.close()
    with pytest.raises(ConnectionRefusedError):
        ask(door.address, None)


def test_a_stopped_process_is_told_from_one_that_has_ended(monkeypatch):
    """The kernel still takes connections for a stopped process, which nobody answers."""
    monkeypatch.setattr("longpack.collectives.door.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        door = Door(lambda question: None)
        door.close()
        silent = type(door.address)(*mute.getsockname(), "word")
        with pytest.raises(TimeoutError):
            ask(silent, None)


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
    assert "has been in fall_asleep (test_lookout.py:" in said


def check_farewell(rank, world_size):
    transport = as_transport(dist.new_group(timeout=datetime.timedelta(seconds=2)))
    transport.all_gather_object(None)
    if rank == 2:
        say_farewell(ZeroDivisionError("of planted number"))
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
        assert "dawdle (test_lookout.py:" in said[rank]


def test_the_next_run_at_a_meeting_point_starts_anew():
    meeting = Loopback(2, timeout_s=20)
    with pytest.raises(KeyError):
        meeting.run(lambda t: {}["lost"] if t.rank else t.all_gather(torch.zeros(1)))
    assert meeting.run(lambda t: t.all_gather(torch.ones(1)).tolist()) == [[1.0, 1.0]] * 2


def test_a_door_is_where_the_first_rank_is_reached(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    door = Door(lambda question: os.getpid())
    assert door.address.host == "127.0.0.1"
    assert json.dumps(ask(door.address, {})) == str(os.getpid())
    door.close()


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
