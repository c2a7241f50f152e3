"""The small honest trainer: a stock model, packed documents, a (dp, cp) mesh, nothing lost.

`longpack train RUN.toml` is this package behind a command line; `longpack demo` compares one
rank with two. Read `trainer.py` first: the loop is short, and every other file is one of its parts.
"""

from longpack.train.config import RunConfig, load_config
from longpack.train.trainer import RunSummary, train

__all__ = ["RunConfig", "RunSummary", "load_config", "train"]
