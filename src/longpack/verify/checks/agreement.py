"""Do all ranks load the same batch and make the same plan?"""

import hashlib
from functools import partial

import torch

from longpack.blockdiag_cp import shard_batch
from longpack.collectives import Transport
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import Model, RunFailedError, on_ranks
from longpack.verify.subject import Subject


def check(subject: Subject) -> CheckResult:
    """Compare plan digests and tokens over the ranks."""
    s = subject.settings

    def body(transport: Transport, model: Model, compare: bool) -> tuple[str, dict[str, str]]:
        batch = subject.load(transport.rank, s.world_size)
        share = shard_batch(
            batch,
            transport,
            s.layout,
            kv_exchange=s.kv_exchange,
            text_row=s.text_row,
            check_agreement=compare,
        )
        tensors = {k: _digest(v) for k, v in batch.items() if isinstance(v, torch.Tensor)}
        return share.plan.digest, tensors

    try:
        found = on_ranks(subject, partial(body, compare=False))
        if len({digest for digest, _ in found}) > 1:
            on_ranks(subject, partial(body, compare=True))  # raises, naming the first difference
    except RunFailedError as failed:
        return CheckResult("ranks do not agree", (failed.finding,))
    digests = [digest for digest, _ in found]
    findings = tuple(
        Finding(
            kind="agreement",
            where=f"batch[{key!r}] of rank {rank}",
            fact=f"rank {rank} and rank 0 load the same documents but other values of {key}",
            cause="the data loader gives the ranks of one cp axis different rows",
            remedy="seed and shard the loader by the dp rank alone, not by the global rank",
        )
        for rank, (_, tensors) in enumerate(found)
        for key, digest in tensors.items()
        if digest != found[0][1].get(key)
    )
    said = f"{len(digests)} ranks make the same plan, of digest {digests[0]}"
    return CheckResult(said, findings, {"digests": digests})


def _digest(value: torch.Tensor) -> str:
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
