"""The run file: one typed TOML file says everything about a run."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from longpack.blockdiag_cp.state import normalize_attn_backend, normalize_kv_exchange
from longpack.errors import RunError
from longpack.plan import find_layout


def _layout(value: Any) -> str:
    if value != "auto":
        find_layout(str(value))
    return value


def _path(value: Path) -> Path:
    if b"\0" in os.fsencode(value):
        raise ValueError("no path holds a zero byte")
    return value


AnyPath = Annotated[Path, AfterValidator(_path)]


class _Section(BaseModel):
    """A table of the run file; a name it does not know is an error, infinity no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """`[model]`: real weights by `name`, or random ones by `config`.

    Args:
        name: `smollm2`, or the path of a saved transformers model.
        config: `model_type` and fields of that transformers config; `vocab_size` defaults to the
            tokenizer's, `max_position_embeddings` to the row length.
        dtype: of parameters and computation.
        gradient_checkpointing: recompute each layer in backward.
    """

    name: str | None = None
    config: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.config is None):
            raise ValueError("give exactly one of name (real weights) and config (random ones)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs a model_type, as config = { model_type = 'llama' }")
        return self


class DataSection(_Section):
    """`[data]`: documents and how they become rows.

    Args:
        paths: text files, `.jsonl` and `.parquet` files, and folders of text files. Each text
            file, JSON line and Parquet row is one document.
        suffix: of the files taken from folders.
        exclude: names of subfolders that are passed over.
        text_field: JSON field or Parquet column that holds the text.
        tokenizer: `bytes` (one token a byte, no file), `smollm2`, or the path of a saved one.
        row_length: tokens of a packed row, at least 2.
        document_length: longest piece of a document, in tokens; longer ones are cut. By default
            as many positions as the model has, at most a row.
        on_bad_file: `skip` names and counts documents that are empty or not UTF-8, `refuse`
            stops the run before it begins.
    """

    paths: Annotated[list[AnyPath], Field(min_length=1)]
    suffix: str = ".txt"
    exclude: list[str] = []
    text_field: str = "text"
    tokenizer: str = "bytes"
    row_length: Annotated[int, Field(ge=2)]
    document_length: Annotated[int, Field(ge=2)] | None = None
    on_bad_file: Literal["skip", "refuse"] = "skip"


class ParallelSection(_Section):
    """`[parallel]`: how ranks share a step. None of it changes what is computed.

    Args:
        cp: ranks that share each row.
        dp: groups of cp ranks, each with rows of its own; cp * dp is the number of ranks.
        layout: who holds which tokens of a row, as in `longpack.plan_step`.
        kv_exchange, attn_backend: as in `longpack.configure_cp_varlen`.
        fsdp: keep parameters, gradients and optimizer state sharded over all ranks (FSDP2).
        warn_waste: warn once when the busiest rank's attention makes the others wait for more
            than this share of a step, over the last steps; 1 never warns.
        timeout_s: how long a rank waits for the others, in seconds, before the run ends on all of
            them with who waited for whom.
        device: `auto` is a GPU per rank where there are enough, else the CPU.
    """

    cp: PositiveInt = 1
    dp: PositiveInt = 1
    layout: Annotated[str, BeforeValidator(_layout)] = "contiguous"
    kv_exchange: Annotated[str, BeforeValidator(normalize_kv_exchange)] = "allgather"
    attn_backend: Annotated[str, BeforeValidator(normalize_attn_backend)] = "flash"
    fsdp: bool = False
    warn_waste: Annotated[float, Field(ge=0, le=1)] = 0.25
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    device: Literal["auto", "cpu", "cuda"] = "auto"


class OptimizerSection(_Section):
    """`[optimizer]`: AdamW with a linear warmup, then a constant rate.

    Args:
        lr: learning rate after the warmup.
        betas, weight_decay: of AdamW.
        warmup: steps over which the rate rises from lr / warmup.
        grad_clip: largest global gradient norm; none by default.
    """

    lr: PositiveFloat = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = 0
    grad_clip: PositiveFloat | None = None


class RunSection(_Section):
    """`[run]`: how long, from where, into which folder.

    Args:
        steps: optimizer steps of the whole run, also when it is resumed.
        rows_per_step: packed rows of one optimizer step, a multiple of `parallel.dp`, which is
            the default. Fixed, it keeps a run the same over any number of ranks.
        seed: of random weights, dropout and the order of documents, at least 0.
        folder: where `run.json`, `metrics.jsonl`, `summary.json` and `checkpoints/` go.
        save_every: steps between checkpoints, the last step having one too; 0 saves none.
        resume: continue what the folder holds; False refuses a folder that holds a run.
        boundary_probe: after the last step, change one document of the next row and record how
            far the other documents' logits move.
    """

    steps: PositiveInt
    rows_per_step: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    folder: AnyPath
    save_every: Annotated[int, Field(ge=0)] = 100
    resume: bool = True
    boundary_probe: bool = False


class RunConfig(_Section):
    """A whole run file."""

    model: ModelSection
    data: DataSection
    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection

    @model_validator(mode="after")
    def _rows_for_every_replica(self) -> Self:
        if self.rows_per_step % self.parallel.dp:
            raise ValueError(
                f"run.rows_per_step = {self.rows_per_step} rows cannot be dealt evenly to "
                f"parallel.dp = {self.parallel.dp} replicas; make it a multiple"
            )
        return self

    @property
    def rows_per_step(self) -> int:
        """Packed rows of one optimizer step, over all replicas."""
        return self.run.rows_per_step or self.parallel.dp

    @property
    def world_size(self) -> int:
        """Ranks that the run needs."""
        return self.parallel.cp * self.parallel.dp


def load_config(path: Path | str) -> RunConfig:
    """Read a run file. Relative paths in it start at its own folder.

    Raises:
        RunError: the file cannot be read, is not TOML, or holds a name or value that is not
            accepted; the message lists every fault with its field, value and what is accepted.
    """
    path = Path(path)
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"run file {path} does not exist (looked in {Path.cwd()})") from None
    except OSError as error:
        raise RunError(f"run file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too long, too deep
        raise RunError(f"run file {path} is not valid TOML: {error}") from None
    return parse_config(text, folder=path.resolve().parent, source=str(path))


def parse_config(text: dict[str, Any], folder: Path, source: str = "run") -> RunConfig:
    """Check the contents of a run file; see `load_config`."""
    try:
        config = RunConfig.model_validate(text)
    except ValidationError as error:
        faults = "\n".join(f"  {_fault(found)}" for found in error.errors())
        count = error.error_count()
        raise RunError(f"{source}: {count} fault{'s' * (count > 1)}\n{faults}") from None
    data = config.data.model_copy(
        update={"paths": [(folder / p).resolve() for p in config.data.paths]}
    )
    run = config.run.model_copy(update={"folder": (folder / config.run.folder).resolve()})
    return config.model_copy(update={"data": data, "run": run})


def _fault(found: Any) -> str:
    """Say one fault: field = value: what is accepted."""
    where = ".".join(str(part) for part in found["loc"])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "missing":
        return f"{where} is missing"
    if found["type"] == "extra_forbidden":
        section = _section(found["loc"][:-1])
        return f"{where} is unknown; accepted here: {', '.join(section.model_fields)}"
    if isinstance(found["input"], dict):  # a rule over a whole table
        return f"{where}: {message}" if where else message
    return f"{where} = {_shown(found['input'])}: {message}"


def _shown(value: Any) -> str:
    """Return a value as text, cut short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4300 digits; a table too deep
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _section(loc: tuple[Any, ...]) -> type[BaseModel]:
    section: type[BaseModel] = RunConfig
    for name in loc:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        section = annotation
    return section
