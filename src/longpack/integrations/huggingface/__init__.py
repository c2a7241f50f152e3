"""Stock Hugging Face models with packed attention: `attn_implementation="longpack"`.

Importing this module registers the name. Then

    model.set_attn_implementation("longpack")
    sharded = longpack.shard_batch(batch, mesh["cp"])
    loss = model(**sharded.inputs).loss  # this rank's part; sum over ranks

`sharded.inputs` carries the step as `cp_step`, which transformers hands to every attention call
and every checkpointed layer keeps. With no mesh it is the packed attention of one rank.
"""

from longpack.integrations.huggingface.attention import INERT_ARGUMENTS, register
from longpack.integrations.huggingface.coverage import check_model, find_faults

register()

__all__ = ["INERT_ARGUMENTS", "check_model", "find_faults", "register"]
