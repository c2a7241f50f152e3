"""Gradients of all ranks: summed, measured, clipped."""

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from longpack.collectives import Transport

BUCKET_BYTES = 64 << 20  # large enough to fill a link, small next to the model


def sum_gradients(parameters: Sequence[torch.nn.Parameter], transport: Transport) -> None:
    """Add up the gradients of all ranks in place, in a few flat collectives.

    A sum, not a mean: each rank's loss is already its part of the whole. A parameter that took
    no part on this rank counts as zero, since it may have on another. Every rank calls it with
    the same parameters.
    """
    for bucket in _buckets(parameters):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = transport.all_reduce(torch.cat([g.reshape(-1) for g in grads]))
        for parameter, part in zip(bucket, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = part.view_as(parameter)


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> float:
    """Return the global gradient norm, having scaled gradients down to `limit` where it is more.

    Gradients are whole (summed) or sharded by FSDP; the norm is of the whole either way.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield runs of parameters of one dtype, of about `BUCKET_BYTES`."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
