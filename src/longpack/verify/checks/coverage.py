"""Does every attention layer attend under context parallelism?"""

from collections import Counter

from longpack.plan import Plan
from longpack.verify.report import CheckResult, Finding
from longpack.verify.runs import RunFailedError, watch_ranks
from longpack.verify.subject import Subject
from longpack.verify.watch import Watch


def check(subject: Subject) -> CheckResult:
    """Count attention calls by layer and rank; name layers that attend some other way."""
    try:
        ranks = watch_ranks(subject)
    except RunFailedError as failed:
        declared = _declared(subject, covered=False)
        return CheckResult("the forward raised", (*declared, failed.finding), ran=False)
    watch, plan = ranks[0]
    calls = Counter(path for path, _ in watch.calls)
    kernels = sorted({kernel for seen, _ in ranks for _, kernel in seen.calls})
    stock = sorted({path for seen, _ in ranks for path in seen.stock} - set(calls))
    findings = [*_declared(subject, bool(calls)), *_left_out(subject, stock), *_uneven(ranks)]
    if not calls and not findings:
        findings.append(_nothing_ran())
    said = (
        f"in one forward of a rank {len(calls)} of its modules attended under the step, "
        f"{sum(calls.values())} times in all, with {', '.join(kernels) or 'no kernel'}; K/V moves "
        f"by {plan.kv_exchange} ({plan.exchange_reason})"
    )
    data = {"calls": dict(calls), "kernels": kernels, "exchange": plan.kv_exchange, "stock": stock}
    return CheckResult(said, tuple(findings), data)


def declared_faults(subject: Subject, implementation: str) -> list[tuple[str, str]]:
    """Return (fault, modules) that a transformers model's layers declare before they run."""
    if not subject.is_transformers:
        return []
    from longpack.integrations.huggingface import find_faults

    pairs = (fault.rpartition(": ") for fault in find_faults(subject.model, implementation))
    return [(fault, modules) for fault, _, modules in pairs]


def _declared(subject: Subject, covered: bool) -> list[Finding]:
    # A model that attends through longpack under a name of its own is judged by that name.
    name = subject.attn_implementation if covered else "longpack"
    return [
        Finding(
            kind="coverage",
            where=modules,
            fact=fault,
            cause="these layers would not compute under context parallelism what they compute "
            "on one rank",
            remedy="give them longpack attention, or leave what is not honoured out of the config",
        )
        for fault, modules in declared_faults(subject, name)
    ]


def _left_out(subject: Subject, stock: list[str]) -> list[Finding]:
    """Name modules that attended by themselves, where the model's type has not said so."""
    named = " ".join(modules for _, modules in declared_faults(subject, "longpack"))
    left = [path for path in stock if path not in named and " more" not in named]
    if not left:
        return []
    return [
        Finding(
            kind="coverage",
            where=", ".join(left),
            fact="these modules attend with torch's own attention, to local rows only",
            cause="they do not call cp_blockdiag_sdpa, or have no step when they do",
            remedy="call longpack.cp_blockdiag_sdpa(query, key, value, step=cp_step) there",
        )
    ]


def _uneven(ranks: list[tuple[Watch, Plan]]) -> list[Finding]:
    calls = [[path for path, _ in watch.calls] for watch, _ in ranks]
    return [
        Finding(
            kind="coverage",
            where=f"rank {rank}",
            fact=f"rank {rank} made {len(theirs)} attention calls and rank 0 {len(calls[0])}"
            if len(theirs) != len(calls[0])
            else f"rank {rank} attends in another order than rank 0: {', '.join(theirs)} and "
            f"{', '.join(calls[0])}",
            cause="ranks must make the same calls in the same order, as each is a collective",
            remedy="do not skip or reorder layers by what a rank holds, as only padding or no "
            "target",
        )
        for rank, theirs in enumerate(calls)
        if theirs != calls[0]
    ]


def _nothing_ran() -> Finding:
    return Finding(
        kind="coverage",
        where="the model",
        fact="no module called cp_blockdiag_sdpa in the forward",
        cause="the model has no attention layer that longpack knows, or it attends another way",
        remedy="call longpack.cp_blockdiag_sdpa, or model.set_attn_implementation('longpack')",
    )
