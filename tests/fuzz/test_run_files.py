"""Fuzz run files: trees mutated from a full one, text mutated from the examples, and garbage."""

import enum
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import anything
from tests.fuzz.reading import flat
from tests.fuzz.test_plans import BACKENDS, EXCHANGES, canonical, odd_knob, odd_layout

from longpack.train import load_config
from longpack.train.config import parse_config

HERE = Path("/fuzz/folder")
EXAMPLES = [p.read_text("utf-8") for p in sorted(Path("examples").glob("*.toml"))]
LETTERS = "abz_-.=[]{}'\"#\n\t\\ \x00\x7fü\U0001f600019e+:,"


def full(rng: random.Random) -> dict[str, Any]:
    """Return a valid run file with every field in it."""
    model = rng.choice([{"name": "smollm2"}, {"config": {"model_type": "llama", "x": [1]}}])
    return {
        "model": {**model, "dtype": "bfloat16", "gradient_checkpointing": True},
        "data": {
            "paths": ["a", "../b.jsonl"], "suffix": ".md", "exclude": ["x"], "text_field": "t",
            "tokenizer": "bytes", "row_length": 64, "document_length": 32, "on_bad_file": "refuse",
        },
        "parallel": {
            "cp": 2, "dp": 2, "layout": "balanced:1.1", "kv_exchange": "halo",
            "attn_backend": "sdpa", "fsdp": True, "device": "cpu",
        },
        "optimizer": {
            "lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.1, "warmup": 3, "grad_clip": 1.0,
        },
        "run": {
            "steps": 3, "rows_per_step": 4, "seed": 5, "folder": "out", "save_every": 2,
            "resume": False, "boundary_probe": True,
        },
    }  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    """Return what a TOML file can hold, and a little that it cannot."""
    deep: Any = 1
    for _ in range(rng.choice([1, 5, 200])):
        deep = rng.choice([[deep], {"a": deep}])
    numbers = [0, -1, 1, 2, 3, 10**30, 2**63, 10**5000, 0.0, -0.5, math.nan, math.inf, -math.inf]
    kinds = [
        lambda: rng.choice(numbers),
        lambda: rng.choice([True, False, "", "auto", "\x00", "a" * 5000, "\ud800", "../../.."]),
        lambda: [rng.choice(numbers) for _ in range(rng.randrange(4))],
        lambda: deep,
        lambda: odd_layout(rng),
        lambda: odd_knob(rng),
        lambda: anything(rng),
    ]
    return rng.choice(kinds)()


def spoil(rng: random.Random, tree: dict[str, Any]) -> None:
    """Change one thing in a tree."""
    section = rng.choice(list(tree))
    fields = tree[section]
    kind = rng.random()
    if not isinstance(fields, dict) or not fields or kind < 0.1:
        tree[rng.choice([section, "extra", "", "model.config"])] = odd_value(rng)
    elif kind < 0.75:
        fields[rng.choice(list(fields))] = odd_value(rng)
    elif kind < 0.85:
        del fields[rng.choice(list(fields))]
    elif kind < 0.95:
        fields[rng.choice(["row_lenght", "", "a.b", "\ud800", 3, None])] = odd_value(rng)
    else:
        del tree[section]


def number(value: Any, low: float, high: float = math.inf) -> bool:
    """Say whether a value is a finite number in `[low, high]`."""
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


def whole(value: Any, low: int) -> bool:
    """Say whether a value is an int of at least `low`."""
    return type(value) is int and low <= value


def same(found: Any, value: Any) -> bool:
    """Say whether a field is what the file says: `"3"`, `3.0` and `true` may stand for 3, 3, 1."""
    if isinstance(value, enum.Enum):
        value = value.value
    if hasattr(value, "tolist"):  # numpy and torch numbers, in whatever dimensions
        value = (flat(value.tolist()) or [value])[0]
    if isinstance(found, bool):
        return found == (str(value).lower() in ("1", "1.0", "true", "t", "yes", "y", "on"))
    if isinstance(found, int | float):
        return found == value or float(found) == float(value)
    if isinstance(found, list | tuple):
        return all(same(a, b) for a, b in zip(found, value, strict=True))
    return found == (bytes(value).decode() if isinstance(value, bytes | bytearray) else value)


def assert_config(config: Any, tree: dict[str, Any]) -> None:
    """Each field is what the file says, or its default; each is in the range it documents."""
    p, d, o, r = config.parallel, config.data, config.optimizer, config.run
    given = {s: v if isinstance(v, dict) else {} for s, v in tree.items()}
    for section, fields in given.items():
        for name, value in fields.items():
            found = getattr(getattr(config, section), name)
            if name == "attn_backend":
                value = canonical(value, BACKENDS, "flash")
            elif name == "kv_exchange":
                value = canonical(value, EXCHANGES, "allgather")
            elif name == "paths":
                check([p == (HERE / v).resolve() for p, v in zip(found, value, strict=True)])
                continue
            elif name == "folder":
                value = (HERE / value).resolve()
            check(same(found, value), section, name, "is", found, "not", value)
    check(all(whole(n, 1) for n in (p.cp, p.dp, r.steps, config.rows_per_step)), config)
    check(all(whole(n, 0) for n in (o.warmup, r.save_every, r.seed)), config)
    check(whole(d.row_length, 2) and (d.document_length is None or whole(d.document_length, 2)))
    check(number(o.lr, 5e-324) and number(o.weight_decay, 0), o)
    check(all(number(b, 0, 1) and b < 1 for b in o.betas) and len(o.betas) == 2, o)
    check(o.grad_clip is None or number(o.grad_clip, 5e-324), o)
    check(config.rows_per_step % p.dp == 0 and config.world_size == p.cp * p.dp, config)
    name, _, tolerance = p.layout.partition(":")
    check(name in ("contiguous", "head_tail", "zigzag", "balanced", "auto"), p.layout)
    check(not tolerance or (name == "balanced" and number(float(tolerance), 1)), p.layout)


def tree_case(rng: random.Random) -> str:
    tree = full(rng)
    for section in list(tree):  # most fields have defaults
        if section in ("parallel", "optimizer") and rng.random() < 0.2:
            del tree[section]
    changes = rng.choice([0, 1, 1, 1, 2])
    for _ in range(changes):
        spoil(rng, tree)
    if rng.random() < 0.02:
        tree, changes = anything(rng), 1
    with sound(changes == 0):
        config = parse_config(tree, HERE)
    assert_config(config, tree)
    return "right"


def test_run_file_trees():
    judge("run_trees", tree_case)


def odd_text(rng: random.Random) -> bytes:
    """Return an example with its text changed, or garbage."""
    text = rng.choice(EXAMPLES)
    at = rng.randrange(len(text))
    kinds = [
        lambda: text[:at] + rng.choice(LETTERS) + text[at + rng.randrange(3) :],
        lambda: text[:at],
        lambda: text[:at] + text[at // 2 :],
        lambda: "\n".join(rng.sample(text.split("\n"), text.count("\n") + 1)),
        lambda: text.replace("4096", rng.choice(["1" * 5000, "1e999", "0x10", "4_096", "[1]"])),
        lambda: f"{text}\nx = {'[' * 100_000}",
        lambda: f"x = {'[' * 400}{']' * 400}",
        lambda: "".join(rng.choice(LETTERS) for _ in range(rng.randrange(60))),
    ]
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(80))
    return rng.choice(kinds)().encode(rng.choice([*["utf-8"] * 4, "utf-16", "utf-8-sig"]))


def test_run_file_text(tmp_path):
    path = tmp_path / "run.toml"
    (tmp_path / "closed.toml").touch()

    def text_case(rng: random.Random) -> str:
        if rng.random() < 0.03:
            names = ["closed.toml", "none.toml", "run.toml/x", "\x00", "a" * 5000, "."]
            where = [tmp_path / name for name in names]
            load_config(rng.choice(where))
            pytest.fail("read a file that is none")
        path.write_bytes(odd_text(rng))
        config = load_config(path)
        assert_config(config, {})
        return "right"

    judge("run_files", text_case)
