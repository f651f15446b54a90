"""The trainer's side of a weight update, without an engine."""

import importlib
import io
import weakref
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo.engines.sglang import handles
from ppo.engines.sglang import sync as sglang_sync
from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from sharding.reshard.full_tensors import FullTensors
from tests.ppo.models.hf_models import save_model

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
    with pytest.raises(KeyError), handles.shareable_memory(torch.device("cuda", 0)):
        assert current[-1] == "max_split_size_mb:64,expandable_segments:False"
        raise KeyError
    assert current[-1] == SETTINGS
    changes = len(current)
    with handles.shareable_memory(torch.device("cpu")):
        pass
    current.append("max_split_size_mb:64")
    with handles.shareable_memory(torch.device("cuda", 0)):
        pass
    assert len(current) == changes + 1


def test_a_worker_that_writes_nothing_has_not_answered():
    result = torch.zeros(16, dtype=torch.uint8)
    assert handles.answer_in(result) is None
    result[:2] = torch.tensor(list(b"{}"), dtype=torch.uint8)
    assert handles.answer_in(result) == {}


def sent(sync: sglang_sync.WeightSync) -> dict[str, Tensor]:
    """Everything that a pass hands to the engine, put together by name; padding is zero."""
    if isinstance(sync.source, FullTensors):
        return {name: tensor for batch in sync.source.batches() for name, tensor in batch}
    layout = sync.source.layout
    tensors = {name: torch.full(size, torch.nan) for name, size in layout.targets.items()}
    for bucket in sync.source.buckets():
        for entry, block in bucket.views():
            rows, cols = block.shape
            part = tensors[entry.target][entry.dst_row :, entry.dst_col :]
            part[:rows, :cols].copy_(block)
        for zero in bucket.zeros:
            tensors[zero.target][zero.row : zero.row + zero.rows].zero_()
    return tensors


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # with a layout table, and without
def test_rows_beyond_the_ids_of_the_tokenizer_are_not_sent(tmp_path, family):
    folder = save_model(tmp_path / family, family)
    module: Any = AutoModelForCausalLM.from_pretrained(folder)
    head = module.get_output_embeddings().weight.detach()
    embedding = module.get_input_embeddings().weight.detach()
    assert len(head) == 96
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        shard_model(module, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        sync = sglang_sync.WeightSync(module, mesh, num_ids=70, dtype=torch.float32, bucket_mib=8)
        tensors = sent(sync)
    assert isinstance(sync.source, FullTensors) == (family == "gpt_neox")
    cut = [tensor for tensor in tensors.values() if tensor.shape[0] in (70, 128)]
    assert len(cut) == 2  # 70 rows, or padded to 128
    assert any(torch.equal(tensor[:70], head[:70]) for tensor in cut)
    assert any(torch.equal(tensor[:70], embedding[:70]) for tensor in cut)
    assert all(not tensor[70:].any() for tensor in cut)


class Listener:
    """An engine that keeps nothing of what it is sent."""

    def __init__(self) -> None:
        self.sent: list[weakref.ref[Tensor]] = []
        self.made: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def send(self, instruction: dict[str, Any], flat: Tensor) -> dict[str, Any]:
        if instruction["stage"] == "bucket":
            self.sent.append(weakref.ref(flat))
            self.alive.append(sum(tensor() is not None for tensor in self.made))
        return {"error": "", "differing": []}


def test_whole_tensors_are_gone_when_they_are_sent_and_a_payload_before_the_next_one_is_made(
    tmp_path, monkeypatch
):
    module: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "m", "gpt_neox"))
    engine, alive, converted = Listener(), [], FullTensors._converted

    def watched(self: FullTensors, batch: dict[str, Tensor]) -> Any:
        alive.append(sum(payload() is not None for payload in engine.sent))
        found = converted(self, batch)
        engine.made = [weakref.ref(tensor) for _, tensor in found]
        return found

    monkeypatch.setattr(FullTensors, "_converted", watched)
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        shard_model(module, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        sync = sglang_sync.WeightSync(
            module, mesh, num_ids=96, dtype=torch.float32, bucket_mib=0.01
        )
        assert sync.run(nullcontext(engine), action="load") == []
    assert len(engine.sent) > 2
    assert alive == engine.alive == [0] * len(engine.sent)
