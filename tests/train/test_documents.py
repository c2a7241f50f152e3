"""Corpora: every format, and every kind of document that cannot be used."""

import json

import pytest

from longpack.errors import RunError
from longpack.train.config import DataSection
from longpack.train.documents import read_corpus


def corpus_of(*paths, **fields):
    return read_corpus(DataSection(paths=list(paths), row_length=8, **fields))


def texts(corpus):
    return [corpus.text(i) for i in range(len(corpus))]


def test_every_format(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("one")
    lines = [json.dumps({"text": t, "id": 1}) for t in ("two\nlines", "thrée")]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines))
    table = pyarrow.table({"text": ["four", "five"], "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    for name in ("d/sub", "d/skipped"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "d/sub/z.py").write_text("seven")
    (tmp_path / "d/b.py").write_text("six")
    (tmp_path / "d/b.md").write_text("not asked for")
    (tmp_path / "d/skipped/c.py").write_text("excluded")
    paths = [tmp_path / p for p in ("a.txt", "b.jsonl", "c.parquet", "d")]
    corpus = corpus_of(*paths, suffix=".py", exclude=["skipped"])
    assert texts(corpus) == ["one", "two\nlines", "thrée", "four", "five", "six", "seven"]
    assert corpus.skipped == {}


def test_bad_documents_are_named_and_counted(tmp_path):
    bad = {
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "latin.txt": b"caf\xe9 au lait",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    corpus = corpus_of(tmp_path)
    assert texts(corpus) == ["good"]
    assert corpus.skipped == {
        str(tmp_path / "blank.txt"): "is empty",
        str(tmp_path / "empty.txt"): "is empty",
        str(tmp_path / "latin.txt"): "is not UTF-8: byte 0xe9 at offset 3",
    }
    with pytest.raises(RunError, match=r"3 of 4 documents cannot be used: .*blank.txt is empty"):
        corpus_of(tmp_path, on_bad_file="refuse")


def test_bad_records_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [
        b'{"text": "fine"}',
        b"{",
        b'{"body": 1}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
    ]
    path.write_bytes(b"\n".join(records))
    corpus = corpus_of(path)
    assert texts(corpus) == ["fine"]
    assert list(corpus.skipped) == [f"{path}, record {n}" for n in (2, 3, 4, 5)]
    expected = ("not JSON", "no text field 'text'", "not UTF-8", "not UTF-8")
    for reason, said in zip(corpus.skipped.values(), expected, strict=True):
        assert said in reason


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "no usable document: .*a.txt is empty"),
        ("a.jsonl", b"", "no usable document: .*a.jsonl is empty"),
        ("a.parquet", b"PAR1 no", "is not a Parquet file"),
    ],
)
def test_nothing_usable(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=said):
        corpus_of(tmp_path / name)


def test_missing_paths_and_columns(tmp_path):
    import pyarrow
    import pyarrow.parquet

    with pytest.raises(RunError, match=r"none.txt does not exist"):
        corpus_of(tmp_path / "none.txt")
    with pytest.raises(RunError, match=r"holds no file that ends in '.txt' \(data.suffix\)"):
        corpus_of(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(RunError, match=r"no column 'text' \(data.text_field\); it has body"):
        corpus_of(tmp_path / "a.parquet")


def test_fingerprint_is_of_contents_not_places(tmp_path):
    for name, text in (("x/a.txt", "one"), ("y/b.txt", "one"), ("z/a.txt", "two")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    x, y, z = (corpus_of(tmp_path / f).fingerprint for f in "xyz")
    assert x == y != z


def test_order_is_a_shuffle_of_seed_and_epoch(tmp_path):
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(str(n))
    corpus = corpus_of(tmp_path)
    orders = [corpus.order(seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert corpus.order(0, 1).tolist() == orders[1]
