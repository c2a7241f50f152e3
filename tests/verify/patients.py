"""A small model that is right, and what can be broken in it."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn

from longpack import RecomputeReplay, cp_blockdiag_sdpa
from longpack.loss import cross_entropy
from longpack.recompute_replay import compose, is_recomputing
from longpack.testing.recompute import flip_ties

HIDDEN, HEADS, VOCAB = 32, 2, 64


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def attend(self, query, key, value, step):
        return cp_blockdiag_sdpa(query, key, value, step=step)

    def forward(self, x, step):
        heads = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        return self.out(self.attend(*heads.chunk(3, 1), step).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU())

    def forward(self, x, step=None):
        x = x + self.attention(self.norm(x), step)
        return x + self.mlp(x)


class Patient(torch.nn.Module):
    """A language model that is right: called as model(**inputs), step as an argument."""

    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(3)
        self.tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.positions = torch.nn.Embedding(256, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def embed(self, input_ids, position_ids):
        return self.tokens(input_ids) + self.positions(position_ids)

    def run_blocks(self, x, step):
        for block in self.blocks:
            x = block(x, step)
        return x

    def loss(self, logits, shift_labels, num_items_in_batch, labels):
        return cross_entropy(logits, shift_labels, num_items_in_batch)

    def forward(
        self,
        input_ids,
        position_ids,
        cp_step=None,
        shift_labels=None,
        num_items_in_batch=1,
        labels=None,
    ):
        logits = self.head(self.run_blocks(self.embed(input_ids, position_ids), cp_step))
        return {
            "logits": logits,
            "loss": self.loss(logits, shift_labels, num_items_in_batch, labels),
        }


class TakesNoStep(Patient):
    """The step comes from the `with` block that call_model opens around the forward."""

    def forward(self, input_ids, position_ids, shift_labels, num_items_in_batch):
        logits = self.head(self.run_blocks(self.embed(input_ids, position_ids), None))
        return logits, cross_entropy(logits, shift_labels, num_items_in_batch)


class StockAttention(Attention):
    def attend(self, query, key, value, step):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class SoftmaxAttention(Attention):
    def attend(self, query, key, value, step):
        scores = query @ key.mT
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~causal, float("-inf")).softmax(-1) @ value


class LosesStep(Attention):
    def attend(self, query, key, value, step):
        return cp_blockdiag_sdpa(query, key, value, is_causal=True)


class KeepsCache(Attention):
    """Attends to the keys of earlier calls too, through their sum."""

    seen = 0.0

    def attend(self, query, key, value, step):
        value = value + self.seen
        self.seen = value.detach().mean()
        return super().attend(query, key, value, step)


class Scaled(Attention):
    """Wrong where rows are split: scales by how many ranks there are."""

    off = 0.5

    def attend(self, query, key, value, step):
        scale = (1 + self.off * (step.world_size - 1)) * query.shape[3] ** -0.5
        return cp_blockdiag_sdpa(query, key, value, step=step, scale=scale)


class Convolves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.along = torch.nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2)

    def forward(self, x):
        return x + self.along(x.mT)[..., : x.shape[1]].mT


class Counts(torch.nn.Module):
    """Computes something else in the recompute."""

    def forward(self, x):
        y = x * 2 if is_recomputing() else x
        return y * y


class Routed(Patient):
    """Chooses one of two experts by scores that tie, and tips over in the recompute."""

    def __init__(self, replayed):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.routes = RecomputeReplay("routes")
        self.context_fn = compose(self.routes) if replayed else noop_context_fn
        self.replayed = replayed

    def expert(self, x):
        def choose():
            return flip_ties(torch.zeros(*x.shape[:2], 2, dtype=x.dtype)).argmax(-1)

        route = self.routes.decide(choose) if self.replayed else choose()
        first, second = (e(x).tanh() for e in self.experts)
        return x + torch.where(route[..., None] == 0, first, second).square()

    def run_blocks(self, x, step):
        x = super().run_blocks(x, step)
        return checkpoint(self.expert, x, use_reentrant=False, context_fn=self.context_fn)


class SkipsOnPadding(Block):
    def forward(self, x, step=None):
        return x if step.plan.tokens[step.rank] == 0 else super().forward(x, step)


class Raises(Block):
    def forward(self, x, step=None):
        if step.rank == 1:
            raise ZeroDivisionError("boom on one rank")
        return super().forward(x, step)
