"""From a batch that every cp rank holds whole to this rank's inputs and step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.agreement import agree_on_plan
from longpack.blockdiag_cp.step import CpStep
from longpack.collectives import Transport, as_transport, count_meeting, gather_rows
from longpack.errors import PackingError
from longpack.loss import IGNORE, check_labels, count_targets, next_token_targets
from longpack.packing import (
    DOCUMENT_KEYS,
    LENGTH_KEYS,
    PADDED_KEYS,
    PRIMARY,
    batch_shape,
    read_documents,
)
from longpack.plan import CostModel, Plan, plan_step

LABEL_KEYS = ("labels", "shift_labels")
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_CONSUMED = {*DOCUMENT_KEYS, *PADDED_KEYS, *LENGTH_KEYS, *LABEL_KEYS, *PRIMARY}


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """One rank's share of a batch.

    Args:
        inputs: keyword arguments of the model: local tensors `[1, local_length, ...]`,
            `position_ids` counted per document, `cp_step`, `use_cache=False`, and with labels
            `labels` and `shift_labels` (both already shifted) and `num_items_in_batch` (global).
        step: the step, also in `inputs` as `cp_step`.
        batch_size: rows B of the batch before they were laid end to end.
    """

    inputs: dict[str, Any]
    step: CpStep
    batch_size: int

    @property
    def plan(self) -> Plan:
        """The step's plan."""
        return self.step.plan

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring the local rows of all ranks back into the order of the batch, padding cut off.

        Every rank calls it and gets the whole tensor. Its backward adds the ranks' gradients:
        compute a loss of the whole on one rank, or divide it by the number of ranks.

        Args:
            x: local rows along `dim`, of `local_length`.
            dim: the dimension of rows; with B > 1 batch rows and `x` `[1, local_length, ...]`
                the result is `[B, S, ...]`.
        """
        step, length = self.step, self.plan.row.length
        fits = _is_strided(x) and type(dim) is int and -x.dim() <= dim < x.dim()
        if not fits or x.shape[dim] != self.plan.local_length:
            raise PackingError(
                f"x is {_shown(x)} with rows along dim={dim!r}, a shard has "
                f"{self.plan.local_length} rows: pass this rank's local rows and their dim"
            )
        ranks = range(step.world_size)
        rows = torch.cat([torch.from_numpy(self.plan.shards.rows(r)) for r in ranks])
        place = torch.argsort(rows)[:length].to(x.device)
        whole = gather_rows(x.movedim(dim, 0), step.transport).index_select(0, place)
        whole = whole.movedim(0, dim)
        if self.batch_size > 1 and dim in (1, 1 - x.dim()) and x.shape[0] == 1:
            return whole.reshape(self.batch_size, -1, *x.shape[2:])
        return whole


def shard_batch(
    batch: Mapping[str, Any],
    cp_mesh: Any = None,
    layout: str = "contiguous",
    padding_token_id: int = 0,
    *,
    dp_mesh: Any = None,
    kv_exchange: str | None = None,
    attn_backend: str | None = None,
    text_row: int | None = None,
    cost_model: CostModel | None = None,
    check_agreement: bool | None = None,
    overlap: bool = True,
    stages: int | None = None,
) -> ShardedBatch:
    """Split a batch of packed documents over the cp axis.

    Every rank of the axis passes the same whole batch and gets its own rows. Batch rows are laid
    end to end; labels are shifted inside documents before the split, so no target is lost at a
    shard's edge or crosses into another document.

    Args:
        batch: `input_ids` `[B, S]` or `inputs_embeds` `[B, S, hidden]`; what says where documents
            are (see `longpack.packing.read_documents`); optionally `labels` `[B, S]` (not
            shifted; label i is token i) or `shift_labels` `[B, S]` (shifted by the caller and
            taken as they are), -100 where there is no target; and any further tensors `[B, S,
            ...]`, which are split alike and padded with 0.
        cp_mesh: one-dimensional device mesh (or process group, or transport) of the axis; None
            for one rank.
        layout: name of a layout, as in `longpack.plan_step`.
        padding_token_id: id that fills `input_ids` past the end of the row.
        dp_mesh: an axis whose ranks hold other batches, over which targets are counted too.
        kv_exchange, attn_backend: this step's choice; the configured one by default.
        text_row: see `PackedRow.from_position_ids`.
        cost_model: what layout `auto` predicts with, the same on every rank.
        check_agreement: compare plans, tokens and labels over the ranks before anything else. By
            default for every batch where the axis moves host tensors (gloo; one exchange of 12
            bytes a rank, later than the first without what is on a device), else for the axis's
            first; True for this one too, False to skip.
        overlap, stages: how the K/V exchange hides behind attention; see `CpStep.make`.

    Raises:
        PackingError: documents missing, contradicting, or a tensor that cannot be split.
        AgreementError: ranks hold different batches, or one could not read its own. Raised on
            every rank when agreement is checked.
    """
    transport = as_transport(cp_mesh)
    knobs = state.cp_varlen_runtime_config()
    exchange = knobs["kv_exchange"] if kv_exchange is None else kv_exchange
    backend = knobs["attn_backend"] if attn_backend is None else attn_backend

    def plan() -> Plan:  # what may fail on one rank fails here, so that the others hear of it
        _check_keys(batch)
        row = read_documents(batch, text_row=text_row)
        _check_dtypes(batch, padding_token_id)
        _axes(dp_mesh)
        state.normalize_attn_backend(backend)
        knob = state.normalize_kv_exchange(exchange)
        return plan_step(row, transport.world_size, layout, knob, cost_model)

    number = count_meeting(transport)  # counted whatever check_agreement says
    agreed = agree_on_plan(
        plan, transport, check_agreement, batch=batch, first=number == 1, stages=stages
    )
    primary = batch["input_ids" if batch.get("input_ids") is not None else "inputs_embeds"]
    knob = state.normalize_attn_backend(backend)
    step = CpStep.make(
        agreed, transport, primary.device, knob, overlap=overlap, stages=stages, number=number
    )
    inputs = _split(batch, step, padding_token_id)
    inputs.update(_split_labels(batch, step, _axes(dp_mesh)))
    inputs.update(cp_step=step, use_cache=False)
    return ShardedBatch(inputs, step, batch_shape(batch)[0])


def _axes(mesh: Any) -> list[Transport]:
    return [] if mesh is None else [as_transport(mesh)]


def _is_strided(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.layout is torch.strided


def _shown(x: Any) -> str:
    if _is_strided(x):
        return f"{tuple(x.shape)}"
    return f"a tensor of layout {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__


def _check_keys(batch: Mapping[str, Any]) -> None:
    """Refuse what would otherwise be dropped or split wrongly."""
    b, s = batch_shape(batch)
    for key, value in batch.items():
        if key in _CONSUMED - {*LABEL_KEYS, *PRIMARY} or value is None:
            continue
        if not _is_strided(value) or tuple(value.shape[:2]) != (b, s):
            raise PackingError(
                f"batch[{key!r}] is {_shown(value)}, not a tensor of [{b}, {s}, ...] that can be "
                "split by rows: take it out of the batch and pass it to the model yourself"
            )
        if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
            raise PackingError(
                f"batch[{key!r}] is {value.dtype}, which torch cannot index: cast it"
            )
    if batch.get("labels") is not None and batch.get("shift_labels") is not None:
        raise PackingError(
            "the batch holds labels and shift_labels: pass labels, which are shifted here, or "
            "shift_labels, which are taken as they are"
        )


def _check_dtypes(batch: Mapping[str, Any], padding_token_id: int) -> None:
    """Refuse ids and labels whose dtype cannot hold what fills them."""
    ids, fill = batch.get("input_ids"), padding_token_id
    if ids is not None:
        limits = torch.iinfo(ids.dtype) if ids.dtype in INTEGER_DTYPES else None
        if limits is None or type(fill) is not int or not limits.min <= fill <= limits.max:
            raise PackingError(
                f"input_ids are {ids.dtype} and padding_token_id is {fill!r}: pass integers, and "
                "an id that their dtype holds"
            )
    for key in LABEL_KEYS:
        labels = batch.get(key)
        if labels is None:
            continue
        check_labels(labels, key)
        if labels.dim() != 2:
            raise PackingError(f"{key} are {tuple(labels.shape)}; pass one label per token, [B, S]")


def _split(batch: Mapping[str, Any], step: CpStep, padding_token_id: int) -> dict[str, Any]:
    """Return the local rows of every row-wise tensor, and positions counted per document."""
    inputs = {
        key: _local_rows(value.flatten(0, 1), step, padding_token_id if key == "input_ids" else 0)
        for key, value in batch.items()
        if value is not None and key not in _CONSUMED - set(PRIMARY)
    }
    positions = batch.get("position_ids")
    if positions is None:
        counted = torch.from_numpy(step.plan.row.position_ids()).to(step.device)
        inputs["position_ids"] = _local_rows(counted, step, 0)
    else:
        if not isinstance(positions, torch.Tensor):
            positions = torch.tensor(np.asarray(positions).tolist())  # any strides
        if not positions.is_floating_point():
            positions = positions.long()  # torch cannot index every width
        inputs["position_ids"] = _local_positions(positions, step)
    return inputs


def _local_positions(positions: torch.Tensor, step: CpStep) -> torch.Tensor:
    """Split `[S]`, `[B, S]` or multimodal `[R, B, S]` positions along rows, the last dimension."""
    if positions.dim() < 3:
        return _local_rows(positions.reshape(-1), step, 0)
    per_row = positions.flatten(1).movedim(1, 0)
    return _local_rows(per_row, step, 0)[0].movedim(0, 1)[:, None]


def _split_labels(batch: Mapping[str, Any], step: CpStep, dp: list[Transport]) -> dict[str, Any]:
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is not None:
        targets = shifted.flatten()
    elif labels is not None:
        targets = next_token_targets(labels.flatten(), step.plan.row)
    else:
        return {}
    local = _local_rows(targets, step, IGNORE)
    return {
        "labels": local,
        "shift_labels": local,
        "num_items_in_batch": count_targets(targets, dp),
    }


def _local_rows(rows: torch.Tensor, step: CpStep, fill: int) -> torch.Tensor:
    """Return `[1, local_length, ...]` of `[S, ...]`, rows past the end filled."""
    plan = step.plan
    padded = rows.new_full((plan.padded_length, *rows.shape[1:]), fill)
    padded[: plan.row.length] = rows
    mine = torch.from_numpy(plan.shards.rows(step.rank)).to(rows.device)
    return padded.index_select(0, mine)[None]


@dataclass(frozen=True)
class ShardLayout:
    """How a row was padded and split, for code written against the interface document's family.

    Args:
        original_seq_len: tokens before padding for the split.
        padded_seq_len: tokens after; every rank holds an equal share.
        plan: everything else.
    """

    original_seq_len: int
    padded_seq_len: int
    plan: Plan


def make_cp_blockdiag_batch_and_ctx(
    cp_mesh: Any,
    tp_mesh: Any,
    batch: Mapping[str, Any],
    loss_mask: torch.Tensor | None = None,
    padding_token_id: int = 0,
) -> tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any], ShardLayout]:
    """Split a batch contiguously, for code written against the interface document's family.

    In that family the data loader shifts labels, so here they are taken as they are; targets on
    padding become -100. New code uses `shard_batch`.

    Args:
        cp_mesh: see `shard_batch`.
        tp_mesh: tensor parallelism splits heads, which this split of rows does not touch; taken
            so that the call fits the family, and not read.
        batch: see `shard_batch`; `_packed_seq_ids` is taken for `doc_ids`. Not changed.
        loss_mask: `[B, S]`, 0 where there is no loss; split alike, and labels there become -100.
        padding_token_id: see `shard_batch`.

    Returns:
        `(ctx, batch, layout)`: `with ctx():` activates the step around forward and backward;
        the local batch, with `padding_mask` (True on padding) and the given keys only.
    """
    whole: Any = batch
    if isinstance(batch, Mapping):
        whole = dict(batch)
        if whole.get("shift_labels") is None:
            whole["shift_labels"] = whole.pop("labels", None)
        if loss_mask is not None:
            whole["loss_mask"] = loss_mask
    sharded = shard_batch(whole, cp_mesh, "contiguous", padding_token_id)
    step, row = sharded.step, sharded.plan.row
    real = torch.from_numpy(row.doc_ids() > 0).to(step.device)
    local = dict(sharded.inputs)
    for added in ("cp_step", "use_cache", "shift_labels", "num_items_in_batch"):
        local.pop(added, None)
    local["padding_mask"] = ~_local_rows(real, step, False)
    if "labels" in local:
        lost = local["padding_mask"].to(local["labels"].device)
        if loss_mask is not None and (loss_mask.is_meta or loss_mask.dim() != 2):
            shown = f"{tuple(loss_mask.shape)} on {loss_mask.device}"
            raise PackingError(f"loss_mask is {shown}; pass [B, S], with data")
        if loss_mask is not None:
            lost = lost | (local["loss_mask"] == 0).to(lost.device)
        local["labels"] = local["labels"].masked_fill(lost, IGNORE)
    layout = ShardLayout(row.length, sharded.plan.padded_length, sharded.plan)
    return (lambda: step), local, layout
