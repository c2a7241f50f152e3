"""Misses, votes, labels, verify mode, codecs and accounting."""

import math
import re
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack.errors import LongpackWarning, ReplayError, UnsupportedError
from longpack.recompute_replay import (
    AgreeOnMiss,
    BitCodec,
    IdCodec,
    RecomputeReplay,
    RecomputeReplayRecorder,
    compose,
    is_recomputing,
    replay_labels,
    score_margin,
)
from longpack.recompute_replay.accounting import Ledger
from longpack.recompute_replay.verify import compare


def replayed(channel: RecomputeReplay, sites: list[str], ask: list[str], **options) -> list[int]:
    """Record 0, 1, .. at `sites`; then ask again with 100, 101, .. at the sites of `ask`."""
    with replay_labels(layer=3, microbatch=1):
        forward, recompute = channel.checkpoint_context_fn(None)()
    with forward:
        for value, site in enumerate(sites):
            channel.decide(lambda v=value: v, site=site, **options)
    with recompute:
        return [
            channel.decide(lambda v=value: v, site=site, **options)
            for value, site in enumerate(ask, 100)
        ]


def test_a_miss_is_decided_again_by_default() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    assert replayed(channel, ["a"], ["a", "b"]) == [0, 101]


@pytest.mark.parametrize(
    ("on_miss", "collective"), [("raise", False), ("raise", True), (None, True)]
)
def test_a_miss_raises_by_policy_and_for_collectives(on_miss, collective, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "2")
    channel: RecomputeReplay[int] = RecomputeReplay("routes", on_miss=on_miss)
    with pytest.raises(ReplayError) as caught:
        replayed(channel, ["gate", "dispatch"], ["gate", "dispatch", "gate"], collective=collective)
    for part in (
        "channel 'routes', site 'gate' (rank 2, layer 3, microbatch 1)",
        "asked for decision 2 and the forward recorded 2",
        "in order: gate, dispatch",
    ):
        assert part in str(caught.value)


def test_a_collective_may_be_decided_again_when_asked_for() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes", on_miss="recompute")
    assert replayed(channel, [], ["a"], collective=True) == [100]


@pytest.mark.parametrize("on_miss", [None, "raise", "recompute"])
def test_another_order_raises_whatever_the_policy(on_miss) -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes", on_miss=on_miss)
    with pytest.raises(ReplayError, match=r"decision 0 of the recompute is site 'b' .*'a'.*a, b"):
        replayed(channel, ["a", "b"], ["b", "a"])


def test_misses_are_counted_on_the_recorder() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes")
    kept: list[RecomputeReplayRecorder[int]] = []
    forward, recompute = channel.checkpoint_context_fn(None, kept.append)()
    with forward:
        channel.decide(lambda: 1)
    with recompute:
        for _ in range(3):
            channel.decide(lambda: 2)
    assert kept[0].replay_misses == 2


@pytest.mark.parametrize(("peer_misses", "expected"), [(False, [0, 1]), (True, [100, 101])])
def test_ranks_that_agree_all_decide_again_when_one_has_no_record(peer_misses, expected) -> None:
    votes = []

    def any_rank(missing: bool) -> bool:
        votes.append(missing)
        return missing or peer_misses

    channel: RecomputeReplay[int] = RecomputeReplay("routes", on_miss=AgreeOnMiss(any_rank))
    assert replayed(channel, ["a", "b"], ["a", "b"], collective=True) == expected
    assert votes == [False, False]
    assert replayed(channel, ["a"], ["a", "b"], collective=True)[1] == 101
    assert votes[2:] == [False, True]


@pytest.mark.parametrize("collective", [True, False])
def test_early_stop_of_a_block_with_a_collective_decision_warns(collective: bool) -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("dispatch")

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x * channel.decide(lambda: 2, collective=collective)).sin().exp()

    def step(**options) -> None:
        x = torch.ones(2, requires_grad=True)
        context_fn = compose(channel)
        checkpoint(block, x, use_reentrant=False, context_fn=context_fn, **options).sum().backward()

    step(early_stop=False)
    with pytest.warns(LongpackWarning, match="early_stop=False") if collective else nullcontext():
        step()


def test_labels_nest_and_end() -> None:
    channel: RecomputeReplay[int] = RecomputeReplay("routes", on_miss="raise")
    with replay_labels(layer=1, microbatch=0), replay_labels(layer=2):
        _, recompute = channel.checkpoint_context_fn(None)()
    with recompute, pytest.raises(ReplayError, match=re.escape("(layer 2, microbatch 0)")):
        channel.decide(lambda: 1)
    _, recompute = channel.checkpoint_context_fn(None)()
    with recompute, pytest.raises(ReplayError, match="channel 'routes': "):
        channel.decide(lambda: 1)


@pytest.mark.parametrize("input_drifts", [False, True])
def test_verify_names_the_layer_and_says_how_far_it_drifted(input_drifts: bool) -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes")
    scores = torch.tensor([[0.5, 0.5 - 1e-3, 0.1], [0.9, 0.2, 0.1]], dtype=torch.float64)
    bump = torch.tensor([0.0, 2e-3, 0.0], dtype=torch.float64)

    def layer(name: str, drifts: bool):
        def block(x: torch.Tensor) -> torch.Tensor:
            moved = scores + bump if drifts and is_recomputing() else scores
            given = moved if input_drifts else scores
            ids = channel.decide(lambda: moved.topk(1).indices, site=name, inputs=given)
            assert ids.tolist() == [[0], [0]]
            return x.sin().exp()

        return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=compose(channel))

    x = torch.ones(2, requires_grad=True)
    with channel.verify(margin=score_margin) as report, replay_labels(microbatch=4):
        layer("layers.1.gate", False)(layer("layers.0.gate", True)(x)).sum().backward()
    (drift,) = report.drifts
    assert report.checked == 2
    assert (drift.site, drift.ordinal, drift.changed, drift.total) == ("layers.0.gate", 0, 1, 2)
    assert drift.max_difference == 1.0
    if input_drifts:
        assert drift.input_drift == pytest.approx(2e-3, rel=1e-12)
        assert drift.margin == pytest.approx(1e-3, rel=1e-12)
    else:
        assert drift.input_drift == 0.0
    text = str(report)
    assert "1 of 2 replayed decisions drifted" in text
    assert "site 'layers.0.gate' (microbatch 4): decision 0 changed in 1 of 2 elements" in text
    with pytest.raises(ReplayError, match=r"layers\.0\.gate"):
        report.raise_if_drifted()


def test_verify_leaves_gradients_and_ends_with_its_block() -> None:
    channel: RecomputeReplay[list[int]] = RecomputeReplay("order")
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        order = channel.decide(
            lambda: calls.append(1) or ([2, 0, 1] if len(calls) < 2 else [0] * 3)
        )
        return x[order].cumsum(0).sin()

    x = torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_()
    expected = torch.autograd.grad(x[[2, 0, 1]].cumsum(0).sin().sum(), x)[0]
    with channel.verify() as report:
        out = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel)).sum()
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], expected)
    torch.autograd.grad(out, x)
    assert len(calls) == 2
    assert (report.checked, [d.changed for d in report.drifts]) == (1, [2])
    assert report.drifts[0].input_drift is None
    assert "unknown" in str(report)


@pytest.mark.parametrize(
    ("recorded", "fresh", "expected"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), (0, 2, 0.0)),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), (1, 2, 2.0)),
        (torch.zeros(2), torch.zeros(3), (3, 3, 0.0)),
        ([1, "a", None], [1, "b", None], (1, 3, 0.0)),
        ({"n": 3}, {"n": 5}, (1, 1, 2.0)),
        ([1, 2], [1, 2, 3], (3, 3, 0.0)),
    ],
)
def test_comparison_counts_elements(recorded, fresh, expected) -> None:
    assert compare(recorded, fresh) == expected


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (0, 256, torch.uint8),
        (0, 257, torch.uint16),
        (-1, 128, torch.int8),
        (-1, 256, torch.int16),
        (0, 65536, torch.uint16),
        (0, 65537, torch.int32),
        (0, 2**40, torch.int64),
    ],
)
def test_ids_are_stored_in_the_narrowest_dtype(low: int, high: int, dtype: torch.dtype) -> None:
    codec = IdCodec(high, low)
    ids = torch.tensor([[low, high - 1], [0, 1]])
    stored = codec.encode(ids)
    assert stored.ids.dtype == dtype
    back = codec.decode(stored)
    assert back.dtype == torch.int64
    assert torch.equal(back, ids)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5, 7), ()])
def test_masks_are_stored_as_bits(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    stored = BitCodec().encode(mask)
    assert stored.octets.numel() == math.ceil(mask.numel() / 8)
    assert torch.equal(BitCodec().decode(stored), mask)
    assert BitCodec().decode(stored).shape == mask.shape


def test_codecs_refuse_what_they_cannot_store() -> None:
    with pytest.raises(ReplayError, match=r"0 to 300.*\[0, 256\)"):
        IdCodec(256).encode(torch.tensor([0, 300]))
    with pytest.raises(UnsupportedError, match="float32"):
        IdCodec(8).encode(torch.zeros(2))
    with pytest.raises(UnsupportedError, match="int64"):
        BitCodec().encode(torch.tensor([1]))


@pytest.mark.parametrize("on_channel", [True, False])
def test_bytes_are_counted_by_site_with_and_without_codec(on_channel: bool) -> None:
    codec = IdCodec(64)
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay(
        "routes", codec=codec if on_channel else None, preserve_random=False
    )
    ids = torch.arange(64).repeat(16)
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        narrow = channel.decide(lambda: ids, site="narrow", codec=None if on_channel else codec)
        seen.append(narrow)
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, context_fn=compose(channel)).sum()
    usage = channel.usage()
    assert 1024 <= usage.live_bytes < 1024 + 200  # a byte an id, and the dtype to return
    assert usage.live_bytes == usage.peak_bytes == usage.sites["narrow"].live_bytes
    out.backward()
    assert torch.equal(seen[1], ids)
    assert seen[1].dtype == torch.int64
    assert channel.usage().live_bytes == channel.usage().sites["narrow"].live_bytes == 0
    assert channel.usage().peak_bytes == usage.peak_bytes


def test_random_states_count_as_bytes() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes")
    forward, _ = channel.checkpoint_context_fn(None)()
    with forward:
        channel.decide(lambda: torch.zeros(8), site="a")
    assert channel.usage().sites["a"].live_bytes == 32 + torch.get_rng_state().numel()


def test_a_record_freed_while_bytes_are_counted_does_not_deadlock() -> None:
    ledger = Ledger()

    def held_while_another_is_freed():
        yield "a", 5
        ledger.replace([], [("a", 3)])  # as a garbage collection would, inside the lock

    thread = threading.Thread(
        target=ledger.replace, args=([], held_while_another_is_freed()), daemon=True
    )
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert ledger.usage().live_bytes == 8
