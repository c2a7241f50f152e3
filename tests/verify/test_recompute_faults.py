"""What goes wrong in a recompute: state, decisions, counters, records, and the order of ranks."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.verify.patients import Block, Patient, Routed, TakesNoStep
from tests.verify.test_document_faults import lengths_batch
from tests.verify.test_faults import found, patient
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longpack.recompute_replay import is_recomputing
from longpack.verify import verify_model

BATCH = lengths_batch(5, 3, 9)


class RemembersStep(Patient):
    """Blocks read the step from the model, where the next microbatch has put its own."""

    def run_blocks(self, x, step):
        self.step = step
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y, self.step), x, use_reentrant=False)
        return x


def test_a_step_that_the_next_microbatch_replaces():
    report = verify_model(RemembersStep(), BATCH, checkpointing="as_is")
    assert found(report, "recompute", "rank", "Recomputed values.*different") == ["recompute"]
    same_shapes = verify_model(RemembersStep(), lengths_batch(8, 4, 4), checkpointing="as_is")
    assert found(same_shapes, "recompute", "^blocks", "microbatch A") == ["recompute"]


class OnWorker(torch.autograd.Function):
    """A checkpoint by hand that recomputes on another thread, as an accelerator's engine does."""

    @staticmethod
    def forward(ctx, block, x, weight):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x, None)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        again, failed = x.detach().requires_grad_(), []

        def work():
            try:
                with torch.enable_grad():
                    torch.autograd.backward(ctx.block(again, None), grad)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return None, again.grad, None


class Worker(TakesNoStep):
    def run_blocks(self, x, step):
        for block in self.blocks:
            x = OnWorker.apply(block, x, block.norm.weight)
        return x


def test_a_recompute_on_another_thread_that_has_no_step():
    def forward(model, share):
        share.step.__enter__()  # open for this thread, through backward
        inputs = {k: v for k, v in share.inputs.items() if k not in ("cp_step", "use_cache")}
        return model(**{k: v for k, v in inputs.items() if k not in ("labels", "doc_ids")})

    report = verify_model(Worker(), BATCH, forward=forward, checkpointing="as_is")
    assert found(report, "parity", r"^blocks\.1\.") == ["parity"]


class Reorders(Routed):
    """Goes through its experts in the order of a list that comes out reversed in the recompute."""

    def expert(self, x):
        def order():
            return [1, 0] if is_recomputing() else [0, 1]

        chosen = self.routes.decide(order) if self.replayed else order()
        first, second = (self.experts[i](x).tanh() for i in chosen)
        return x + first.square() * second


class Nested(Routed):
    """A checkpoint in a checkpoint: one decision, three uses."""

    def expert(self, x):
        inner = super().expert
        return checkpoint(inner, x.square(), use_reentrant=False, context_fn=self.context_fn)


@pytest.mark.parametrize("model", [Reorders, Nested])
def test_a_decision_that_comes_out_differently(model):
    report = verify_model(model(replayed=False), BATCH, checkpointing="as_is")
    assert found(report, "recompute", r"^experts\.[01]$") == ["recompute"]
    report = verify_model(model(replayed=True), BATCH, checkpointing="as_is")
    assert report.good, [str(finding) for finding in report.findings]


class Mutates(Routed):
    """Changes a decision in place after it was recorded."""

    def expert(self, x):
        route = self.routes.decide(lambda: torch.ones(x.shape[:2], dtype=torch.long))
        first, second = (e(x).tanh() for e in self.experts)
        out = x + torch.where(route[..., None] == 0, first, second).square()
        route.zero_()
        return out


def test_a_record_that_is_changed_in_place():
    report = verify_model(Mutates(replayed=True), BATCH, checkpointing="as_is")
    found(report, "recompute", text="in place")


class BuildsOnce(Block):
    """Builds a table in the first forward, inside a checkpoint that saves products."""

    table = None

    def inner(self, x, step):
        if self.table is None:
            self.table = (self.mlp[0].weight @ self.mlp[0].weight).detach()
        return super().forward(x @ self.table.softmax(0), step)

    def forward(self, x, step=None):
        contexts = partial(create_selective_checkpoint_contexts, _save_products)
        return checkpoint(self.inner, x, step, use_reentrant=False, context_fn=contexts)


def _save_products(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class BuildsOnceInPlain(BuildsOnce):
    forward = BuildsOnce.inner


@pytest.mark.parametrize(
    ("block", "mode", "said"),
    [
        (BuildsOnce, "as_is", "RuntimeError: shape .* is invalid"),
        (BuildsOnceInPlain, "full", "A different number of tensors was saved"),
    ],
    ids=["selective", "plain"],
)
def test_state_that_is_built_in_the_first_forward_alone(block, mode, said):
    model = Patient()
    model.blocks[1] = block()
    report = verify_model(model, BATCH, checkpointing=mode)
    assert found(report, "recompute", text=f"(?s){said}.*build state before") == ["recompute"]


class OwnStream(torch.nn.Module):
    """Draws a dropout mask from a stream of its own, which checkpointing does not rewind."""

    def forward(self, x):
        if not is_recomputing():
            self.stream = torch.Generator().manual_seed(0)
        mask = torch.rand(x.shape, generator=self.stream, dtype=x.dtype) > 0.1
        return x.square() * mask


def test_a_dropout_mask_that_shifts():
    report = verify_model(patient(mlp=OwnStream()), BATCH)
    assert found(report, "recompute", text="microbatch A") == ["recompute"]


class DrawsDecision(torch.nn.Module):
    """Draws a decision, and drops out after it."""

    def forward(self, x):
        return F.dropout(x, 0.1) if torch.rand(()) < 2 else x


def test_numbers_that_are_drawn_from_torch_are_named_before_any_recompute():
    found(verify_model(patient(mlp=DrawsDecision()), BATCH), "repeat", r"^blocks\.1\.mlp$", "drawn")


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("rows", torch.zeros(()))

    def count(self):
        return True

    def forward(self, x):
        if self.count():
            self.calls += 1
            self.rows += x.shape[1]
        return x.square()


class CountsOnce(Counter):
    def count(self):
        return not is_recomputing()


def test_a_metric_that_is_counted_twice():
    report = verify_model(patient(mlp=Counter()), BATCH)
    said = r"blocks\.1\.mlp\.rows is 36 with checkpointing and 18 without"
    assert found(report, "recompute", r"^blocks\.1\.mlp\.rows, .*calls$", said) == ["recompute"]
    assert verify_model(patient(mlp=CountsOnce()), BATCH).good


class Keeps(torch.nn.Module):
    """Records a score of a branch that no loss needs."""

    detached = False

    def forward(self, x):
        score = x.square().sum(-1).sqrt()
        self.record = [score.detach() if self.detached else score]
        return x.square()


class KeepsDetached(Keeps):
    detached = True


def test_a_record_that_keeps_the_graph_alive():
    report = verify_model(patient(mlp=Keeps()), BATCH)
    assert found(report, "kept", r"^blocks\.1\.mlp\.record$", "activations") == ["kept"]
    assert verify_model(patient(mlp=KeepsDetached()), BATCH).good


class GroupsByRank(Patient):
    """Rank 0 checkpoints each block, rank 1 both as one: they recompute in different orders."""

    def run_blocks(self, x, step):
        if step.rank == 0:
            for block in self.blocks:
                x = checkpoint(block, x, step, use_reentrant=False)
            return x
        return checkpoint(super().run_blocks, x, step, use_reentrant=False)


def test_ranks_that_recompute_in_different_orders():
    report = verify_model(GroupsByRank(), BATCH, checkpointing="as_is", timeout_s=2.0)
    said = "ranks met in different operations: rank 0 all_to_all, rank 1 all_gather"
    assert found(report, "hang", "rank", said) == ["hang"]
