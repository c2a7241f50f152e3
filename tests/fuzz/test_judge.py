"""The fuzz itself: as many cases as promised, and a planted fault is found and can be repeated."""

import random

import pytest
from tests.fuzz import judge as fuzz
from tests.fuzz.test_documents import documents_case

from longpack.packing import read


def test_as_many_cases_as_promised():
    assert sum(fuzz.CASES.values()) >= 20_000


def test_a_planted_fault_is_found_and_repeats(monkeypatch):
    """Casts that lose what a float cannot hold: the reader as it was before it was fuzzed."""
    monkeypatch.setattr(fuzz, "TALLIES", [])
    monkeypatch.setitem(fuzz.CASES, "documents", 300)
    monkeypatch.setattr(read, "_check_floats", lambda found, name, low: None)
    with pytest.raises(
        AssertionError, match=r"FUZZ_CASE=\d+ pytest tests/fuzz -k documents"
    ) as told:
        fuzz.judge("documents", documents_case)
    case = int(str(told.value).split("FUZZ_CASE=")[1].split()[0])
    monkeypatch.setattr(fuzz, "ONLY", str(case))
    with pytest.raises(AssertionError, match="documents: 1 cases"):
        fuzz.judge("documents", documents_case)


def test_what_is_not_an_error_of_ours_fails():
    def body(rng: random.Random) -> str:
        raise KeyError("missing")

    tally = fuzz.Tally("plans")
    fuzz._run(tally, 3, body)
    assert tally.outcomes == {"FAILED: KeyError": 1}
    assert "FUZZ_CASE=3" in next(iter(tally.failures.values()))
