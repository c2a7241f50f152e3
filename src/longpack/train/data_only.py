"""Read torch.distributed.checkpoint files as data: nothing in them can name code to run.

As it comes, that reader unpickles `.metadata` and every value that is no tensor without limits.
Here `.metadata` may name the classes that describe tensors and nothing else, and values go through
`torch.load(weights_only=True)`, as tensors do anyway.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

_METADATA = "torch.distributed.checkpoint.metadata"
# Whole names: a dotted one would lead from a module on to what that module imports.
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


def load_as_data(state: dict[str, Any], folder: Path) -> None:
    """Load a checkpoint into a state dict in place; every rank calls it.

    Raises:
        CheckpointException: on every rank, where one could not read it, or a file names code.
    """
    load(state, storage_reader=_Reader(folder), planner=_Planner())


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f".metadata names {module_name}.{global_name}, which describes no tensor"
            )
        return super().find_class(module_name, global_name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:  # whose text advises to switch weights_only off
            raise pickle.UnpicklingError("a shard holds more than tensors and numbers") from None


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
