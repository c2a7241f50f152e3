"""The oracle: dense attention from document ids and torch alone.

It imports nothing of longpack, and does by brute force what longpack does by planning, so that
neither can inherit the other's mistakes.
"""

import torch


def oracle_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    doc_ids: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend every row of a whole row to its own document, causally, with a dense mask.

    Args:
        query: `[1, num_heads, S, head_dim]`.
        key: `[1, num_kv_heads, S, head_dim]`.
        value: `[1, num_kv_heads, S, v_head_dim]`.
        doc_ids: integers `[S]`; a run of one id is a document, 0 is padding.
        scale: softmax scale; 1 / sqrt(head_dim) by default.

    Returns:
        `[1, num_heads, S, v_head_dim]`; padding rows are zero.
    """
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    change = torch.ones_like(doc_ids)
    change[1:] = (doc_ids[1:] != doc_ids[:-1]).to(change.dtype)
    run = change.cumsum(0)  # an id that comes back is another document
    row = torch.arange(len(doc_ids), device=doc_ids.device)
    allowed = (run[:, None] == run[None]) & (row[:, None] >= row[None]) & (doc_ids[:, None] > 0)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)  # NaN rows of padding become zero
    return weights @ value
