"""Routers and indexers of real Hugging Face classes, in a recompute that would choose otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from longpack.errors import UnsupportedError
from longpack.integrations.index_replay import replay_indexers
from longpack.integrations.router_replay import replay_routers
from longpack.recompute_replay import (
    IdCodec,
    RecomputeReplay,
    compose,
    is_recomputing,
    score_margin,
)

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
SPARSE = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
ROUTED: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 8},
    "DeepseekV3": LATENT,
    "GptOss": {"num_local_experts": 8, "head_dim": 8},
}
INDEXED: dict[str, dict[str, Any]] = {
    "DeepseekV32": LATENT | SPARSE,
    "GlmMoeDsa": LATENT | SPARSE | {"n_group": 1},
}
IDS = torch.arange(24)[None] * 7 % 64


def build(name: str, options: dict[str, Any]):
    config = getattr(transformers, f"{name}Config")(**(SMALL | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():  # some routers start at zero
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=source)
    return model


class OtherChoices(TorchFunctionMode):
    """Makes every topk of a recompute choose as if the scores were in another order."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk) and is_recomputing():
            scores, *rest = args
            order = torch.linspace(0, 1, scores.shape[-1])
            order = torch.where(scores.isinf(), scores, order.expand_as(scores).to(scores))
            indices = func(order, *rest, **kwargs).indices
            return torch.return_types.topk((scores.gather(-1, indices), indices))
        return func(*args, **kwargs)


@contextmanager
def other_choices(model) -> Iterator[None]:
    """Let routers and indexers run under `OtherChoices`, below any replay of theirs."""
    changed = [m for m in model.modules() if type(m).__name__.endswith(("Router", "Indexer"))]
    before = [module.__dict__.get("forward") for module in changed]
    for module in changed:
        module.forward = partial(choose_otherwise, module.forward)
    yield
    for module, forward in zip(changed, before, strict=True):
        module.__dict__.pop("forward")
        if forward is not None:
            module.forward = forward


def choose_otherwise(forward, *args: Any, **kwargs: Any) -> Any:
    with OtherChoices():
        return forward(*args, **kwargs)


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    with other_choices(model):
        model(IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def enable(model, context_fn=None) -> None:
    options = {} if context_fn is None else {"context_fn": context_fn}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": False, **options}
    )


@contextmanager
def wrapped(install, model, channel) -> Iterator[Any]:
    handle = install(model, channel)
    try:
        yield handle
    finally:
        handle.remove()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "install"),
    [(name, options, replay_routers) for name, options in ROUTED.items()]
    + [(name, options, replay_indexers) for name, options in INDEXED.items()],
)
def test_replayed_choices_give_the_gradients_of_no_checkpointing(name, options, install) -> None:
    model = build(name, options)
    expected = gradients(model)
    if install is replay_indexers:  # leave the routers of these models alone
        install = partial(install, is_indexer=lambda m: type(m).__name__.endswith("Indexer"))
        routers: RecomputeReplay[torch.Tensor] = RecomputeReplay("routers", on_miss="raise")
        replay_routers(model, routers)
        parts = [routers]
    else:
        parts = []
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("choices", on_miss="raise")
    with wrapped(install, model, channel) as handle:
        assert len(handle.sites) == 2
        enable(model, compose(channel, *parts))
        assert same(gradients(model), expected)
        assert channel.usage().live_bytes == 0
        assert set(channel.usage().sites) == set(handle.sites)


@pytest.mark.parametrize(("name", "options"), (ROUTED | INDEXED).items())
def test_without_replay_other_choices_are_wrong_or_raise(name, options) -> None:
    model = build(name, options)
    expected = gradients(model)
    enable(model)
    try:
        found = gradients(model)
    except CheckpointError:
        return  # the experts received other numbers of tokens
    assert not same(found, expected)


def test_verify_names_the_layers_whose_routers_drifted() -> None:
    model = build("Qwen3Moe", ROUTED["Qwen3Moe"])
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("routes", on_miss="raise")
    handle = replay_routers(model, channel)
    enable(model, compose(channel))
    with channel.verify(margin=score_margin) as report:
        gradients(model)
    assert report.checked == 2
    assert {drift.site for drift in report.drifts} == set(handle.sites)
    assert handle.sites == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    for drift in report.drifts:
        assert drift.total == IDS.numel() * 2
        assert drift.changed > IDS.numel()
        assert drift.input_drift == 0.0
        assert drift.margin is not None
        assert drift.margin > 0


def test_a_replayed_indexer_does_no_work_and_keeps_two_bytes_a_key() -> None:
    model = build("DeepseekV32", INDEXED["DeepseekV32"])
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay(
        "keys", codec=IdCodec(65536), on_miss="raise", preserve_random=False
    )
    runs = []
    for layer in model.model.layers:
        layer.self_attn.indexer.wk.register_forward_hook(lambda *_: runs.append(1))
    replay_indexers(model, channel)
    enable(model, compose(channel))
    model(IDS, labels=IDS).loss.backward()
    assert len(runs) == 2
    assert 0 < channel.usage().peak_bytes - 2 * (IDS.numel() * 8 * 2) < 2 * 200


def test_a_model_with_nothing_to_replay_is_refused() -> None:
    channel: RecomputeReplay[torch.Tensor] = RecomputeReplay("choices")
    for install in (replay_routers, replay_indexers):
        with pytest.raises(UnsupportedError, match="Linear has no"):
            install(torch.nn.Linear(2, 2), channel)


def test_removing_gives_the_forward_back() -> None:
    model = build("Mixtral", ROUTED["Mixtral"])
    gate = model.model.layers[0].mlp.gate
    own = gate.forward
    handle = replay_routers(model, RecomputeReplay("choices"))
    assert gate.forward != own
    handle.remove()
    assert gate.forward == own
