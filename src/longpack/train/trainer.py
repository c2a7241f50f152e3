"""The training loop."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longpack.blockdiag_cp import ShardedBatch, shard_batch, state
from longpack.errors import RunError, StepError
from longpack.train import checkpoint
from longpack.train.checkpoint import Progress
from longpack.train.config import RunConfig
from longpack.train.documents import Corpus, read_corpus
from longpack.train.gradients import clip_gradients, sum_gradients
from longpack.train.metrics import MetricsFile, StepMetrics, Traffic, read_metrics
from longpack.train.model import (
    attention_calls,
    build_model,
    kv_shape,
    longest_document,
    shard_parameters,
)
from longpack.train.probe import BoundaryProbe, probe_boundaries
from longpack.train.ranks import Ranks, agree, join_ranks
from longpack.train.rows import Cursor, Row, RowPacker
from longpack.train.tokenizer import Tokenizer, load_tokenizer

PROBE_SEARCH = 64  # rows looked at for one with two documents


@dataclass(frozen=True)
class RunSummary:
    """How a run ended; also in `summary.json` of its folder.

    Args:
        folder: of the run.
        steps: optimizer steps done.
        resumed_from: step of the checkpoint that this start went on from; 0 for a new run.
        first_loss, last_loss: of the run's first and last step.
        tokens_per_s: median over steps, all ranks.
        ranks: `cp`, `dp` and the device type.
        skipped: why each document was left out, by name.
        probe: the boundary probe, where asked for.
    """

    folder: str
    steps: int
    resumed_from: int
    first_loss: float
    last_loss: float
    tokens_per_s: float
    ranks: dict[str, Any]
    skipped: dict[str, str]
    probe: BoundaryProbe | None


def train(
    config: RunConfig,
    on_begin: Callable[[str, int], None] = lambda about, step: None,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
) -> RunSummary:
    """Train as a run file says, on all ranks that torchrun started; every rank calls it.

    Args:
        config: the run file, the same on every rank.
        on_begin: called once with a line about the run and the step it goes on from.
        on_step: called after every step.

    Returns:
        The summary, the same on every rank but for clocks.

    Raises:
        LongpackError: on every rank, before anything is written: a data file, tokenizer, model
            or folder that is not usable, or ranks that disagree.
    """
    with join_ranks(config.parallel) as ranks:
        run = agree(lambda: _Run.prepare(config, ranks), lambda run: run.identity_text)
        progress = run.begin()
        on_begin(run.about(), progress.step)
        for metrics in run.steps(progress):
            on_step(metrics)
        return run.finish(resumed_from=progress.step)


class _Run:
    """Everything of one run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        corpus: Corpus,
        tokenizer: Tokenizer,
        model: Any,
    ) -> None:
        data = config.data
        document_length = data.document_length or longest_document(model, data.row_length)
        self.config, self.ranks = config, ranks
        self.corpus, self.tokenizer, self.model = corpus, tokenizer, model
        self.packer = RowPacker(
            corpus, tokenizer, data.row_length, document_length, config.run.seed
        )
        self.identity = checkpoint.fingerprint(config, corpus.fingerprint, document_length)
        self.kv_shape, self.layers = kv_shape(model), attention_calls(model)
        self.folder = config.run.folder

    @classmethod
    def prepare(cls, config: RunConfig, ranks: Ranks) -> "_Run":
        """Read and build everything that can fail, without a collective or a written byte."""
        corpus = read_corpus(config.data)
        tokenizer = load_tokenizer(config.data.tokenizer)
        run = cls(config, ranks, corpus, tokenizer, build_model(config, tokenizer))
        checkpoint.check_folder(run.folder, run.identity, config.run.resume)
        return run

    @property
    def identity_text(self) -> str:
        """The fingerprint and the mesh in one line: what ranks must agree on."""
        return json.dumps([self.identity, self.config.parallel.model_dump()], sort_keys=True)

    def about(self) -> str:
        """Describe the run in one line."""
        p, size = self.config.parallel, sum(x.numel() for x in self.model.parameters())
        skipped = f" ({len(self.corpus.skipped)} skipped)" if self.corpus.skipped else ""
        return (
            f"{len(self.corpus)} documents{skipped}, {type(self.model).__name__} of "
            f"{size / 1e6:.1f} M parameters, cp {p.cp} x dp {p.dp} on {self.ranks.device.type}, "
            f"{p.layout}, {p.kv_exchange}, {p.attn_backend}{', FSDP2' if p.fsdp else ''}"
        )

    def begin(self) -> Progress:
        """Place the model, claim the folder and load the last checkpoint."""
        optimizer, parallel = self.config.optimizer, self.config.parallel
        self.model.to(self.ranks.device)
        if parallel.fsdp:
            shard_parameters(self.model, self.ranks.flat_mesh)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        loaded = checkpoint.load(self.folder, self.model, self.optimizer)
        self.progress = loaded or Progress(0, Cursor())
        self.metrics: MetricsFile | None = None
        if self.ranks.rank == 0:
            checkpoint.begin(self.folder, self.identity)
            self.metrics = MetricsFile(self.folder / "metrics.jsonl", self.progress.step)
        return self.progress

    def steps(self, progress: Progress) -> Iterator[StepMetrics]:
        """Run the steps that are left, saving as the run file says."""
        settings = self.config.run
        for step in range(progress.step + 1, settings.steps + 1):
            rows, after = self.packer.rows(self.progress.cursor, self.config.rows_per_step)
            metrics = self._step(step, rows)
            self.progress = Progress(step, after)
            if self.metrics is not None:
                self.metrics.write(metrics)
            every = settings.save_every
            if every and (step % every == 0 or step == settings.steps):
                checkpoint.save(self.folder, self.progress, self.model, self.optimizer)
            yield metrics

    def finish(self, resumed_from: int) -> RunSummary:
        """Probe where asked, and write the summary."""
        probe = self._probe() if self.config.run.boundary_probe else None
        if self.metrics is not None:
            self.metrics.close()
        dist.barrier()  # rank 0 has written the last line
        records = read_metrics(self.folder / "metrics.jsonl")
        parallel = self.config.parallel
        summary = RunSummary(
            folder=str(self.folder),
            steps=self.progress.step,
            resumed_from=resumed_from,
            first_loss=records[0]["loss"],
            last_loss=records[-1]["loss"],
            tokens_per_s=statistics.median(r["tokens_per_s"] for r in records),
            ranks={"cp": parallel.cp, "dp": parallel.dp, "device": self.ranks.device.type},
            skipped=self.corpus.skipped,
            probe=probe,
        )
        if self.ranks.rank == 0:
            text = json.dumps(asdict(summary), indent=2)
            (self.folder / "summary.json").write_text(text + "\n")
        return summary

    def _step(self, step: int, rows: list[Row]) -> StepMetrics:
        """Make one optimizer step of all rows, this replica running its own."""
        began = time.perf_counter()
        settings, parallel = self.config.optimizer, self.config.parallel
        _seed(self.config.run.seed, step, self.ranks.rank)
        num_targets = max(sum(row.num_targets for row in rows), 1)
        mine = rows[self.ranks.replica :: parallel.dp]
        parts = [self._forward_backward(row, num_targets) for row in mine]
        if not parallel.fsdp:
            sum_gradients(self.parameters)
        grad_norm = clip_gradients(self.parameters, settings.grad_clip)
        lr = settings.lr * min(1.0, step / max(settings.warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.stack(parts).sum()
        dist.all_reduce(loss)
        _check_finite(step, loss.item(), grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(row.tokens) for row in rows)
        dtype = getattr(torch, self.config.model.dtype)
        return StepMetrics(
            step=step,
            loss=loss.item(),
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            documents=sum(len(row.documents) for row in rows),
            tokens_per_s=tokens / (time.perf_counter() - began),
            attention_calls=self.layers * len(mine),
            epoch=self.progress.cursor.epoch,
            traffic=Traffic.of_step(rows, parallel, self.kv_shape, dtype.itemsize, self.layers),
        )

    def _forward_backward(self, row: Row, num_targets: int) -> torch.Tensor:
        """Run one row and return this rank's part of the loss: local sum / `num_targets`."""
        sharded = self._shard(row)
        # The step's targets, not only this row's: every rank knows all rows, so none need ask.
        inputs = {**sharded.inputs, "num_items_in_batch": num_targets}
        state.reset_cp_attn_fire_count()
        loss = self.model(**inputs).loss
        fired = state.cp_attn_fire_count()
        if fired != self.layers:
            raise StepError(
                f"the forward made {fired} attention calls through longpack but the model has "
                f"{self.layers} layers: some layer attends by itself, so its documents leak"
            )
        loss.backward()
        return loss.detach()

    def _shard(self, row: Row) -> ShardedBatch:
        parallel, device = self.config.parallel, self.ranks.device
        tokens = torch.from_numpy(row.tokens)[None].to(device)
        batch = {
            "input_ids": tokens,
            "labels": tokens,
            "doc_ids": torch.from_numpy(row.documents.doc_ids())[None],
        }
        return shard_batch(
            batch,
            self.ranks.cp_mesh,
            layout=parallel.layout,
            padding_token_id=self.tokenizer.eos_id,
            kv_exchange=parallel.kv_exchange,
            attn_backend=parallel.attn_backend,
        )

    def _probe(self) -> BoundaryProbe:
        """Probe the next row that holds two documents or more."""
        cursor = self.progress.cursor
        for _ in range(PROBE_SEARCH):
            row, cursor = self.packer.row(cursor)
            if len(row.documents) > 1:
                return probe_boundaries(self.model, row, self._shard, self.tokenizer.vocab_size)
        raise RunError(
            f"run.boundary_probe needs a row with two documents, and the next {PROBE_SEARCH} hold "
            "one each: raise data.row_length or lower data.document_length"
        )


def _seed(seed: int, step: int, rank: int) -> None:
    """Make a step's random numbers a function of seed, step and rank, so no state is saved."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)


def _check_finite(step: int, loss: float, grad_norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise RunError(
            f"step {step} has loss {loss} and gradient norm {grad_norm}: lower optimizer.lr, "
            "raise optimizer.warmup or set optimizer.grad_clip; the last checkpoint is kept"
        )


def load_summary(folder: Path) -> RunSummary:
    """Read the summary that a run left in its folder."""
    content = json.loads((folder / "summary.json").read_text())
    probe = content.pop("probe")
    return RunSummary(**content, probe=None if probe is None else BoundaryProbe(**probe))
