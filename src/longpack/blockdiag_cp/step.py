"""CpStep: a plan on one device for one microbatch, the value that travels through the model."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch

from longpack.blockdiag_cp import state
from longpack.blockdiag_cp.operator import make_token
from longpack.blockdiag_cp.overlap import StagedAttention
from longpack.collectives import Route, Transport
from longpack.errors import StepError
from longpack.kernels import TILED, Segments
from longpack.plan import Plan
from longpack.plan.stages import choose_stages


@dataclass(frozen=True, eq=False)
class CpStep:
    """One rank's part of one step of context parallelism.

    Pass it to every attention call (`cp_blockdiag_sdpa(..., step=step)`, or as the model's
    `cp_step` keyword): a checkpointed block then recomputes with the step that it ran forward
    with, however many are outstanding. For models that cannot pass it, `with step:` puts it in
    a slot that attention reads in the forward pass.

    Args:
        plan: the step's plan, the same on every rank.
        transport: this rank's end of the cp axis.
        device: where the rows are.
        attn_backend: `flash`, `te` or `dense`.
        overlap: whether the K/V exchange hides behind attention of the rank's own rows.
        stages: exchanges that a rank's arrivals are split over.
        number: of the batch on its axis, from 1, for messages; 0 where nobody counted.
    """

    plan: Plan
    transport: Transport
    device: torch.device
    attn_backend: str
    overlap: bool = True
    stages: int = 1
    number: int = 0
    _tokens: list[Any] = field(default_factory=list, repr=False)

    @classmethod
    def make(
        cls,
        plan: Plan,
        transport: Transport,
        device: torch.device | str = "cpu",
        attn_backend: str | None = None,
        *,
        overlap: bool = True,
        stages: int | None = None,
        number: int = 0,
    ) -> Self:
        """Put a plan on a device, for this rank.

        Args:
            plan: made for `transport.world_size` ranks.
            transport: this rank's end of the cp axis.
            device: where query, key and value will be.
            attn_backend: a name that `normalize_attn_backend` knows; the configured one by
                default.
            overlap: attend the rank's own rows while others travel. Results are the same bit for
                bit without. Only kernels that attend in parts can: torch's own, on CPU and CUDA.
            stages: split what arrives over so many exchanges, each attended while the next
                travels; by default as many as `choose_stages` predicts to be fastest. The same
                on every rank. An all-gather has one.
            number: of the batch on its axis, from 1; errors name it.

        Raises:
            StepError: a plan for another world size, or stages below 1.
        """
        if plan.world_size != transport.world_size:
            raise StepError(
                f"the plan is for {plan.world_size} ranks but the cp axis has "
                f"{transport.world_size}: plan with world_size={transport.world_size}"
            )
        if stages is not None and (type(stages) is not int or stages < 1):
            shown = stages if isinstance(stages, int | float) else type(stages).__name__
            raise StepError(f"stages={shown}; it must be an int of at least 1, or None")
        if stages is None:
            stages = choose_stages(plan)
        elif plan.kv_exchange == "allgather":
            stages = 1
        backend = attn_backend
        if backend is None:
            backend = state.cp_varlen_runtime_config()["attn_backend"]
        step = cls(
            plan,
            transport,
            torch.device(device),
            state.normalize_attn_backend(backend),
            overlap,
            stages,
            number,
        )
        if any(step.attn_backend == kernel.BACKEND for kernel in TILED.values()):
            _ = step.token  # now: torch.compile can read a cached property but not make it
        return step

    @cached_property
    def staged(self) -> StagedAttention:
        """Tiles and route of kernels that attend in parts; built once."""
        return StagedAttention.make(
            self.plan, self.transport, self.device, self.overlap, self.stages, self.name
        )

    @cached_property
    def token(self) -> torch.Tensor:
        """What stands for `staged` in an operator's arguments."""
        return make_token(self.staged)

    @cached_property
    def segments(self) -> Segments:
        """What this rank's queries attend among `route.num_keys` keys brought together."""
        bounds = self.plan.segments(self.rank)
        return Segments(bounds, self.plan.local_length, self.route.num_keys)

    @cached_property
    def route(self) -> Route:
        """How the keys of `segments` are brought together; for kernels of one call."""
        return _route(self.plan, self.rank, self.device)

    @cached_property
    def name(self) -> str:
        """What errors of collectives call the step."""
        plan = f"plan {self.plan.digest[:8]}"
        return f"batch {self.number} ({plan})" if self.number else plan

    @property
    def group(self) -> Any:
        """The process group of the cp axis."""
        return self.transport.group

    @property
    def rank(self) -> int:
        """This rank on the cp axis."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks on the cp axis."""
        return self.transport.world_size

    @cached_property
    def packed_cu_seqlens_cpu(self) -> torch.Tensor:
        """Offsets of the whole padded row, int64 on the host; padding runs are entries too.

        What recurrent layers need: state resets at every offset and every row is covered.
        """
        return torch.from_numpy(self.plan.row.pad_to(self.plan.padded_length).cu_seqlens())

    @cached_property
    def packed_cu_seqlens(self) -> torch.Tensor:
        """`packed_cu_seqlens_cpu` on the step's device."""
        return self.packed_cu_seqlens_cpu.to(self.device)

    def __enter__(self) -> Self:
        self._tokens.append(state._CP_BLOCKDIAG_STATE.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        state._CP_BLOCKDIAG_STATE.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"CpStep(rank {self.rank} of {self.world_size}: {self.plan}; {self.attn_backend})"


def current_blockdiag_cp_state() -> CpStep | None:
    """Return the step whose `with` block is open, or None.

    Recurrent layers read its `group`, `packed_cu_seqlens` and `packed_cu_seqlens_cpu`.
    """
    return state._CP_BLOCKDIAG_STATE.get()


def _route(plan: Plan, rank: int, device: torch.device) -> Route:
    """Put one rank's transfers on its device; where no rank receives, nothing moves."""
    part = plan.transfers(rank)
    num_keys = len(part.key_rows)
    prefix = bool((part.key_rows == range(num_keys)).all()) if num_keys else True
    return Route(
        kind=plan.kv_exchange if any(plan.received_tokens) else "none",
        send_index=torch.from_numpy(part.send_rows).to(device),
        send_counts=part.send_counts,
        receive_counts=part.receive_counts,
        key_index=None if prefix else torch.from_numpy(part.key_rows).to(device),
        num_keys=num_keys,
    )
