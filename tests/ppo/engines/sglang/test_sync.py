"""The trainer's side of a weight update, without an engine."""

import importlib
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from ppo.engines.sglang import sync as sglang_sync

SETTINGS = "max_split_size_mb:64,expandable_segments:True"


class Handle:
    """Pickled as torch pickles a tensor of a GPU."""

    def __init__(self, dtype: torch.dtype, numel: int):
        from torch.multiprocessing import reductions

        size, stride = torch.Size([numel]), (1,)
        tensor = (torch.Tensor, size, stride, 0, torch.storage.TypedStorage, dtype)
        memory = (1, b"handle", numel * dtype.itemsize, 512, False, b"counter", 0, b"event", True)
        self.reduced = (reductions.rebuild_cuda_tensor, tensor + memory)

    def __reduce__(self) -> Any:
        return self.reduced


def test_sglang_unpickles_handles_of_a_gpu_with_the_index_that_the_trainer_has(monkeypatch):
    common = pytest.importorskip("sglang.srt.utils.common")
    patch_torch = importlib.import_module("sglang.srt.utils.patch_torch")
    from torch.multiprocessing import reductions

    opened = []
    for name in ("_reduce_tensor_original", "_rebuild_cuda_tensor_original"):
        monkeypatch.setattr(reductions, name, lambda *args: opened.append(args), raising=False)
    buffer = io.BytesIO()
    handles = [("table", Handle(torch.bfloat16, 8)), ("result", Handle(torch.uint8, 4096))]
    ForkingPickler(buffer).dump(handles)
    # what monkey_patch_torch_reductions does in a worker
    patched = patch_torch._rebuild_cuda_tensor_modified
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", patched)
    names = [name for name, _ in common.safe_pickle_loads(buffer.getvalue())]
    assert names == ["table", "result"]
    assert [(args[5], args[6]) for args in opened] == [(torch.bfloat16, 1), (torch.uint8, 1)]


def test_buckets_never_lie_in_expandable_segments(monkeypatch):
    current = [SETTINGS]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: current[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", current.append)
    with pytest.raises(KeyError), sglang_sync._shareable_memory(torch.device("cuda", 0)):
        assert current[-1] == "max_split_size_mb:64,expandable_segments:False"
        raise KeyError
    assert current[-1] == SETTINGS
    changes = len(current)
    with sglang_sync._shareable_memory(torch.device("cpu")):
        pass
    current.append("max_split_size_mb:64")
    with sglang_sync._shareable_memory(torch.device("cuda", 0)):
        pass
    assert len(current) == changes + 1


def test_a_worker_that_writes_nothing_has_not_answered():
    result = torch.zeros(16, dtype=torch.uint8)
    assert sglang_sync._answer(result) is None
    result[:2] = torch.tensor(list(b"{}"), dtype=torch.uint8)
    assert sglang_sync._answer(result) == {}
