"""The loop: the same losses over any mesh, after any stop, and nothing from elsewhere."""

import copy
import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from tests.train.runs import LLAMA, make_config, saved_in, write_documents

from longpack import plan_step
from longpack.blockdiag_cp import keep_in_recompute
from longpack.errors import LongpackError, RunError, StepError
from longpack.train import checkpoint, prepare, train, trainer
from longpack.train.metrics import Traffic, loads_of, read_metrics
from longpack.train.model import layer_shape
from longpack.train.rows import Cursor
from longpack.train.trainer import load_summary


def records_of(folder):
    """Every metric of a run that does not depend on a clock."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in records]


def check_train(rank, world_size, folder, sections):
    train(make_config(folder, **sections))


def check_error(rank, world_size, folder, sections_of_rank):
    """Return what the rank's run raised, as text."""
    with pytest.raises(LongpackError) as caught:
        train(make_config(folder, **sections_of_rank[rank]))
    return f"{caught.type.__name__}: {caught.value}"


@pytest.fixture
def run_ranks(on_ranks):
    """Train on two ranks, over documents that are there before either reads them."""

    def run(folder, sections):
        if not (folder / "documents").is_dir():
            write_documents(folder / "documents")
        on_ranks(check_train, folder, sections, world_size=2)
        return records_of(folder / "run")

    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The metrics of the small run on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    train(make_config(folder))
    return records_of(folder / "run")


def test_the_small_run_learns_and_packs(one_rank):
    assert [r["step"] for r in one_rank] == [1, 2, 3, 4]
    assert one_rank[-1]["loss"] < one_rank[0]["loss"] - 0.3
    assert [r["lr"] for r in one_rank] == [0.005, 0.01, 0.01, 0.01]
    assert all(r["tokens"] == 192 and r["documents"] >= 3 for r in one_rank)
    assert all(r["attention_calls"] == 4 for r in one_rank)


MESHES = {
    "cp": {"parallel": {"cp": 2, "kv_exchange": "a2a"}},
    "cp_zigzag": {"parallel": {"cp": 2, "layout": "zigzag", "attn_backend": "dense"}},
    "cp_balanced": {"parallel": {"cp": 2, "layout": "balanced:1.1", "kv_exchange": "a2a"}},
    "dp": {"parallel": {"dp": 2}},
    "dp_fsdp": {"parallel": {"dp": 2, "fsdp": True}},
    "cp_fsdp_recompute": {
        "parallel": {"cp": 2, "fsdp": True},
        "model": {"gradient_checkpointing": True},
    },
}


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_train_as_one(mesh, one_rank, run_ranks, tmp_path):
    records = run_ranks(tmp_path, MESHES[mesh])
    for ours, theirs in zip(records, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
        assert (ours["tokens"], ours["documents"]) == (theirs["tokens"], theirs["documents"])


class StopError(Exception):
    """Stands for a kill: nothing of ours runs after it."""


def stop_after(step):
    def on_step(metrics):
        if metrics.step == step:
            raise StopError

    return on_step


MODELS = {
    "llama": LLAMA,
    "dropout": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.1,
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_resuming_is_bitwise_the_uninterrupted_run(model, tmp_path):
    sections = {"model": {"config": MODELS[model]}, "run": {"steps": 6, "save_every": 2}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make_config(whole, **sections))
    for stop in (3, 5):  # steps 3 and 5 are done but not saved: they run again
        with pytest.raises(StopError):
            train(make_config(parts, **sections), on_step=stop_after(stop))
    summary = train(make_config(parts, **sections))
    assert summary.resumed_from == 4
    assert records_of(parts / "run") == records_of(whole / "run")
    assert load_summary(parts / "run") == summary
    assert saved_in(parts / "run", 6) == saved_in(whole / "run", 6)
    models = [finished_model(make_config(f, **sections)) for f in (whole, parts)]
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours, theirs)


def finished_model(config):
    """The model of a finished run, as its last checkpoint has it."""
    kept = {}
    finish = trainer.Trainer.finish

    def keep(run):
        kept["model"] = run.model
        return finish(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "finish", keep)
        train(config)
    return kept["model"]


def test_a_run_goes_on_over_another_mesh(one_rank, run_ranks, tmp_path):
    with pytest.raises(StopError):
        train(make_config(tmp_path), on_step=stop_after(3))
    records = run_ranks(tmp_path, {"parallel": {"cp": 2, "fsdp": True}})
    for ours, theirs in zip(records, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)


def test_a_kill_while_saving_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    train(make_config(tmp_path, run={"steps": 2}))

    def torn(state, checkpoint_id):
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise StopError

    monkeypatch.setattr(checkpoint, "save_shards", torn)
    with pytest.raises(StopError):
        train(make_config(tmp_path))
    monkeypatch.undo()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [".partial", "step-00000002"]
    assert train(make_config(tmp_path)).resumed_from == 2
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000004"]


def test_a_finished_run_has_nothing_left(tmp_path):
    first = train(make_config(tmp_path))
    again = train(make_config(tmp_path))
    assert again.resumed_from == again.steps == first.steps == 4
    assert again.last_loss == first.last_loss


def contents(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"lr": 0.5}}, r"another run: optimizer.lr was 0.01, now 0.5. Change"),
        ({"data": {"row_length": 64}}, r"data.row_length was 96, now 64"),
        ({"run": {"seed": 3}}, r"run.seed was 0, now 3"),
        ({"model": {"dtype": "float64"}}, r"model.dtype was 'float32', now 'float64'"),
        ({"run": {"resume": False}}, r"holds a run and run.resume = false"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, sections, said):
    train(make_config(tmp_path, run={"steps": 1}))
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=said):
        train(make_config(tmp_path, **sections))
    assert contents(tmp_path / "run") == before


def test_changed_documents_are_another_run(tmp_path):
    config = make_config(tmp_path, run={"steps": 1})
    train(config)
    (tmp_path / "documents" / "001.txt").write_text("something else")
    with pytest.raises(RunError, match=r"data.documents was '\w+', now '\w+'"):
        train(config)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match=r"holds files but no run.json"):
        train(make_config(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"is a file"):
        train(make_config(tmp_path, run={"folder": "file"}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"config": {**LLAMA, "hiden_size": 3}}}, "did you mean hidden_size"),
        ({"model": {"config": {"model_type": "lama"}}}, "model_type = 'lama' is unknown"),
        ({"model": {"config": {**LLAMA, "vocab_size": 99}}}, "knows 99 tokens but .* makes 257"),
        ({"model": {"config": None, "name": "nowhere"}}, "not a folder with a config.json"),
        ({"data": {"tokenizer": "nowhere"}}, "'bytes', 'smollm2' or the folder"),
        ({"data": {"paths": ["nowhere"]}}, "nowhere does not exist"),
        ({"model": {"config": {**LLAMA, "attention_dropout": 0.1}}}, "attention_dropout > 0"),
        ({"parallel": {"device": "cuda"}}, "this machine has 0 GPUs for 1 ranks"),
        ({"parallel": {"cp": 3}}, "needs 3 ranks but 1 were started"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, sections, said):
    if torch.cuda.is_available() and sections == {"parallel": {"device": "cuda"}}:
        pytest.skip("this machine has a GPU")
    with pytest.raises(LongpackError, match=said):
        train(make_config(tmp_path, **sections))
    assert not (tmp_path / "run").exists()


def test_every_rank_hears_of_one_ranks_bad_input(on_ranks, tmp_path):
    """Rank 1 has another file, then no file: nobody trains, nobody hangs, nothing is written."""
    write_documents(tmp_path / "documents")
    write_documents(tmp_path / "others", count=3)
    cp = {"parallel": {"cp": 2}}
    faults = {"others": "the run is .* here but .* on rank", "nowhere": "rank 1 cannot begin"}
    for paths, said in faults.items():
        sections = [cp, {**cp, "data": {"paths": [paths]}}]
        first, second = on_ranks(check_error, tmp_path, sections, world_size=2)
        with pytest.raises(RunError, match=said):
            raise RunError(first)
        assert ("does not exist" in second) == (paths == "nowhere")
    assert not (tmp_path / "run").exists()


def test_a_saved_model_trains_on_with_its_own_weights(tmp_path):
    train(make_config(tmp_path))
    finished_model(make_config(tmp_path)).save_pretrained(tmp_path / "saved")
    model = {"config": None, "name": str(tmp_path / "saved")}
    summary = train(make_config(tmp_path, model=model, run={"folder": "second", "steps": 1}))
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert summary.first_loss < first["loss"] - 0.3


def test_long_documents_are_cut_to_the_models_positions(tmp_path):
    model = {"config": {**LLAMA, "max_position_embeddings": 16}}
    train(make_config(tmp_path, model=model, run={"steps": 1}))
    identity = json.loads((tmp_path / "run" / "run.json").read_text())
    assert identity["data"]["document_length"] == 16
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record["documents"] >= 2 * 96 // 16


def changed(monkeypatch, change):
    """Have every run train a model that `change` was at."""

    def build(config, tokenizer):
        model = build_model(config, tokenizer)
        change(model)
        return model

    build_model = prepare.build_model
    monkeypatch.setattr(prepare, "build_model", build)


def attends_by_itself(model):
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"


def attends_twice(model):
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    attention.forward = twice


def recomputes_all(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


def recomputes_not_all(model):
    recomputes_all(model)
    model.model.layers[1].gradient_checkpointing = False


def recomputes_without_attention(model):
    context_fn = keep_in_recompute("attention")
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})


def recomputes_twice(model):
    recomputes_all(model)
    attention = model.model.layers[1].self_attn
    forward, calls = attention.forward, itertools.count()

    def again(*args, **kwargs):
        if next(calls) % 2:  # in the recompute
            with torch.no_grad():
                forward(*args, **kwargs)
        return forward(*args, **kwargs)

    attention.forward = again


@pytest.mark.parametrize(
    ("change", "recomputes", "said"),
    [
        (attends_by_itself, False, "(1 attention calls in forward, not 2)"),
        (attends_twice, False, "(3 attention calls in forward, not 2)"),
        (recomputes_all, False, "(2 attention calls in backward, not 0)"),
        (recomputes_not_all, True, "(1 attention calls in backward, not 2)"),
        (recomputes_without_attention, True, "(0 attention calls in backward, not 2)"),
        (recomputes_twice, True, "(3 attention calls in backward, not 2)"),
    ],
)
def test_attention_calls_that_are_not_one_a_layer_stop_the_run(
    change, recomputes, said, tmp_path, monkeypatch
):
    changed(monkeypatch, change)
    config = make_config(tmp_path, model={"gradient_checkpointing": recomputes})
    with pytest.raises(StepError) as caught:
        train(config)
    rows = [f"row {n} on rank 0 {said}" for n in (0, 1)]
    assert f"step 1 did not attend through longpack once a layer: {', '.join(rows)}." in str(
        caught.value
    )


def check_misfire(rank, world_size, folder):
    """Rank 1's model recomputes though nobody asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            changed(patch, recomputes_all)
        return check_error(rank, world_size, folder, [{"parallel": {"dp": 2}}] * 2)


def test_every_rank_hears_of_one_ranks_attention_calls(on_ranks, tmp_path):
    write_documents(tmp_path / "documents")
    said = on_ranks(check_misfire, tmp_path, world_size=2)
    assert said[0] == said[1]
    assert "a layer: row 1 on rank 1 (2 attention calls in backward, not 0)." in said[0]


@pytest.mark.parametrize(
    ("parallel", "calls"),
    [({"cp": 2, "layout": "zigzag", "kv_exchange": "a2a"}, 8), ({"cp": 2}, 8), ({"dp": 2}, 4)],
)
def test_the_metrics_say_what_fired_and_what_ranks_share(parallel, calls, run_ranks, tmp_path):
    """Against all rows of each step planned here: two rows, two layers, checkpointed."""
    sections = {"parallel": parallel, "model": {"gradient_checkpointing": True}}
    records = run_ranks(tmp_path, sections)
    config = make_config(tmp_path, **sections)
    prepared, cursor = prepare.prepare(config), Cursor()
    packer, shape = prepared.packer(), layer_shape(prepared.model, recompute=True)
    assert shape.kv_bytes == 2 * 2 * 8 * 4
    cp, dp = config.parallel.cp, config.parallel.dp
    for record in records:
        rows, cursor = packer.rows(cursor, 2)
        plans = [
            plan_step(row.documents, cp, config.parallel.layout, config.parallel.kv_exchange)
            for row in rows
        ]
        loads = np.concatenate([loads_of(plans[replica::dp]) for replica in range(dp)], axis=1)
        expected = asdict(Traffic.of_loads(loads, shape))
        assert {name: record[name] for name in expected} == expected
        assert record["attention_calls"] == calls


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(RunError, match=r"step \d has loss (nan|inf)|norm (nan|inf)"):
        train(make_config(tmp_path, optimizer={"lr": 1e30, "warmup": 0, "grad_clip": None}))


POISON = 93  # the id of "~"


def poison(where):
    """Make the loss (forward) or the gradient (backward) of documents with "~" not a number."""

    def build(config, tokenizer):
        model = build_model(config, tokenizer)

        def hook(module, args, out):
            bad = (args[0] == POISON)[..., None]
            if where == "loss":
                return out.masked_fill(bad, torch.nan)
            out.register_hook(lambda grad: grad.masked_fill(bad, torch.nan))

        model.get_input_embeddings().register_forward_hook(hook)
        return model

    build_model = prepare.build_model
    return build


def check_poison(rank, world_size, folder, where):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "build_model", poison(where))
        return check_error(rank, world_size, folder, [{"parallel": {"cp": 2}}] * 2)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_traced_to_document_and_rank(where, on_ranks, tmp_path):
    """Each row is one document of 95 bytes and its end: "~" lies in the half of rank 1."""
    (tmp_path / "documents").mkdir()
    for name in ("a", "b"):
        (tmp_path / "documents" / f"{name}.txt").write_text(name * 94 + "~")
    said = on_ranks(check_poison, tmp_path, where, world_size=2)
    assert said[0] == said[1]
    assert "row 0 document 0 on rank 1" in said[0]
    assert f"({where})" in said[0]
    assert "The last checkpoint is kept" in said[0]


def test_the_boundary_probe_holds_and_would_see_a_leak(tmp_path, run_ranks, monkeypatch):
    probed = {"run": {"boundary_probe": True, "steps": 1}}
    run_ranks(tmp_path / "cp2", {**probed, "parallel": {"cp": 2}})
    probes = [load_summary(tmp_path / "cp2" / "run").probe]
    probes.append(train(make_config(tmp_path / "cp1", **probed)).probe)
    for probe in probes:
        assert probe.held
        assert probe.moved_outside == 0.0
        assert probe.moved_inside > 0.01
        assert probe.start <= 48 < probe.stop
    assert probes[0].moved_inside == pytest.approx(probes[1].moved_inside, rel=1e-3)

    def leaky(config, tokenizer):
        """Attends across documents: the step says that the whole row is one."""
        model = build_model(config, tokenizer)
        model.register_forward_pre_hook(merge_documents, with_kwargs=True)
        return model

    build_model = prepare.build_model
    monkeypatch.setattr(prepare, "build_model", leaky)
    probe = train(make_config(tmp_path / "leak", **probed)).probe
    assert not probe.held
    assert probe.moved_outside > 0.001


def merge_documents(module, args, kwargs):
    from longpack import CpStep, PackedRow, plan_step

    step = kwargs["cp_step"]
    row = PackedRow.from_lengths([step.plan.row.length])
    kwargs["cp_step"] = CpStep.make(plan_step(row, 1), step.transport)
    return args, kwargs
