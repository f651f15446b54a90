"""Reading the files of somebody else's checkpoint: an index that names code is refused unread."""

import os
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from sharding.checkpoint.adapters import FILE, read_description
from sharding.checkpoint.files import CheckpointError
from sharding.checkpoint.storage import INDEX, SafeReader, read_tensors

NAME = "model.actor.weight"


class _Call(NamedTuple):
    """Makes a folder where it is unpickled."""

    folder: str

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


def _text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


def _write_index(folder: Path, content: bytes) -> Path:
    (folder / INDEX).write_bytes(pickle.PROTO + bytes([4]) + content + pickle.STOP)
    return folder


@pytest.mark.parametrize(
    "module",
    [
        *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"),
        *("torch.serialization", "torch", "pathlib"),
    ],
)
def test_a_name_with_a_dot_reaches_nothing_that_a_module_of_the_index_imports(tmp_path, module):
    harmed = tmp_path / "harmed"
    call = _global(module, "os.mkdir") + _text(str(harmed)) + pickle.TUPLE1 + pickle.REDUCE
    with pytest.raises(CheckpointError, match=r"os\.mkdir does not belong into an index"):
        SafeReader(_write_index(tmp_path, call)).read_metadata()
    assert not harmed.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_entry_that_is_no_tensor_is_refused_before_it_is_unpickled(tmp_path):
    harmed = tmp_path / "harmed"
    saved = {NAME: _Call(str(harmed))}
    save(saved, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    table = {NAME: torch.zeros(2)}
    with pytest.raises(CheckpointError, match="BytesStorageMetadata does not belong"):
        read_tensors(table, SafeReader(tmp_path))
    assert not harmed.exists() and table[NAME].tolist() == [0, 0]


def test_an_object_that_cannot_be_what_it_says_is_no_index(tmp_path):
    state = pickle.MARK + pickle.NONE * 5 + pickle.TUPLE  # None is no format of memory
    properties = _global("torch.distributed.checkpoint.metadata", "TensorProperties")
    content = properties + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD
    with pytest.raises(CheckpointError, match="memory_format"):
        SafeReader(_write_index(tmp_path, content)).read_metadata()


def test_the_dtype_under_adapters_is_a_dtype_and_no_other_name_of_torch(tmp_path):
    path = tmp_path / "models" / "actor" / FILE
    path.parent.mkdir(parents=True)
    for content in (b'{"dtype": "load"}', b'{"dtype": "no_such"}', b"[]", b"{}"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_description(tmp_path, "actor")
    path.write_bytes(b'{"dtype": "bfloat16"}')
    assert read_description(tmp_path, "actor") == {"dtype": "bfloat16"}
