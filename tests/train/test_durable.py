"""A crash, a full disk or a damaged file: the last good checkpoint, or an error that names it."""

import errno
import json
import os
import pickle
import shutil

import pytest
import torch
from tests.train.runs import make_config, write_documents
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from longpack.errors import RunError
from longpack.train import checkpoint, durable, train
from longpack.train.trainer import load_summary


def full(*args, **kwargs):
    """Stand for a write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A run of which two steps are saved."""
    folder = tmp_path_factory.mktemp("two_steps")
    train(make_config(folder, run={"steps": 2}))
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A copy of it that a test may damage."""
    return shutil.copytree(two_steps, tmp_path / "copy")


def test_a_file_is_old_or_new_at_every_crash(tmp_path, monkeypatch):
    """Cut the power before each system call of a write: content and order are as promised."""
    path = tmp_path / "run.json"
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def crash(*args, name=name, real=real):
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, crash)
    for limit, kept in ((0, "old"), (1, "old"), (2, "new"), (3, "new")):
        path.write_text("old")
        calls.clear()
        if limit < 3:
            with pytest.raises(KeyboardInterrupt):
                durable.write_file(path, "new")
        else:
            durable.write_file(path, "new")
        assert path.read_text() == kept
    assert calls == ["fsync", "replace", "fsync"]


WRITERS = {
    "shards": (FileSystemWriter, "write_data"),
    "progress": (checkpoint, "sync_folder"),
    "file": (durable, "sync_file"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_keeps_the_last_checkpoint(writer, folder, monkeypatch):
    where, name = WRITERS[writer]
    monkeypatch.setattr(where, name, full)
    with pytest.raises(RunError, match=r"cannot be written: .*No space left.* make room") as caught:
        train(make_config(folder))
    assert str(folder / "run") in str(caught.value)
    monkeypatch.undo()
    summary = train(make_config(folder))
    assert summary.steps == 4
    assert summary.resumed_from == (4 if writer == "progress" else 2)  # the rename was made


def check_full_disk(rank, world_size, folder):
    """Rank 1 has a full disk: what each rank hears of it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(RunError) as caught:
            train(make_config(folder, parallel={"cp": 2}))
    return str(caught.value)


def test_every_rank_hears_of_one_ranks_full_disk(on_ranks, tmp_path):
    write_documents(tmp_path / "documents")
    for said in on_ranks(check_full_disk, tmp_path, world_size=2):
        assert "step-00000002 cannot be written: on rank 1: No space left" in said


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shift_cursor(path):
    content = json.loads(path.read_text())
    content["cursor"]["position"] += 1
    path.write_text(json.dumps(content))


def remove(path):
    path.unlink()


CHECKPOINT = "checkpoints/step-00000002"
DAMAGES = [
    ("run.json", cut, "is damaged, it is not JSON"),
    ("run.json", lambda path: path.write_text("[]"), "is damaged, it is not a JSON object"),
    (f"{CHECKPOINT}/progress.json", cut, "is damaged, it is not JSON"),
    (f"{CHECKPOINT}/progress.json", shift_cursor, "is damaged, its digest differs"),
    (f"{CHECKPOINT}/progress.json", remove, "cannot be read: No such file"),
    (f"{CHECKPOINT}/__0_0.distcp", cut, "is damaged, its digest is not the recorded one"),
    (f"{CHECKPOINT}/__0_0.distcp", flip, "is damaged, its digest is not the recorded one"),
    (f"{CHECKPOINT}/__0_0.distcp", remove, "cannot be read: No such file"),
    (f"{CHECKPOINT}/.metadata", flip, "is damaged, its digest is not the recorded one"),
    ("metrics.jsonl", lambda path: path.write_text("{}\n{}\n"), "is damaged, line 1 is no record"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_a_damaged_file_is_named(name, damage, said, folder):
    path = folder / "run" / name
    damage(path)
    with pytest.raises(RunError) as caught:
        train(make_config(folder))
    assert f"{path} {said}" in str(caught.value)
    assert "Restore" in str(caught.value)


def test_a_damaged_summary_is_named_and_written_anew(folder):
    path = folder / "run" / "summary.json"
    for damage in (cut, lambda path: path.write_text("{}"), remove):
        damage(path)
        with pytest.raises(RunError, match=r"summary.json .* Run the same command again"):
            load_summary(folder / "run")
    train(make_config(folder, run={"steps": 2}))
    assert load_summary(folder / "run").steps == 2


class Payload:
    """Pickled, it names a call."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)


def forge(saved):
    """Make the digests of a checkpoint match its files, as whoever forges one can."""
    path = saved / "progress.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"] = {name: durable.digest(saved / name) for name in content["files"]}
    path.write_text(json.dumps({**content, "digest": durable.digest_json(content)}))


@pytest.mark.parametrize("place", ["metadata", "dotted", "betas", "weight"])
def test_a_checkpoint_cannot_name_code(place, folder, monkeypatch):
    monkeypatch.chdir(folder)
    saved = folder / "run" / CHECKPOINT
    if place in ("betas", "weight"):
        metadata = pickle.loads((saved / ".metadata").read_bytes())
        shard, payload = saved / "__0_0.distcp", saved / "payload"
        torch.save(Payload(), payload)
        info = next(s for i, s in metadata.storage_data.items() if i.fqn.endswith(f".{place}"))
        info.offset, info.length = shard.stat().st_size, payload.stat().st_size
        shard.write_bytes(shard.read_bytes() + payload.read_bytes())
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    elif place == "metadata":
        (saved / ".metadata").write_bytes(pickle.dumps(Payload()))
    else:  # a dotted name leads from an allowed module to what it imports
        name = b"torch.distributed.checkpoint.metadata"
        words = b"".join(b"\x8c" + bytes([len(w)]) + w for w in (name, b"os.mkdir"))
        (saved / ".metadata").write_bytes(b"\x80\x04" + words + b"\x93\x8c\x05pwned\x85R.")
    forge(saved)
    said = ".*.metadata names .*mkdir, which describes no tensor"
    if place in ("betas", "weight"):
        said = "on rank 0: a shard holds more than tensors and numbers"
    with pytest.raises(RunError, match=f"step-00000002 cannot be loaded: {said}. Restore"):
        train(make_config(folder))
    assert not (folder / "pwned").exists()
