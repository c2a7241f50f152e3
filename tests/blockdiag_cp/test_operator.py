"""The operator: whole graphs through torch.compile, and what a checkpoint keeps of it."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longpack import CpStep, PackedRow, cp_blockdiag_sdpa, plan_step
from longpack.blockdiag_cp import keep_in_recompute, operator, state
from longpack.collectives import Delayed, Loopback, as_transport
from longpack.errors import StepError
from longpack.recompute_replay import compose


def alone(lengths):
    return CpStep.make(plan_step(PackedRow.from_lengths(lengths), 1), as_transport(None))


def block(q, k, v, step):
    return cp_blockdiag_sdpa(q * 2, k.sin(), v * v, enable_gqa=True, step=step).cos()


def tensors(rows, kv_heads=2, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(1, 4, rows, 8), (1, kv_heads, rows, 8), (1, kv_heads, rows, 6)]
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def results(run, leaves, step):
    out = run(*leaves, step)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_compiles_whole_and_once_for_all_steps():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    state.reset_cp_attn_fire_count()
    for lengths in ([5, 11], [8, 8], [3, 4, 9], [20], [7, 18]):
        step, leaves = alone(lengths), tensors(sum(lengths))
        ours, eager = (results(run, leaves, step) for run in (compiled, block))
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 2  # one for the first shape, one for all others
    assert state.cp_attn_fire_count() == 10


def test_the_operator_keeps_its_promises():
    """torch's own checks: schema, fake shapes, autograd registration."""
    row = PackedRow.from_lengths([4, 20])
    plan = plan_step(row, 2, kv_exchange="a2a")

    class Alone:
        """A transport whose peer sends zeros: the checks run on one rank."""

        rank, world_size, group = 1, 2, None

        def enter(self, place):
            self.place = place

        def start_all_to_all(self, x, send_counts, receive_counts, out=None, direct=False):
            arrived = x.new_zeros((sum(receive_counts), *x.shape[1:]))
            rows = arrived if out is None else out.copy_(arrived)
            return type("Now", (), {"wait": lambda self: rows})()

    step = CpStep.make(plan, Alone(), number=3)
    rows = [x.detach().squeeze(0).transpose(0, 1) for x in tensors(12)]
    for x in rows:
        x.requires_grad_()
    torch.library.opcheck(
        operator.attend, (*rows, step.token, "flash_cpu", 0.3, 7), rtol=1e-9, atol=1e-9
    )
    assert step.transport.place == f"layer 7 of batch 3 (plan {plan.digest[:8]}), backward"


def test_what_holds_the_token_holds_the_step():
    step = alone([8])
    token, staged = step.token, weakref.ref(step.staged)
    leaves = tensors(8)
    out = block(*leaves, step)
    del step
    gc.collect()
    assert staged() is not None
    torch.autograd.grad(out.sum(), leaves)
    del token, out
    gc.collect()
    assert staged() is None


class Counting(Delayed):
    """Counts exchanges that start."""

    def __init__(self, transport):
        super().__init__(transport, 0.0)
        self.started = 0

    def _late(self, pending):
        self.started += 1
        return super()._late(pending)


@pytest.mark.parametrize(
    ("what", "attended", "exchanged"), [("nothing", 4, 4), ("kv", 4, 2), ("attention", 2, 2)]
)
def test_a_recompute_repeats_what_was_not_kept(what, attended, exchanged):
    """Two attention calls a block; exact gradients, and calls and exchanges counted."""
    plan = plan_step(PackedRow.from_lengths([5, 13, 6]), 2, "zigzag", "a2a")

    def two(q, k, v, step):
        out = block(q, k, v, step)
        return block(torch.nn.functional.pad(out, (0, 2)), k, v, step)

    def body(t):
        link = Counting(t)
        step = CpStep.make(plan, link)
        leaves = tensors(plan.local_length)
        plain = results(two, leaves, step)
        link.started = 0

        def checkpointed(*args):
            context_fn = compose(keep_in_recompute(what))
            return checkpoint(two, *args, use_reentrant=False, context_fn=context_fn)

        kept = results(checkpointed, leaves, step)
        assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
        return link.started - 2  # gradients of two calls went home

    state.reset_cp_attn_fire_count()
    assert Loopback(2).run(body) == [exchanged] * 2
    assert state.cp_attn_fire_count() == 2 * (2 + attended)


def test_kept_kv_serve_several_backwards_and_go_with_the_block():
    step, leaves = alone([8]), tensors(8)
    out = checkpoint(block, *leaves, step, use_reentrant=False, context_fn=keep_in_recompute("kv"))
    first, again = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_kv_of_another_call_are_refused():
    steps = [alone([8]), alone([3, 5])]
    leaves = tensors(8)
    calls = iter(steps)
    out = checkpoint(
        lambda *args: block(*args, next(calls)),
        *leaves,
        use_reentrant=False,
        context_fn=keep_in_recompute("kv"),
    )
    with pytest.raises(StepError, match="call 1 of a checkpoint recompute is not the one"):
        out.sum().backward()


def test_only_known_parts_are_kept():
    with pytest.raises(ValueError, match="what='all' cannot be kept; it is one of nothing"):
        keep_in_recompute("all")


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable")
@pytest.mark.parametrize("what", ["kv", "attention"])
def test_hugging_face_checkpointing_takes_it(what):
    transformers = pytest.importorskip("transformers")

    import longpack
    import longpack.integrations.huggingface

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().train()
    model.set_attn_implementation("longpack")
    ids = torch.arange(24)[None] % 64
    batch = {"input_ids": ids, "labels": ids, "doc_ids": torch.tensor([[1] * 10 + [2] * 14])}

    def gradients():
        model.zero_grad()
        state.reset_cp_attn_fire_count()
        model(**longpack.shard_batch(batch).inputs).loss.backward()
        return [p.grad.clone() for p in model.parameters()], state.cp_attn_fire_count()

    plain, _ = gradients()
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": keep_in_recompute(what)}
    )
    kept, count = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert count == (4 if what == "kv" else 2)
