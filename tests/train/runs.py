"""Small runs for the tests of this room."""

import json

from longpack.train.config import parse_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_documents(folder, count=12):
    """Write texts of 5 to about 160 characters, a few of them not ASCII."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        text = f"document {n}: " + "ünïcode " * (n % 3) + "abc def " * (n * 7 % 17)
        (folder / f"{n:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def run_text(folder, **sections):
    """Return a run file's contents; keyword arguments change sections field by field."""
    text = {
        "model": {"config": dict(LLAMA)},
        "data": {"paths": ["documents"], "row_length": 96},
        "parallel": {"device": "cpu"},
        "optimizer": {"lr": 1e-2, "warmup": 2, "grad_clip": 1.0},
        "run": {"steps": 4, "folder": "run", "save_every": 2, "rows_per_step": 2},
    }
    for name, fields in sections.items():
        text[name] = {**text[name], **fields}
    return text


def make_config(folder, **sections):
    """Return a checked run over the documents in `folder`, written unless they are there."""
    if not (folder / "documents").is_dir():
        write_documents(folder / "documents")
    return parse_config(run_text(folder, **sections), folder)


def saved_in(folder, step):
    """Return step, cursor and the digests of all that a checkpoint holds of the model."""
    path = folder / "checkpoints" / f"step-{step:08d}" / "progress.json"
    content = json.loads(path.read_text())
    del content["digest"], content["files"][".metadata"]  # it holds an id of the save
    return content
