"""The subject: a model, a batch and settings, and copies of the model to run."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import torch

from longpack.blockdiag_cp import ShardedBatch, shard_batch
from longpack.collectives import Transport
from longpack.errors import PackingError
from longpack.packing import PackedRow, batch_shape, read_documents
from longpack.plan import Plan, plan_step
from longpack.verify.batches import Batch, document_batch, whole_targets

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks at once: a `Loopback`, or this process as one of them (`JoinedRanks`)."""

    world_size: int

    def run(self, body: Callable[[Transport], T]) -> list[T]:
        """Call `body` on every rank and return the values in rank order."""
        ...


@dataclass(frozen=True)
class Settings:
    """How the model is meant to train.

    Args:
        world_size: ranks of the cp axis.
        layout, kv_exchange, attn_backend: as for `longpack.shard_batch`.
        checkpointing: `full`, `reentrant`, or `as_is` to leave the model's own.
        dtype: of parameters and computation.
        device: of the model's copies; what is compared is brought to the CPU.
        text_row: as for `longpack.shard_batch`.
    """

    world_size: int
    layout: str
    kv_exchange: str
    attn_backend: str
    checkpointing: str
    dtype: torch.dtype
    device: torch.device
    text_row: int | None = None


@dataclass(frozen=True, eq=False)
class Subject:
    """What is being verified.

    Args:
        model: never run itself; copies are.
        load: from (rank, world_size), the batch that this rank loads.
        settings: how it is meant to train.
        ranks: where copies run.
        shard: from (batch, transport), this rank's share; None for `longpack.shard_batch`.
        forward: from (model, share), the model's outputs; None for `model(**inputs)`.
    """

    model: torch.nn.Module
    load: Callable[[int, int], Batch]
    settings: Settings
    ranks: Ranks
    shard: Callable[[Batch, Transport], ShardedBatch] | None = None
    forward: Callable[[torch.nn.Module, ShardedBatch], Any] | None = None

    @cached_property
    def batch(self) -> Batch:
        """What rank 0 loads, which all ranks should, on the CPU."""
        return _moved(self.load(0, self.settings.world_size), torch.device("cpu"))

    @cached_property
    def row(self) -> PackedRow:
        """The documents that the batch says it has."""
        return read_documents(self.batch, text_row=self.settings.text_row)

    @cached_property
    def plan(self) -> Plan:
        """How the settings split the row."""
        s = self.settings
        return plan_step(self.row, s.world_size, s.layout, s.kv_exchange)

    @cached_property
    def targets(self) -> torch.Tensor:
        """The targets `[S]` that the batch's labels and documents ask for."""
        return self.read_targets(self.batch)

    def read_targets(self, batch: Batch) -> torch.Tensor:
        """Return the targets `[S]` of a batch like this one."""
        return whole_targets(batch, read_documents(batch, text_row=self.settings.text_row))

    @property
    def is_transformers(self) -> bool:
        """Say whether stock attention can be chosen by name, to compare with."""
        return hasattr(self.model, "set_attn_implementation")

    @cached_property
    def replica(self) -> Callable[[int], torch.nn.Module]:
        """The model of each rank, in the run's dtype."""
        return cache(lambda rank: self.copy(self.settings.dtype))

    @property
    def attn_implementation(self) -> str:
        """The name that transformers knows the model's attention by; "" for other models."""
        config = getattr(self.model, "config", None)
        return getattr(config, "_attn_implementation", None) or ""

    def copy(self, dtype: torch.dtype, stock: bool = False) -> torch.nn.Module:
        """Return a copy in training mode, without dropout.

        Args:
            dtype: buffers are only ever widened: rotary frequencies must not be rounded.
            stock: with the attention that comes with transformers.
        """
        model: Any = copy.deepcopy(self.model).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if dtype == torch.float64:
            model.double()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")  # grouped products have no fp64
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        model.to(self.settings.device)
        if stock and self.is_transformers:
            model.set_attn_implementation("eager")  # the one that honours everything
        return model

    def share(self, transport: Transport, batch: Batch | None = None) -> ShardedBatch:
        """Return one rank's share of a batch, of what it loads by default."""
        if batch is None:
            batch = self.load(transport.rank, self.settings.world_size)
        batch = _moved(batch, self.settings.device)
        s = self.settings
        share = (
            shard_batch(
                batch,
                transport,
                s.layout,
                kv_exchange=s.kv_exchange,
                attn_backend=s.attn_backend,
                text_row=s.text_row,
                check_agreement=False,
            )
            if self.shard is None
            else self.shard(batch, transport)
        )
        _refuse_lost_rows(batch, share.plan)
        return share

    def call(self, model: torch.nn.Module, share: ShardedBatch) -> Any:
        """Return the model's outputs as the user calls it."""
        return call_model(model, share) if self.forward is None else self.forward(model, share)

    def call_alone(self, model: torch.nn.Module, start: int, stop: int) -> Any:
        """Return the outputs for one document, to compare with: nothing to pack or to split.

        A transformers model runs with stock attention. Another model runs under the step of one
        rank and one document, with the dense kernel.
        """
        document = _moved(document_batch(self.batch, start, stop), self.settings.device)
        share = shard_batch(document, attn_backend="dense", text_row=self.settings.text_row)
        if self.is_transformers:
            inputs = {k: v for k, v in share.inputs.items() if k != "cp_step"}
            return model(**inputs)
        return self.call(model, share)


def _refuse_lost_rows(batch: Batch, plan: Plan) -> None:
    b, s = batch_shape(batch)
    if plan.row.length < b * s:
        raise PackingError(
            f"the batch has {b * s} rows and the plan {plan.row.length}: "
            f"{b * s - plan.row.length} tokens were lost before the split. Round lengths up, not "
            "down, or hand the whole batch to shard_batch, which pads by itself"
        )


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def call_model(model: torch.nn.Module, share: ShardedBatch) -> Any:
    """Call `model(**inputs)` with the inputs that its signature takes.

    A model that does not take `cp_step` runs inside `with step:`, which closes before backward.
    """
    inputs = accepted(model, share.inputs)
    if "cp_step" in inputs:
        return model(**inputs)
    with share.step:
        return model(**inputs)


def accepted(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that the model's forward has a parameter for."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}
