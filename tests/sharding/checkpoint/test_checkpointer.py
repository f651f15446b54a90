"""Checkpoints over ranks: what comes back, what is kept, and what a fault leaves behind."""

import copyreg
import json
import logging
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from sharding.adamw import EIGHT_BITS, NarrowAdamW
from sharding.checkpoint import Checkpointer, CheckpointError, DamagedCheckpoint
from sharding.checkpoint import writer as checkpoint_writer
from sharding.checkpoint.files import read_manifest
from sharding.checkpoint.folder import list_checkpoints
from sharding.checkpoint.tensors import (
    model_tensors,
    optimizer_tensors,
    written_here,
)
from sharding.fsdp import local_shard, shard_model
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from sharding.offload import offload_module, offload_optimizer, reload_module, reload_optimizer
from tests.distributed import run_distributed
from tests.fake_device import fake_device
from tests.sharding.models import VOCAB, tiny_llama

CPU = torch.device("cpu")
Learner = tuple[nn.Module, torch.optim.AdamW]


def _learner(mesh: Mesh, *, seed: int = 0) -> Learner:
    """An actor with two parameter groups, and moments in 8 bits, which the runs of
    tests/test_resume.py have not; its lr differs from the one that is saved."""
    model = tiny_llama(seed=seed)
    shard_model(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, NarrowAdamW(groups, state_dtype=EIGHT_BITS, lr=0.5)


def _train(learner: Learner, first_step: int, num_steps: int) -> None:
    """Steps on tokens that every rank shares: the same result on every world."""
    model, optimizer = learner
    for step in range(first_step, first_step + num_steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
        tokens = tokens.to(next(model.parameters()).device)
        logits = model(input_ids=tokens).logits
        F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # on the device, where ranks talk
        tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return tensor.detach().clone()


def _values(learner: Learner) -> dict[str, Tensor]:
    """Parameters and optimizer state, whole."""
    model, optimizer = learner
    table = {}
    for name, parameter in model.named_parameters():
        table[name] = _full(parameter)
        for key, state in optimizer.state.get(parameter, {}).items():
            table[f"{name}/{key}"] = _full(state)
    return table


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _mesh(world_size: int, **degrees: int) -> Mesh:
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, **degrees)
    return build_mesh(dims, CPU)


def _load(checkpointer: Checkpointer, mesh: Mesh, path: Path) -> tuple[Learner, dict[str, Any]]:
    learner = _learner(mesh, seed=1)
    state = checkpointer.load(path, {"actor": learner[0]}, {"actor": learner[1]})
    return learner, state


def _fails_on_all_ranks(save: Callable[[], None], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        save()
    dist.barrier()


def _damage(rank: int, path: Path, how: Callable[[Path], Any]) -> None:
    if rank == 0:
        how(path)
    dist.barrier()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path, where: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if where is None else where] ^= 1
    path.write_bytes(content)


def _four_ranks(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    mesh = _mesh(world_size, rollout_tp=2)
    assert mesh.dims.shard_rows() == [[0, 2, 1, 3]]
    learner = _learner(mesh)
    with Checkpointer(folder, mesh, max_to_keep=2, keep_best="reward") as checkpointer:
        _round_trip(checkpointer, mesh, learner)
        expected = _pruning_and_damage(checkpointer, rank, learner)
        _faults(checkpointer, rank, learner)
    return expected


def _round_trip(checkpointer: Checkpointer, mesh: Mesh, learner: Learner) -> None:
    """Step 0 has no optimizer state yet; step 2 is saved while the training goes on."""
    model, optimizer = learner
    assert checkpointer.latest() is None
    checkpointer.save(0, {"actor": model}, {"actor": optimizer}, {})
    optimizer.param_groups[0]["lr"] = 1 / 3 * 1e-2
    optimizer.param_groups[1]["lr"] = 2e-2
    _train(learner, 0, 2)
    saved = _values(learner)
    torch.manual_seed(mesh.rank)
    checkpointer.save(2, {"actor": model}, {"actor": optimizer}, {"kl": 0.1, "step": 2})
    noise = torch.rand(3)
    _train(learner, 2, 1)  # the save in flight must not see it
    path = checkpointer.latest()
    assert path is not None
    assert path.name == "step_00000002"
    assert (checkpointer.folder / "latest").read_text() == "step_00000002\n"

    restored, state = _load(checkpointer, mesh, path)
    assert state == {"kl": 0.1, "step": 2}
    _assert_same(_values(restored), saved)
    assert torch.equal(torch.rand(3), noise)
    for new, old in zip(restored[1].param_groups, optimizer.param_groups, strict=True):
        assert new["lr"] == 0.5  # not from the checkpoint: the configuration says it
        new["lr"] = old["lr"]
    _train(restored, 2, 1)
    _assert_same(_values(restored), _values(learner))  # bitwise on the same sharding

    for fsdp_size in (2, 1):
        replicated = _mesh(4, fsdp_size=fsdp_size)
        learner_there, _ = _load(checkpointer, replicated, path)
        _assert_same(_values(learner_there), saved)
        _save_replicated(checkpointer, replicated, learner_there, mesh, saved)
    checkpointer.load(path.with_name("step_00000000"), {"actor": model}, {"actor": optimizer})
    assert not optimizer.state
    with pytest.raises(CheckpointError, match="lacks 30 tensors"):
        checkpointer.load(path, {"critic": model}, {})
    with pytest.raises(CheckpointError, match="holds no optimizer of critic"):
        checkpointer.load(path, {"actor": model, "critic": nn.Module()}, {"critic": optimizer})


def _save_replicated(
    original: Checkpointer, replicated: Mesh, learner: Learner, mesh: Mesh, saved: dict[str, Tensor]
) -> None:
    """HYBRID_SHARD and NO_SHARD write every tensor once, and load where shards are permuted.

    What a rank does not write it does not copy: replicas share the work.
    """
    names = {"actor": learner[0]}
    table = model_tensors(names) | optimizer_tensors(names, {"actor": learner[1]})
    mine = written_here(table, replicated).values()
    num_bytes = torch.tensor([sum(local_shard(t).nbytes for t in mine)] * 2)
    dist.all_reduce(num_bytes[:1])
    dist.all_reduce(num_bytes[1:], dist.ReduceOp.MAX)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in table.values())
    assert num_bytes[0] == whole and num_bytes[1] < 1.2 * whole / 4
    folder = original.folder.with_name(f"replicated_{replicated.dims.shard_size}")
    checkpointer = Checkpointer(folder, replicated, async_save=False)
    checkpointer.save(2, {"actor": learner[0]}, {"actor": learner[1]}, {"kl": 0.1, "step": 2})
    path = checkpointer.latest()
    assert path is not None
    _assert_same(_values(_load(original, mesh, path)[0]), saved)
    sizes = [
        sum(r.num_bytes for r in read_manifest(p)["files"].values())
        for p in (path, original.folder / path.name)
    ]
    assert sizes[0] <= sizes[1]


def _pruning_and_damage(
    checkpointer: Checkpointer, rank: int, learner: Learner
) -> dict[str, dict[str, Tensor]]:
    model, optimizer = learner

    def save(step: int, metric: float) -> None:
        state = {"step": step}
        checkpointer.save(step, {"actor": model}, {"actor": optimizer}, state, metric=metric)

    for step, metric in ((3, 0.9), (4, 0.1), (5, 0.2)):
        _train(learner, step, 1)
        save(step, metric)
    expected = {"step 5": _values(learner)}
    _train(learner, 6, 1)
    save(6, 0.3)
    checkpointer.finish()
    kept = [path.name for path in list_checkpoints(checkpointer.folder)]
    assert kept == ["step_00000006", "step_00000005", "step_00000003"]  # two newest, the best

    newest = checkpointer.folder / "step_00000006"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # pyright: ignore
    logging.getLogger("sharding.checkpoint").addHandler(handler)
    victim = newest / "tensors" / "__3_0.distcp"
    for how in (_truncate, Path.unlink):
        _damage(rank, victim, lambda path: shutil.copy(path, "/".join([str(path.parent), "copy"])))
        _damage(rank, victim, how)
        assert checkpointer.latest() == checkpointer.folder / "step_00000005"
        _damage(rank, victim, lambda path: path.with_name("copy").rename(path))
    _damage(rank, newest / "checksums.json", _flip)
    assert checkpointer.latest() == checkpointer.folder / "step_00000005"
    _damage(rank, newest / "checksums.json", _flip)
    # the content of tensors is checked by whoever reads it: here one rank, and all hear of it
    _damage(rank, victim, _flip)
    again = Checkpointer(checkpointer.folder, checkpointer._mesh, async_save=False)
    assert again.latest() == newest
    with pytest.raises(DamagedCheckpoint, match=r"__3_0\.distcp: wrong checksum in MiB 0"):
        again.load(newest, {"actor": _learner(checkpointer._mesh)[0]}, {})
    assert again.latest() == checkpointer.folder / "step_00000005"
    _damage(rank, victim, _flip)
    _damage(rank, newest / "manifest.json", lambda path: path.unlink())
    assert checkpointer.latest() == checkpointer.folder / "step_00000005"
    if rank == 0:
        texts = [record.getMessage() for record in records]
        assert all(text.startswith("checkpoint step_00000006 skipped") for text in texts)
        for text, cause in zip(
            texts,
            ("bytes instead", "No such file", "checksums.json", "MiB 0", "not a complete"),
            strict=True,
        ):
            assert cause in text
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpointer.load(newest, {"actor": model}, {})
    return expected


def _faults(checkpointer: Checkpointer, rank: int, learner: Learner) -> None:
    """A disk that is too small, and one that fills up under the writer of one rank.

    The first save that fails is said and tried again by the next one; two in a row, or the last,
    are an error.
    """
    model, optimizer = learner

    def save(checkpointer: Checkpointer = checkpointer) -> None:
        checkpointer.save(7, {"actor": model}, {"actor": optimizer}, {})

    real = shutil.disk_usage
    checkpoint_writer.shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 20)  # pyright: ignore
    save()
    assert checkpointer.saved_step == 6
    too_small = r"rank 0: .* has 0.001 GiB free, 0.016 GiB needed"
    _fails_on_all_ranks(checkpointer.finish, too_small)
    save()
    save()
    _fails_on_all_ranks(checkpointer.finish, f"two in a row: .*{too_small}")
    checkpoint_writer.shutil.disk_usage = real

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for async_save in (True, False):
        other = Checkpointer(checkpointer.folder, checkpointer._mesh, async_save=async_save)
        if rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        save(other)
        _fails_on_all_ranks(other.finish, r"step 7 not written.*rank 2: .*too large")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        assert not list(checkpointer.folder.glob("*.tmp"))
        assert other.latest() == checkpointer.folder / "step_00000005"
    assert (checkpointer.folder / "latest").read_text() == "step_00000006\n"


def _fewer_ranks(rank: int, world_size: int, folder: Path, expected: dict[str, Tensor]) -> None:
    mesh = _mesh(world_size)
    checkpointer = Checkpointer(folder, mesh, async_save=False)
    path = checkpointer.latest()
    assert path is not None
    learner, state = _load(checkpointer, mesh, path)
    assert state == {"step": 5}
    _assert_same(_values(learner), expected)


@pytest.mark.distributed
def test_a_checkpoint_of_four_permuted_ranks_survives_faults_and_loads_on_any_world(tmp_path):
    expected = run_distributed(_four_ranks, 4, tmp_path)[0]["step 5"]
    run_distributed(_fewer_ranks, 2, tmp_path, expected)
    with init_distributed(CPU):
        _fewer_ranks(0, 1, tmp_path, expected)


class _Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, (cast(str, _Harmful.target),)

    target: Any = None


class _GetsAttribute:
    def __reduce__(self) -> tuple:
        return getattr, (Metadata, "__init__")


def _write_as_python_3_11_2_does(index: Path) -> None:
    """Members of enums as getattr(class, name), which is what Debian 12's Python writes."""
    metadata = pickle.loads(index.read_bytes())  # our own
    found = BytesIO()
    pickler = pickle.Pickler(found)
    pickler.dispatch_table = copyreg.dispatch_table | {
        _MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))
    }
    pickler.dump(metadata)
    assert b"getattr" in found.getvalue()
    index.write_bytes(found.getvalue())


def test_an_index_that_would_run_code_is_refused_and_one_of_any_python_is_read(tmp_path):
    _Harmful.target = str(tmp_path / "harmed")
    with init_distributed(CPU):
        mesh = _mesh(1)
        checkpointer = Checkpointer(tmp_path / "run", mesh, async_save=False)
        model, optimizer = _learner(mesh)
        checkpointer.save(1, {"actor": model}, {"actor": optimizer}, {})
        path = checkpointer.latest()
        assert path is not None
        index = path / "tensors" / ".metadata"
        _write_as_python_3_11_2_does(index)
        checkpointer.load(path, {"actor": model}, {})
        harmful = _Harmful(), _GetsAttribute()
        for content in harmful:
            index.write_bytes(pickle.dumps(content))
            with pytest.raises(CheckpointError, match="does not belong into an index"):
                checkpointer.load(path, {"actor": model}, {})
    assert not (tmp_path / "harmed").exists()


def test_a_resume_reads_every_byte_once_and_one_of_another_shape_is_no_damage(tmp_path):
    with init_distributed(CPU):
        module = nn.Linear(1024, 1024)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(1024)).sum().backward()
        optimizer.step()
        saver = Checkpointer(tmp_path, _mesh(1), async_save=False)
        for step in (1, 2):
            saver.save(step, {"actor": module}, {"actor": optimizer}, {})
        checkpointer = Checkpointer(tmp_path, _mesh(1))
        before = _bytes_read()
        path = checkpointer.latest()
        assert path is not None
        checkpointer.load(path, {"actor": module}, {"actor": optimizer})
        num_bytes = sum(file.num_bytes for file in read_manifest(path)["files"].values())
        assert num_bytes <= _bytes_read() - before < 1.05 * num_bytes
        other = nn.Linear(1024, 1000)
        with pytest.raises(CheckpointError, match=r"[Ss]ize mismatch") as error:
            checkpointer.load(path, {"actor": other}, {})
        assert error.type is CheckpointError
        assert checkpointer.latest() == path
        _flip(path / "tensors" / "__0_0.distcp", 5000)  # in the weights, which come first
        assert checkpointer.load_newest(tmp_path, {"actor": module}).name == "step_00000001"


def test_a_plan_that_has_not_changed_is_not_sent_again_and_each_folder_has_its_own(
    tmp_path, monkeypatch
):
    sent, make = [], DefaultSavePlanner.create_local_plan

    def noting(planner: DefaultSavePlanner) -> SavePlan:
        plan = make(planner)
        sent.append(len(plan.items))
        return plan

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", noting)
    with init_distributed(CPU):
        modules = [nn.Linear(3, 2), nn.Linear(5, 4), nn.Linear(5, 4, bias=False)]
        mesh = _mesh(1)
        one, other = (
            Checkpointer(tmp_path / name, mesh, async_save=False) for name in ("one", "other")
        )
        for step, number in enumerate((0, 1, 0, 1, 1, 2, 2), 1):
            nn.init.constant_(modules[number].weight, step)
            checkpointer = one if number == 0 else other
            checkpointer.save(step, {"actor": modules[number]}, {}, {})
        # weight, bias and a random generator's state
        assert sent == [3, 3, 0, 0, 0, 2, 0]
        for checkpointer, number, step in ((one, 0, 3), (other, 2, 7)):
            module = modules[number]
            nn.init.zeros_(module.weight)
            path = checkpointer.load_newest(checkpointer.folder, {"actor": module})
            assert path.name == f"step_{step:08d}"
            assert torch.equal(module.weight, torch.full_like(module.weight, step))
        older = other.folder / "step_00000006"
        other.load(older, {"actor": modules[2]}, {})
        assert modules[2].weight[0, 0] == 6


def _bytes_read() -> int:
    """Of this process, from files and from what is cached of them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with init_distributed(CPU):
        checkpointer = Checkpointer(tmp_path, _mesh(1))
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpointer.save(1, {}, {}, {"rng": torch.zeros(2)})
        assert not list(tmp_path.iterdir())
        checkpointer.save(1, {}, {}, {"losses": [0.1 + 0.2, float("inf")]})
        path = checkpointer.latest()
        assert path is not None
        assert json.loads((path / "train_state.json").read_text())["step"] == 1
        assert checkpointer.load(path, {}, {}) == {"losses": [0.1 + 0.2, float("inf")]}


def test_weights_and_moments_take_the_dtype_of_the_model_that_they_are_loaded_into(tmp_path):
    with init_distributed(CPU):
        first, second = (nn.Linear(3, 2, dtype=d) for d in (torch.float32, torch.bfloat16))
        optimizers = [torch.optim.AdamW(module.parameters()) for module in (first, second)]
        first(torch.ones(3)).sum().backward()
        optimizers[0].step()
        checkpointer = Checkpointer(tmp_path, _mesh(1), async_save=False)
        checkpointer.save(1, {"actor": first}, {"actor": optimizers[0]}, {})
        path = checkpointer.latest()
        assert path is not None
        checkpointer.load(path, {"actor": second}, {"actor": optimizers[1]})
        for old, new in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(new, old.bfloat16())
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizers[0].state[old][name].bfloat16()
                assert torch.equal(optimizers[1].state[new][name], moment)
            assert optimizers[1].state[new]["step"].dtype == torch.float32
        second(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
        optimizers[1].step()
        codes = NarrowAdamW(first.parameters(), state_dtype=EIGHT_BITS)
        with pytest.raises(CheckpointError, match=r"of actor as numbers, .* wants 8 bits: set it"):
            checkpointer.load(path, {"actor": first}, {"actor": codes})


def test_what_rests_on_the_host_is_written_from_there_and_the_next_update_waits_for_it(
    tmp_path, monkeypatch
):
    gate, write = threading.Event(), checkpoint_writer.CheckpointWriter._write_tensors

    def slow_write(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    def rest(learner: Learner) -> None:
        offload_module(learner[0])
        offload_optimizer(learner[1])

    monkeypatch.setattr(checkpoint_writer.CheckpointWriter, "_write_tensors", slow_write)
    with init_distributed(CPU), fake_device():
        mesh = _mesh(1)
        learner = _learner(mesh)
        model, optimizer = learner
        _train(learner, 0, 1)
        rest(learner)
        saved = _values(learner)
        with Checkpointer(tmp_path, mesh) as checkpointer:
            checkpointer.save(1, {"actor": model}, {"actor": optimizer}, {})
            assert checkpointer._staging._buffers.keys() == {"rng.0.cpu"}
            reload_module(model, CPU)
            reload_optimizer(optimizer, CPU)
            _train(learner, 1, 1)
            end_of_update = threading.Thread(target=rest, args=(learner,))
            end_of_update.start()
            end_of_update.join(0.1)
            assert end_of_update.is_alive()
            gate.set()
            end_of_update.join()
            path = checkpointer.latest()
            assert path is not None
            _assert_same(_values(_load(checkpointer, mesh, path)[0]), saved)
        assert any(not torch.equal(new, saved[n]) for n, new in _values(learner).items())


@pytest.mark.gpu
def test_a_checkpoint_of_what_rests_on_the_host_goes_on_training_on_a_gpu(tmp_path):
    device = torch.device("cuda", 0)

    def learner(seed: int) -> Learner:
        model = tiny_llama(seed=seed, device=device)
        shard_model(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)

    with init_distributed(device):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        first, second = learner(0), learner(1)
        _train(first, 0, 2)
        offload_module(first[0])
        offload_optimizer(first[1])
        offload_module(second[0])
        offload_optimizer(second[1])
        with Checkpointer(tmp_path, mesh) as checkpointer:
            checkpointer.save(2, {"actor": first[0]}, {"actor": first[1]}, {})
            path = checkpointer.latest()
            assert path is not None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            checkpointer.load(path, {"actor": second[0]}, {"actor": second[1]})
        assert torch.cuda.memory_allocated() == before  # moments are made where they rest
        largest = max(p.numel() for p in second[0].parameters()) * 4
        assert torch.cuda.max_memory_allocated() <= before + largest + 512
        state = [t for states in second[1].state.values() for t in states.values()]
        assert state and all(t.device == CPU for t in state)
        for resting in (first, second):
            reload_module(resting[0], device)
            reload_optimizer(resting[1], device)
        _assert_same(_values(second), _values(first))
        assert {t.device for t in _values(second).values()} == {device}  # fused counters too
        for resumed in (first, second):
            _train(resumed, 2, 2)
        for name, value in _values(first).items():
            torch.testing.assert_close(_values(second)[name], value)
        with Checkpointer(tmp_path, mesh) as checkpointer:
            checkpointer.save(4, {"actor": second[0]}, {"actor": second[1]}, {})
            buffers = checkpointer._staging._buffers
            assert all(buffer.is_pinned() for buffer in buffers.values())  # in one block of it
            assert len({buffer.untyped_storage().data_ptr() for buffer in buffers.values()}) < 6
            saved = _values(second)
            _train(second, 4, 1)  # the save in flight must not see it
            path = checkpointer.latest()
            assert path is not None
            checkpointer.load(path, {"actor": first[0]}, {"actor": first[1]})
        _assert_same(_values(first), saved)
