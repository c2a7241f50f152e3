"""Choose a kernel before anything runs, then run exactly that one."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longpack.errors import UnsupportedError
from longpack.kernels.call import KernelCall
from longpack.kernels.registry import IMPLEMENTATIONS, KERNELS
from longpack.kernels.segments import Segments

MAX_SCALE = 1e6  # scores of any use are far below; beyond, products pass the largest float


@dataclass(frozen=True)
class Choice:
    """Name the kernel that will run, and say why it and not another."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(attn_backend: str, call: KernelCall) -> Choice:
    """Choose the first kernel of a backend that can run a call; start nothing.

    Args:
        attn_backend: "flash", "te" or "dense".
        call: device, dtype and heads of the call.

    Raises:
        UnsupportedError: the backend is unknown, or none of its kernels can run the call; lists
            every kernel with every reason.
    """
    candidates = [kernel for kernel in IMPLEMENTATIONS if attn_backend == kernel.BACKEND]
    if not candidates:
        accepted = ", ".join(sorted({kernel.BACKEND for kernel in IMPLEMENTATIONS}))
        raise UnsupportedError(f"attn_backend {attn_backend!r} is not one of {accepted}")
    refused: list[str] = []
    for kernel in candidates:
        reasons = kernel.reasons_against(call)
        if not reasons:
            passed_over = f"; passed over: {'; '.join(refused)}" if refused else ""
            return Choice(kernel.NAME, f"can run {call}{passed_over}")
        refused.append(f"{kernel.NAME} ({', '.join(reasons)})")
    raise UnsupportedError(
        f"no kernel of attn_backend {attn_backend!r} can run {call}: {'; '.join(refused)}; "
        "change what the reasons name, or pass another `attn_backend` ('dense' runs anywhere)"
    )


def attend(
    choice_or_name: Choice | str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    """Attend every query row to the keys that its segment gives it, and to nothing else.

    Differentiable once, in query, key and value. Query heads `h * Hq / Hkv + [0, Hq / Hkv)`
    share key/value head h.

    Args:
        choice_or_name: what `choose_kernel` returned, or the name of a kernel in `KERNELS`.
        query: [num_queries, Hq, D], any strides.
        key: [num_keys, Hkv, D], same dtype and device as query.
        value: [num_keys, Hkv, Dv].
        segments: who attends what; see `Segments` for the law and for padding.
        scale: factor on the scores before softmax, above 0 and below 1e6; 1 / sqrt(D) if None.

    Returns:
        [num_queries, Hq, Dv] in the dtype of query; padding rows are exactly zero.

    Raises:
        UnsupportedError: unknown kernel, a kernel asked for by name that cannot run this call,
            tensors that do not fit each other or the segments, or a scale out of range.
    """
    fault = scale_fault(scale)
    if fault:
        raise UnsupportedError(f"attention cannot honour {fault}")
    call = _check_tensors(query, key, value, segments)
    if isinstance(choice_or_name, Choice):
        kernel = KERNELS[choice_or_name.name]
    else:
        kernel = _kernel_by_name(choice_or_name, call)
    return kernel.attend(
        query, key, value, segments, query.shape[-1] ** -0.5 if scale is None else scale
    )


def scale_fault(scale: Any) -> str | None:
    """Say why no kernel can take `scale`; None where it can.

    Kernels mask before they scale, so 0 would give nan and less than 0 would unmask.
    """
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is None or (number and 0 < scale < MAX_SCALE):
        return None
    shown = scale if isinstance(scale, float) else type(scale).__name__
    return f"scale={shown} (a number above 0 and below {MAX_SCALE:g}, or None)"


def _kernel_by_name(name: str, call: KernelCall):
    if name not in KERNELS:
        raise UnsupportedError(f"kernel {name!r} is not one of {', '.join(KERNELS)}")
    reasons = KERNELS[name].reasons_against(call)
    if reasons:
        raise UnsupportedError(f"kernel {name!r} cannot run {call}: {', '.join(reasons)}")
    return KERNELS[name]


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> KernelCall:
    if not query.dim() == key.dim() == value.dim() == 3:
        dims = (query.dim(), key.dim(), value.dim())
        raise UnsupportedError(f"query, key, value have {dims} dims: each needs [rows, heads, dim]")
    problems = []
    if query.shape[0] != segments.num_queries:
        problems.append(f"query has {query.shape[0]} rows, segments {segments.num_queries}")
    if key.shape[0] != segments.num_keys or value.shape[0] != segments.num_keys:
        rows = (key.shape[0], value.shape[0])
        problems.append(f"key and value have {rows} rows, segments {segments.num_keys}")
    if key.shape[1] != value.shape[1]:
        problems.append(f"key has {key.shape[1]} heads, value {value.shape[1]}")
    if query.shape[2] != key.shape[2]:
        problems.append(f"query has head_dim {query.shape[2]}, key {key.shape[2]}")
    if not query.dtype == key.dtype == value.dtype:
        problems.append(f"dtypes are {query.dtype}, {key.dtype}, {value.dtype}; cast them alike")
    if not query.device == key.device == value.device:
        problems.append(f"devices are {query.device}, {key.device}, {value.device}")
    if problems:
        raise UnsupportedError(f"tensors do not fit: {'; '.join(problems)}")
    return KernelCall(
        query.device.type,
        query.dtype,
        query.shape[1],
        key.shape[1],
        query.shape[2],
        value.shape[2],
    )
