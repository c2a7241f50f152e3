"""The training loop."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longpack.blockdiag_cp import ShardedBatch, shard_batch, state
from longpack.errors import CollectiveError, RunError, StepError
from longpack.plan import Plan
from longpack.train import checkpoint
from longpack.train.checkpoint import Progress
from longpack.train.config import RunConfig
from longpack.train.durable import read_json, write_json
from longpack.train.fires import AttentionCalls, expected_calls, misfires
from longpack.train.gradients import clip_gradients, sum_gradients
from longpack.train.metrics import (
    LOADS,
    MetricsFile,
    StepMetrics,
    Traffic,
    loads_of,
    read_metrics,
)
from longpack.train.model import layer_shape, shard_parameters
from longpack.train.nonfinite import trace_nonfinite
from longpack.train.prepare import Prepared, prepare
from longpack.train.probe import BoundaryProbe, probe_boundaries
from longpack.train.ranks import Ranks, agree, gather, join_ranks
from longpack.train.rows import Cursor, Row
from longpack.train.waste import WasteWatch

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
        RunError: on every rank: before anything is written, a data file, tokenizer, model or
            folder that is not usable; later, a loss or gradient that is not finite, or a checkpoint
            that cannot be written. On rank 0 alone, `metrics.jsonl` cannot be written.
        StepError: on every rank: attention ran more or less often than the model has layers.
        AgreementError: on every rank: ranks hold different batches.
        CollectiveError: on every rank that waited for one which died, stalled or raised.
    """
    with join_ranks(config.parallel) as ranks:
        prepared = agree(lambda: prepare(config), lambda prepared: prepared.agreement)
        trainer = Trainer(prepared, ranks)
        on_begin(prepared.about(), trainer.resumed_from)
        for metrics in trainer.steps():
            on_step(metrics)
        return trainer.finish()


@dataclass(frozen=True)
class RowRun:
    """What a row's forward and backward left on this rank.

    Args:
        loss: this rank's part, local sum / targets of the step.
        plan: of the row.
        calls: of attention.
    """

    loss: torch.Tensor
    plan: Plan
    calls: AttentionCalls


class Trainer:
    """A run on one rank, from its last checkpoint on.

    Args:
        prepared: the run; its model is placed, sharded and trained.
        ranks: the mesh.
    """

    def __init__(self, prepared: Prepared, ranks: Ranks) -> None:
        config, model = prepared.config, prepared.model
        self.prepared, self.ranks, self.config, self.model = prepared, ranks, config, model
        self.shape = layer_shape(model, config.model.gradient_checkpointing)
        self.calls = expected_calls(model, config.model.gradient_checkpointing)
        self.packer, self.folder, self.world = prepared.packer(), config.run.folder, ranks.world
        model.to(ranks.device)
        if config.parallel.fsdp:
            shard_parameters(model, ranks.flat_mesh)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
        )
        loaded = checkpoint.load(self.folder, model, self.optimizer)
        self.progress = loaded or Progress(0, Cursor())
        self.resumed_from = self.progress.step
        self.metrics: MetricsFile | None = None
        self.waste = WasteWatch(config.parallel, self.shape)
        gather(self._claim_folder, "begin")

    def steps(self) -> Iterator[StepMetrics]:
        """Run the steps that are left, saving as the run file says."""
        last, every = self.config.run.steps, self.config.run.save_every
        for step in range(self.resumed_from + 1, last + 1):
            rows, after = self.packer.rows(self.progress.cursor, self.config.rows_per_step)
            with _located(step):
                metrics = self._step(step, rows)
                self.progress = Progress(step, after)
                self._write(metrics)
                if every and (step % every == 0 or step == last):
                    self._save()
            yield metrics

    def _save(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()
        checkpoint.save(self.folder, self.progress, self.model, self.optimizer)

    def _claim_folder(self) -> None:
        if self.ranks.rank == 0:
            checkpoint.begin(self.folder, self.prepared.fingerprint)
            self.metrics = MetricsFile(self.folder / "metrics.jsonl", self.resumed_from)

    def finish(self) -> RunSummary:
        """Probe where asked, and write the summary."""
        probe = self._probe() if self.config.run.boundary_probe else None
        if self.metrics is not None:
            self.metrics.close()
        gather(lambda: None, "end")  # rank 0 has written the last line
        records = read_metrics(self.folder / "metrics.jsonl")
        parallel = self.config.parallel
        summary = RunSummary(
            folder=str(self.folder),
            steps=self.progress.step,
            resumed_from=self.resumed_from,
            first_loss=records[0]["loss"],
            last_loss=records[-1]["loss"],
            tokens_per_s=statistics.median(r["tokens_per_s"] for r in records),
            ranks={"cp": parallel.cp, "dp": parallel.dp, "device": self.ranks.device.type},
            skipped=self.prepared.corpus.skipped,
            probe=probe,
        )
        if self.ranks.rank == 0:
            write_json(self.folder / "summary.json", asdict(summary))
        return summary

    def _step(self, step: int, rows: list[Row]) -> StepMetrics:
        """Make one optimizer step of all rows, this replica running its own."""
        began = time.perf_counter()
        _seed(self.config.run.seed, step, self.ranks.rank)
        num_targets = max(sum(row.num_targets for row in rows), 1)
        ran = [self._forward_backward(rows[n], num_targets) for n in self._mine()]
        sums = self._sum_ranks(ran)
        self._sum_gradients()
        grad_norm = self._clip_gradients()
        loss, misfired, *loads = sums.tolist()
        if misfired:
            raise self._misfired(step, ran)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._not_finite(step, loss, grad_norm, rows, num_targets)
        lr = self._optimize(step)
        tokens = sum(len(row.tokens) for row in rows)
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            documents=sum(len(row.documents) for row in rows),
            tokens_per_s=tokens / (time.perf_counter() - began),
            attention_calls=sum(row.calls.total for row in ran),
            epoch=self.progress.cursor.epoch,
            traffic=self._traffic(loads, rows),
        )

    def _write(self, metrics: StepMetrics) -> None:
        if self.metrics is not None:
            self.metrics.write(metrics)

    def _mine(self) -> range:
        """Return the numbers, in the step, of this replica's rows."""
        return range(self.ranks.replica, self.config.rows_per_step, self.config.parallel.dp)

    def _sum_ranks(self, ran: list[RowRun]) -> torch.Tensor:
        """Return the step's loss and `_counts`, summed over all ranks in one collective."""
        loss = torch.stack([row.loss for row in ran]).double().sum()
        sums = torch.cat([loss[None], self._counts(ran).to(loss.device)])
        self.world.enter("sums of the step")
        return self.world.all_reduce(sums)

    def _counts(self, ran: list[RowRun]) -> torch.Tensor:
        """Return how many rows misfired here, then the loads `[LOADS, ranks]`, others' zero.

        Every rank adds its own column, of the plans that its rows ran with: none is planned
        again, and no rank plans the rows of another replica.
        """
        loads = np.zeros((LOADS, self.world.world_size))
        cp_rank = self.ranks.mesh.get_local_rank("cp")
        loads[:, self.ranks.rank] = loads_of([row.plan for row in ran])[:, cp_rank]
        misfired = sum(row.calls != self.calls for row in ran)
        return torch.from_numpy(np.append(misfired, loads))

    def _traffic(self, loads: list[float], rows: list[Row]) -> Traffic:
        """Return the step's traffic, having warned where it is time."""
        traffic = Traffic.of_loads(np.array(loads).reshape(LOADS, -1), self.shape)
        if self.ranks.rank == 0:
            self.waste.see(traffic.step_waste, rows)
        return traffic

    def _sum_gradients(self) -> None:
        if not self.config.parallel.fsdp:  # FSDP has summed them in backward
            self.world.enter("gradients")
            sum_gradients(self.parameters, self.world)

    def _clip_gradients(self) -> float:
        """Clip the gradients where asked; return their norm before that."""
        return clip_gradients(self.parameters, self.config.optimizer.grad_clip)

    def _optimize(self, step: int) -> float:
        """Step the optimizer; return the learning rate."""
        settings = self.config.optimizer
        lr = settings.lr * min(1.0, step / max(settings.warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _misfired(self, step: int, ran: list[RowRun]) -> StepError:
        """Return the error that names the rows, ranks and passes that attended otherwise."""
        calls = zip(self._mine(), (row.calls for row in ran), strict=True)
        found = misfires(calls, self.calls, self.ranks.rank)
        return StepError(
            f"step {step} did not attend through longpack once a layer: {self._named(found)}. In "
            "forward that is a layer that attends by itself, so its documents leak, or twice; in "
            "backward a recompute that skips or repeats attention, or that "
            f"model.gradient_checkpointing = {self.config.model.gradient_checkpointing} forbids"
        )

    def _not_finite(
        self, step: int, loss: float, grad_norm: float, rows: list[Row], num_targets: int
    ) -> RunError:
        """Return the error that names the documents and ranks that broke a step."""
        _seed(self.config.run.seed, step, self.ranks.rank)
        sharded = ((number, self._shard(rows[number])) for number in self._mine())
        found = trace_nonfinite(self.model, sharded, num_targets, self.ranks.rank)
        where = self._named(found) or "no document alone"
        return RunError(
            f"step {step} has loss {loss} and gradient norm {grad_norm}, not finite in {where}. "
            "If that is nearly every document, lower optimizer.lr, raise optimizer.warmup or set "
            "optimizer.grad_clip; if it is one or two, look at their text. The last checkpoint "
            "is kept"
        )

    def _named(self, found: list[str]) -> str:
        """Return what all ranks found, cut short; every rank calls it."""
        named = [name for names in gather(lambda: found, "trace") for name in names]
        return f"{', '.join(named[:8])}{', ...' if len(named) > 8 else ''}"

    def _forward_backward(self, row: Row, num_targets: int) -> RowRun:
        """Run one row, its gradients added to those of the step."""
        sharded = self._shard(row)
        # The step's targets, not only this row's: every rank knows all rows, so none need ask.
        inputs = {**sharded.inputs, "num_items_in_batch": num_targets}
        state.reset_cp_attn_fire_count()
        loss = self.model(**inputs).loss
        forward = state.cp_attn_fire_count()
        loss.backward()
        backward = state.cp_attn_fire_count() - forward
        return RowRun(loss.detach(), sharded.plan, AttentionCalls(forward, backward))

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
            padding_token_id=self.prepared.tokenizer.eos_id,
            kv_exchange=parallel.kv_exchange,
            attn_backend=parallel.attn_backend,
        )

    def _probe(self) -> BoundaryProbe:
        """Probe the next row that holds two documents or more."""
        cursor = self.progress.cursor
        for _ in range(PROBE_SEARCH):
            row, cursor = self.packer.row(cursor)
            if len(row.documents) > 1:
                return probe_boundaries(
                    self.model, row, self._shard, self.prepared.tokenizer.vocab_size
                )
        raise RunError(
            f"run.boundary_probe needs a row with two documents, and the next {PROBE_SEARCH} hold "
            "one each: raise data.row_length or lower data.document_length"
        )


@contextmanager
def _located(step: int) -> Iterator[None]:
    """Say in which step ranks lost each other."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(
            f"{error}\nThat was in step {step}. The same command goes on from the last checkpoint"
        ) from error


def _seed(seed: int, step: int, rank: int) -> None:
    """Make a step's random numbers a function of seed, step and rank, so no state is saved."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)


def load_summary(folder: Path) -> RunSummary:
    """Read the summary that a run left in its folder.

    Raises:
        RunError: it is missing or damaged.
    """
    path, remedy = folder / "summary.json", "Run the same command again to write it anew"
    content = read_json(path, remedy)
    try:
        probe = content.pop("probe")
        return RunSummary(**content, probe=None if probe is None else BoundaryProbe(**probe))
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged, its fields are others: {error}. {remedy}") from None
