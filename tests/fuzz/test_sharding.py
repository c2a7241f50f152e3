"""Fuzz shard_batch and its kin on ranks that meet in one process: rows, labels, counts, ends."""

import random
from typing import Any

import torch
from tests.fuzz.batches import Made, make
from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import anything, mutate
from tests.fuzz.reading import UnreadableError, read
from tests.fuzz.test_plans import BACKENDS, EXCHANGES, canonical, odd_knob, odd_layout

from longpack import make_cp_blockdiag_batch_and_ctx, shard_batch
from longpack.collectives import Loopback

TIMEOUT_S = 20.0


def with_labels(rng: random.Random, made: Made) -> None:
    """Add labels and further row tensors, some of them wrong."""
    if not isinstance(made.batch, dict):
        return
    tokens = torch.randint(1, 9, (made.b, made.s))
    key = rng.choice(["labels", "shift_labels", "weights"])
    if key != "weights":
        tokens = tokens.masked_fill(torch.rand(tokens.shape) < 0.2, -100)
    if rng.random() < 0.3:
        made.valid = False
        tokens = mutate(rng, tokens)
    made.batch[key] = tokens
    if rng.random() < 0.05:
        made.valid = False
        made.batch["labels"] = made.batch["shift_labels"] = tokens


def expected_targets(made: Made, documents: list[tuple[int, int]]) -> list[int] | None:
    """Return the target of each row of the flattened batch."""
    if made.batch.get("shift_labels") is not None:
        return made.batch["shift_labels"].flatten().tolist()
    if made.batch.get("labels") is None:
        return None
    labels = made.batch["labels"].flatten().tolist()
    targets = [-100] * len(labels)
    for start, stop in documents:
        targets[start : stop - 1] = labels[start + 1 : stop]
    return targets


def assert_sharded(made: Made, ranks: list[Any], filler: int) -> None:
    """Put the ranks' rows together by the plan's own runs and compare them with the batch."""
    documents = read(made.batch, made.b, made.s, made.text_row)
    plan = ranks[0].plan
    check(list(plan.row.documents) == documents, plan.row, "is not", documents)
    rows = [row for r in range(plan.world_size) for row in plan.shards.rows(r).tolist()]
    check(sorted(rows) == list(range(plan.padded_length)), "rows", rows)
    length = made.b * made.s

    def whole(key: str) -> list[Any]:
        local = [n for rank in ranks for n in rank.inputs[key].flatten(0, 1).tolist()]
        check(len(local) == len(rows), key, "has", len(local), "rows")
        return [n for _, n in sorted(zip(rows, local, strict=True), key=lambda pair: pair[0])]

    for key in ("input_ids", "inputs_embeds", "weights"):
        given = made.batch.get(key)
        if given is not None and not given.is_meta:
            given = given.flatten(0, 1)
            fill = filler if key == "input_ids" else 0
            added = torch.full((plan.padded_length - length, *given.shape[1:]), fill)
            padded = torch.cat([given, added.to(given.dtype)]).tolist()
            check(str(whole(key)) == str(padded), key, whole(key), "is not", padded)
    if made.batch.get("position_ids") is None:
        at = [0] * plan.padded_length
        for start, stop in documents:
            at[start:stop] = range(stop - start)
        check(whole("position_ids") == at, whole("position_ids"), "is not", at)
    targets = expected_targets(made, documents)
    if targets is not None:
        targets += [-100] * (plan.padded_length - length)
        check(whole("labels") == targets, "labels", whole("labels"), "not", targets)
        count = max(1, sum(n != -100 for n in targets))
        check(all(r.inputs["num_items_in_batch"] == count for r in ranks), "count")


def shard_case(rng: random.Random) -> str:
    made = make(rng, max_rows=2, max_tokens=8)
    if rng.random() < 0.5:
        with_labels(rng, made)
    world, filler = rng.choice([1, 2, 2, 3]), rng.choice([0, 7])
    knobs: dict[str, Any] = {"layout": rng.choice(["contiguous", "zigzag", "balanced"])}
    if rng.random() < 0.25:
        made.valid = False
        name = rng.choice(["layout", "kv_exchange", "attn_backend", "padding_token_id", "dp_mesh"])
        odd = {"layout": odd_layout, "kv_exchange": odd_knob, "attn_backend": odd_knob}
        knobs[name] = odd.get(name, anything)(rng)
        filler = knobs.get("padding_token_id", filler)
    knobs.setdefault("padding_token_id", filler)
    alone = rng.randrange(world) if rng.random() < 0.15 else None  # this rank has another batch
    if alone is not None and world > 1:
        made.valid = False
        other = make(rng, 1, 8)

    def body(t: Any) -> Any:
        mine = other if alone == t.rank and world > 1 else made
        return shard_batch(mine.batch, t, text_row=mine.text_row, **knobs)

    made.valid = made.valid and isinstance(made.batch, dict)
    with sound(made.valid):
        ranks = Loopback(world, TIMEOUT_S).run(body)
    if alone is not None and world > 1:
        return "right"  # other tokens in the same documents: each rank's own
    try:
        assert_sharded(made, ranks, filler)
    except UnreadableError as why:
        check(False, "accepted, but", why, made)
    step = ranks[0].step
    wanted = canonical(knobs.get("kv_exchange"), EXCHANGES, "allgather")
    check(step.plan.kv_exchange in (wanted, "a2a" if wanted == "halo" else wanted), step)
    check(step.attn_backend == canonical(knobs.get("attn_backend"), BACKENDS, "flash"), step)
    return "right"


def test_sharded_batches():
    judge("sharding", shard_case)


def family_case(rng: random.Random) -> str:
    """The call of code written against the interface document's family, with a loss mask."""
    made = make(rng, 1, 8)
    if isinstance(made.batch, dict):
        labels = torch.randint(1, 9, (made.b, made.s))
        if rng.random() < 0.2:
            made.valid, labels = False, mutate(rng, labels)
        made.batch["labels"] = labels
        if rng.random() < 0.5 and "doc_ids" in made.batch:
            made.batch["_packed_seq_ids"] = made.batch.pop("doc_ids")
    mask = None
    if rng.random() < 0.6:
        mask = (torch.rand(made.b, made.s) < 0.7).to(rng.choice([torch.bool, torch.float32]))
        if rng.random() < 0.4:
            made.valid = False
            mask = mutate(rng, mask)
    keep = dict(made.batch) if isinstance(made.batch, dict) else None
    made.valid = made.valid and isinstance(made.batch, dict) and made.text_row is None
    with sound(made.valid):
        ranks = Loopback(2, TIMEOUT_S).run(
            lambda t: make_cp_blockdiag_batch_and_ctx(t, None, made.batch, mask)
        )
    check(keep is not None and [*keep] == [*made.batch], "the batch was changed")
    local = torch.cat([batch["labels"] for _, batch, _ in ranks], dim=1).flatten().tolist()
    padding = torch.cat([batch["padding_mask"] for _, batch, _ in ranks], dim=1).flatten().tolist()
    if "_packed_seq_ids" in keep:
        keep["doc_ids"] = keep.pop("_packed_seq_ids")
    documents = read(keep, made.b, made.s)
    real = [any(a <= row < b for a, b in documents) for row in range(len(padding))]
    check(padding == [not is_real for is_real in real], padding, documents)
    labels = keep["labels"].flatten().tolist()
    weights = [1] * len(labels) if mask is None else mask.flatten().tolist()
    rows = zip(labels, weights, real, strict=False)
    kept = [n if w and is_real else -100 for n, w, is_real in rows]
    check(local == kept + [-100] * (len(local) - len(kept)), local, "is not", kept, keep, mask)
    return "right"


def test_the_family_call():
    judge("family", family_case)


def unshard_case(rng: random.Random) -> str:
    b, s, world = rng.choice([1, 2]), rng.randint(1, 6), rng.choice([1, 2, 3])
    ids = torch.randint(1, 99, (b, s))
    layout = rng.choice(["contiguous", "zigzag"])
    valid = rng.random() < 0.4
    changed = rng.choice(["x", "dim"])
    seed = rng.random()

    def body(t: Any) -> Any:
        mine = random.Random(seed)
        sharded = shard_batch({"input_ids": ids, "doc_ids": ids}, t, layout)
        x, dim = sharded.inputs["input_ids"], 1
        if not valid and changed == "x":
            x = mutate(mine, x)
        elif not valid:
            dim = anything(mine)
        return sharded.unshard(x, dim), x, dim, sharded

    with sound(valid):
        results = Loopback(world, TIMEOUT_S).run(body)
    whole, _, dim, sharded = results[0]
    if valid:
        check(torch.equal(whole, ids), whole, "is not", ids)
        return "right"
    rows = [row for r in range(world) for row in sharded.plan.shards.rows(r).tolist()]
    stacked = torch.cat([x for _, x, _, _ in results], dim=dim)
    order = [rows.index(i) for i in range(b * s)]
    expected = stacked.index_select(dim, torch.tensor(order, dtype=torch.int64))
    if not whole.is_meta:
        expected = expected.reshape(whole.shape)
        check(str(whole.tolist()) == str(expected.tolist()), whole, "is not", expected)
    return "right"


def test_unshard():
    judge("unshard", unshard_case)
