"""Fuzz plans: rows, world sizes, layouts with odd tolerances, exchanges; and the knobs."""

import random
from typing import Any

from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import NUMBERS, THINGS, anything

from longpack import Plan, plan_step
from longpack.blockdiag_cp import state
from longpack.packing import PackedRow

TOLERANCES = [
    "nan", "-1", "0", "1", "1.0", "1.001", "1.05", "2", "7.5", "1e300", "1e308", "1e309", "inf",
    "-inf", "", " ", "1,1", "1.1:2", "0x1", "1_0", "\u0661", "one", "1.1 ", "None",
]  # fmt: skip
LAYOUTS = ["contiguous", "head_tail", "zigzag", "balanced", "auto"]


def odd_layout(rng: random.Random) -> Any:
    """Return a layout, usually one that does not exist."""
    kinds = [
        lambda: rng.choice(LAYOUTS),
        lambda: f"balanced:{rng.choice(TOLERANCES)}",
        lambda: f"{rng.choice(LAYOUTS)}:{rng.choice(TOLERANCES)}",
        lambda: rng.choice(LAYOUTS).replace("a", rng.choice(["A", "", "aa", "\u0430"]), 1),
        lambda: anything(rng),
    ]
    return rng.choice(kinds)()


def odd_row(rng: random.Random) -> PackedRow:
    """Return a row of few or many, short or huge documents, with padding anywhere."""
    longest = rng.choice([1, 5, 40, 3000, 10**8])
    at, documents = rng.randint(0, 2), []
    for _ in range(rng.choice([0, 1, 2, 6])):
        size = rng.randint(1, longest)
        documents.append((at, at + size))
        at += size + rng.choice([0, 0, 3])
    return PackedRow(tuple(documents), at)


def assert_plan(plan: Plan, row: PackedRow) -> None:
    """Compare a plan with a row-by-row count: who owns, attends, needs what."""
    shards, world = plan.shards, plan.world_size
    runs = [(a, b, r) for r in range(world) for a, b in shards.runs(r)]
    check(sum(b - a for a, b, _ in runs) == world * plan.local_length, "rows", plan)
    check(all(sum(b - a for a, b, q in runs if q == r) == plan.local_length for r in range(world)))
    ordered = sorted(runs)
    edges = [0, *(b for _, b, _ in ordered)]
    check([a for a, _, _ in ordered] == edges[:-1] and edges[-1] >= row.length, "gaps", plan)
    area, tokens, needed = [0] * world, [0] * world, [0] * world
    for start, stop in row.documents:
        last = [start] * world
        for a, b, r in runs:
            low, high = max(a, start), min(b, stop)
            if low < high:
                tokens[r] += high - low
                # rows low..high-1 attend from start: an arithmetic series
                area[r] += (high - low) * (low - start + 1 + high - start) // 2
                last[r] = max(last[r], high)
        needed = [n + end - start for n, end in zip(needed, last, strict=True)]
    check((*area,) == plan.area and (*tokens,) == plan.tokens, "area of", plan)
    received = [n - t for n, t in zip(needed, tokens, strict=True)]
    if plan.kv_exchange == "allgather":
        received = [(world - 1) * plan.local_length] * world
    check((*received,) == plan.received_tokens, "received by", plan)


def plan_case(rng: random.Random) -> str:
    row, world, layout, exchange = odd_row(rng), rng.choice([1, 2, 3, 8]), "contiguous", "a2a"
    layout = rng.choice(LAYOUTS)
    exchange = rng.choice(["allgather", "halo", "a2a"])
    valid = True
    for _ in range(rng.choice([0, 1, 1, 2])):
        valid = False
        kind = rng.random()
        if kind < 0.3:
            world = rng.choice([0, -3, 2.0, True, 10**9, 2**40, anything(rng), *NUMBERS])
        elif kind < 0.8:
            layout = odd_layout(rng)
        elif kind < 0.95:
            exchange = rng.choice(["ring", "All-Gather", "", anything(rng)])
        else:
            row = anything(rng)
    with sound(valid):
        plan = plan_step(row, world, layout, exchange)
    check(plan.row is row and plan.world_size == world, plan)
    assert_plan(plan, row)
    if plan.layout.partition(":")[0] == "balanced" and "but" not in plan.layout_reason:
        wanted = float(plan.layout.partition(":")[2] or 1.05)
        check(max(plan.area) * world <= wanted * sum(plan.area) + world, "uneven", plan)
    return "right"


def test_plans():
    judge("plans", plan_case)


WORDS = ["flash", "te", "dense", "allgather", "halo", "a2a", "needed-only", "ALL_TO_ALL", "fa2"]
BACKENDS = {  # written out here, from the interface document
    "flash": "flash flash_attn flash_attention flash_attention_2 fa2",
    "te": "te transformer_engine transformerengine",
    "dense": "dense sdpa torch_sdpa",
}
EXCHANGES = {
    "allgather": "allgather all_gather",
    "halo": "halo neighbor needed needed_only",
    "a2a": "a2a a2av all_to_all alltoall needed_a2a",
}


def canonical(value: Any, names: dict[str, str], default: str) -> str | None:
    """Return what a knob means, None where it means nothing."""
    text = "" if value is None else str(value).strip().lower().replace("-", "_")
    if text in ("", "auto", "default"):
        return default
    return next((name for name, words in names.items() if text in words.split()), None)


def odd_knob(rng: random.Random) -> Any:
    """Return a knob's value of any type."""
    word = rng.choice([*WORDS, "auto", "default"])
    pad = rng.choice(["", " ", "\t", "\n"])
    kinds = [
        lambda: pad + rng.choice([word, word.upper(), word.title(), word.replace("_", "-")]) + pad,
        lambda: word[: rng.randrange(len(word))],
        lambda: word.encode(),
        lambda: word.replace("a", "\u0430"),
        lambda: [word],
        lambda: anything(rng),
        lambda: rng.choice(THINGS),
    ]
    return rng.choice(kinds)()


def knob_case(rng: random.Random) -> str:
    backend, exchange = odd_knob(rng), odd_knob(rng)
    if rng.random() < 0.4:
        exchange = rng.choice(["halo", "a2a", None])
    elif rng.random() < 0.4:
        backend = rng.choice(["te", "SDPA", None])
    before = state.cp_varlen_runtime_config()
    wanted = canonical(backend, BACKENDS, "flash"), canonical(exchange, EXCHANGES, "allgather")
    try:
        state.configure_cp_varlen(backend, exchange)
    except ValueError:
        check(state.cp_varlen_runtime_config() == before, "a bad call changed the knobs")
        check(None in wanted, "refused", backend, exchange)
        raise
    else:
        check((*state.cp_varlen_runtime_config().values(),) == wanted, "not", wanted)
    finally:
        state.configure_cp_varlen()
    return "right"


def test_knobs():
    judge("knobs", knob_case)
