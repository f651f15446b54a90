"""Torch distributed checkpoint's reader and writer of files, with checksums and without code.

Owns how tensors reach files and how their index is read. Must not know models, ranks, or what else
a checkpoint consists of.
"""

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from sharding.checkpoint.blocks import BlockChecksums, CheckedFile
from sharding.checkpoint.files import CheckpointError, DamagedCheckpoint, FileRecord
from sharding.progress import PROGRESS

INDEX = ".metadata"
"""the file among the tensors that says which lies where"""
_UNREADABLE = (
    *(OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, LookupError),
    *(MemoryError, OverflowError, RuntimeError, TypeError, ValueError),
)
"""what unpickling bytes that are no index may raise"""


class _ChecksumStream(io.BufferedIOBase):
    """A file that counts and checksums what passes through, and remembers why a write failed."""

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self.num_bytes = 0
        self.crc32 = 0
        self.blocks = BlockChecksums()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            written = self._raw.write(data)
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.blocks.add(data)
        self.num_bytes += written
        PROGRESS.tick()
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        try:
            self._raw.flush()
        except OSError as error:
            self.error = error
            raise

    def fileno(self) -> int:
        return self._raw.fileno()


class _ChecksumFileSystem(FileSystem):
    """Files that are written for the first time and from beginning to end."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.blocks: dict[str, str] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _ChecksumStream(cast(BinaryIO, raw))
            try:
                yield stream
            except OSError as error:  # of fsync
                self.error = error
                raise
            finally:
                self.error = stream.error or self.error
        self.records[Path(path).name] = FileRecord(stream.num_bytes, stream.crc32)
        self.blocks[Path(path).name] = stream.blocks.hex()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        for table in (self.records, self.blocks):
            table[Path(new_path).name] = table.pop(Path(path).name)  # pyright: ignore


class ChecksumWriter(FileSystemWriter):
    """DCP's file writer; files are synced, and `records` has what this rank wrote."""

    def __init__(self, folder: Path):
        super().__init__(folder, per_thread_copy_ahead=0)  # no CUDA stream in a writing thread
        self.fs: _ChecksumFileSystem = _ChecksumFileSystem()

    @property
    def records(self) -> dict[str, FileRecord]:
        """By file name."""
        return self.fs.records

    @property
    def blocks(self) -> dict[str, str]:
        """Checksums of blocks (blocks.py) by the name of a file with tensors."""
        return {name: blocks for name, blocks in self.fs.blocks.items() if name != INDEX}

    @property
    def error(self) -> OSError | None:
        """The operating system's reason why this rank could not write (torch hides it)."""
        return self.fs.error


class SafeReader(FileSystemReader):
    """DCP's file reader, except that its metadata may name no class but DCP's own.

    What is read is checked on the way, and once.
    """

    def __init__(self, folder: Path, blocks: Mapping[str, str] | None = None):
        """blocks: checksums of blocks, by file name; of other files nothing is checked."""
        super().__init__(folder)
        self._index: Metadata | None = None
        self._checked = {name: CheckedFile(checksums) for name, checksums in (blocks or {}).items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the tensors, read once.

        Raises:
            CheckpointError: it is missing, cut short, or holds anything else.
        """
        if self._index is not None:
            return self._index
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            _check_types(metadata)
        except _UNREADABLE as error:
            raise CheckpointError(f"{path}: {error or repr(error)}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._index = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each file from its beginning to its end."""

        def place(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        return super().read_data(replace(plan, items=sorted(plan.items, key=place)), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        PROGRESS.tick()
        checked = self._checked.get(sinfo.relative_path)
        if checked is None:
            return super()._slice_file(file, sinfo)
        try:
            return io.BytesIO(checked.read(file, sinfo.offset, sinfo.length))
        except CheckpointError as error:
            raise CheckpointError(f"{Path(self.path) / sinfo.relative_path}: {error}") from error

    def files_of_tensors(self) -> set[str]:
        """Names of the files, beside the index, that the tensors lie in. Raises CheckpointError."""
        return {info.relative_path for info in self.read_metadata().storage_data.values()}


def _check_types(metadata: Any) -> None:
    """Raise TypeError or AttributeError for what unpickles and yet is no index of tensors.

    An entry of any other kind would be unpickled when it is read, and could name anything.
    """
    if not isinstance(metadata, Metadata):
        raise TypeError(f"holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"entry {name!r} is a {type(entry).__name__}")
    for where, info in metadata.storage_data.items():
        path = info.relative_path
        if not isinstance(where, MetadataIndex) or not isinstance(path, str) or "/" in path:
            raise TypeError(f"{where!r} lies in {path!r}")


class _MetadataUnpickler(pickle.Unpickler):
    """Pickle runs what it names; this one knows only the names that DCP's index consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        # whole names only: pickle follows dots, and a module has what it imports ("os.system")
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: Any) -> Any:
    """What `getattr` does in an index: Python 3.11.0 to 3.11.3 pickle a member of an enum so."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name!r} of {kind!r} does not belong into an index")
    return kind[name]


_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # as Python 3.13 calls it
}


def read_tensors(table: dict[str, Tensor], reader: SafeReader) -> None:
    """Fill the (sharded) tensors by name; each rank for itself, without any collective.

    Raises:
        DamagedCheckpoint: what is read is not as it was written, or cannot be read.
        CheckpointError: it does not fit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as wanted
        try:
            load(table, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            [(reason, _)] = error.failures.values()  # there is no other rank
            damaged = isinstance(reason, CheckpointError | OSError)
            kind = DamagedCheckpoint if damaged else CheckpointError
            raise kind(str(reason) or repr(reason)) from error


def causes(error: CheckpointException) -> str:
    """The failures of all ranks in one line."""
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
