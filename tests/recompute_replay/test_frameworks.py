"""The same channel under Hugging Face gradient checkpointing and under FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from longpack.recompute_replay import RecomputeReplay, compose, replay_labels


class Permute(torch.nn.Module):
    """Multiplies by the weights in an order that is another one at every run."""

    def __init__(self, channel: RecomputeReplay[list[int]] | None, inner: torch.nn.Module) -> None:
        super().__init__()
        self.channel, self.inner, self.runs = channel, inner, 0

    def draw(self) -> list[int]:
        self.runs += 1
        return [(at + self.runs) % 2 for at in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.draw() if self.channel is None else self.channel.decide(self.draw, site="mlp")
        scale = torch.tensor([0.5, 2.0])[order].to(x)
        return self.inner(x) * scale.repeat(x.shape[-1] // 2)


def tiny_llama(channel: RecomputeReplay[list[int]] | None):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.mlp = Permute(channel, layer.mlp)
    return model


def test_hugging_face_gradient_checkpointing_with_two_microbatches_outstanding() -> None:
    ids = [torch.arange(16)[None] % 64, torch.arange(16, 32)[None] % 64]
    plain = tiny_llama(None)
    for microbatch in ids:
        plain(microbatch, labels=microbatch).loss.backward()

    channel: RecomputeReplay[list[int]] = RecomputeReplay("order", on_miss="raise")
    model = tiny_llama(channel)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": compose(channel)})
    losses = []
    for at, microbatch in enumerate(ids):
        with replay_labels(microbatch=at):
            losses.append(model(microbatch, labels=microbatch).loss)
    for loss in losses:
        loss.backward()

    assert [layer.mlp.runs for layer in model.model.layers] == [2, 2, 2]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert channel.usage().live_bytes == 0


@pytest.fixture
def one_rank(tmp_path):
    if dist.is_initialized():
        pytest.skip("this process has a process group already")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_with_checkpointing() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(channel: RecomputeReplay[list[int]] | None) -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList([Permute(channel, torch.nn.Linear(8, 8)) for _ in range(2)])

    x = torch.linspace(-1, 1, 32).view(4, 8)
    plain = build(None)
    out = x
    for block in plain:
        out = block(out).sin()
    out.sum().backward()

    channel: RecomputeReplay[list[int]] = RecomputeReplay("order", on_miss="raise")
    blocks = build(channel)
    mesh = init_device_mesh("cpu", (1,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    out = x
    for block in blocks:
        out = checkpoint(block, out, use_reentrant=False, context_fn=compose(channel)).sin()
    out.sum().backward()
    assert [block.runs for block in blocks] == [1, 1]
    for a, b in zip(blocks.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad)
