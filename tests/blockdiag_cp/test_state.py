"""The interface document of `longpack.blockdiag_cp.state`, name by name."""

import subprocess
import sys
import threading

import pytest

from longpack.blockdiag_cp import state


@pytest.fixture(autouse=True)
def _restore():
    yield
    state.configure_cp_varlen()
    state.reset_cp_attn_fire_count()


def test_importing_the_leaf_loads_no_torch():
    code = (
        "import sys, longpack, longpack.blockdiag_cp.state; "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_tables():
    assert state.ATTN_BACKEND_SYNONYMS == {
        "flash": ("flash", "flash_attn", "flash_attention", "flash_attention_2", "fa2"),
        "te": ("te", "transformer_engine", "transformerengine"),
        "dense": ("dense", "sdpa", "torch_sdpa"),
    }
    assert state.KV_EXCHANGE_SYNONYMS == {
        "allgather": ("allgather", "all_gather"),
        "halo": ("halo", "neighbor", "needed", "needed_only"),
        "a2a": ("a2a", "a2av", "all_to_all", "alltoall", "needed_a2a"),
    }
    assert state.ATTN_BACKEND_VALUES == ("flash", "te", "dense")
    assert state.KV_EXCHANGE_VALUES == ("allgather", "halo", "a2a")
    assert (state.ATTN_BACKEND_DEFAULT, state.KV_EXCHANGE_DEFAULT) == ("flash", "allgather")
    assert state._ATTN_BACKEND_REVERSE["fa2"] == "flash"
    assert state._KV_EXCHANGE_REVERSE["needed"] == "halo"
    assert state._clean(" Flash-Attention ") == "flash_attention"


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (None, "flash"),
        ("", "flash"),
        ("auto", "flash"),
        ("Default", "flash"),
        (" FA2 ", "flash"),
        ("Flash-Attention-2", "flash"),
        ("Transformer-Engine", "te"),
        ("torch-sdpa", "dense"),
    ],
)
def test_attention_backends(value, canonical):
    assert state.normalize_attn_backend(value) == canonical


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (None, "allgather"),
        ("AUTO", "allgather"),
        ("all-gather", "allgather"),
        ("A2AV", "a2a"),
        ("needed-only", "halo"),
        ("All-To-All", "a2a"),
    ],
)
def test_exchanges(value, canonical):
    assert state.normalize_kv_exchange(value) == canonical


def test_every_synonym_maps_to_its_canonical_value():
    for canonical, synonyms in state.ATTN_BACKEND_SYNONYMS.items():
        assert {state.normalize_attn_backend(s.upper()) for s in synonyms} == {canonical}
    for canonical, synonyms in state.KV_EXCHANGE_SYNONYMS.items():
        assert {state.normalize_kv_exchange(s.upper()) for s in synonyms} == {canonical}


@pytest.mark.parametrize("bad", ["ring", 3, "flash attn"])
def test_unknown_values_list_the_accepted(bad):
    with pytest.raises(ValueError, match=r"attn_backend=.* is unknown; .*flash_attn.*torch_sdpa"):
        state.normalize_attn_backend(bad)
    with pytest.raises(ValueError, match=r"kv_exchange=.* is unknown; .*halo.*needed_a2a"):
        state.normalize_kv_exchange(bad)


def test_configure_and_read_back():
    state.configure_cp_varlen("sdpa", "neighbor")
    assert state.cp_varlen_runtime_config() == {"attn_backend": "dense", "kv_exchange": "halo"}
    with pytest.raises(ValueError, match="kv_exchange"):
        state.configure_cp_varlen(attn_backend="te", kv_exchange="nonsense")
    assert state.cp_varlen_runtime_config() == {"attn_backend": "dense", "kv_exchange": "halo"}
    state.configure_cp_varlen()
    assert state.cp_varlen_runtime_config() == {"attn_backend": "flash", "kv_exchange": "allgather"}


def test_the_slot_is_shared_by_threads_and_nests():
    slot = state._ThreadSharedVar()
    assert slot.get() is None
    outer = slot.set("a")
    inner = slot.set("b")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(slot.get()))
    thread.start()
    thread.join()
    assert seen == ["b"]
    slot.reset(inner)
    assert slot.get() == "a"
    slot.reset(outer)
    assert slot.get() is None


def test_the_fire_counter_is_a_cell():
    state._CP_ATTN_FIRE_COUNT[0] += 2
    assert state.cp_attn_fire_count() == 2
    state.reset_cp_attn_fire_count()
    assert state.cp_attn_fire_count() == 0
