"""Files alone: which checkpoint is the newest whatever happened, and what is never believed."""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from sharding.checkpoint import folder as folders
from sharding.checkpoint.damage import bound_train_state, find_damage
from sharding.checkpoint.files import (
    CheckpointError,
    FileRecord,
    read_manifest,
    record_files,
    write_durably,
)
from sharding.checkpoint.folder import find_checkpoint, list_checkpoints
from sharding.checkpoint.storage import SafeReader


@pytest.fixture(scope="module", autouse=True)
def no_power_failure() -> Iterator[None]:
    """Hundreds of saves of a few bytes: not a second of them for the disk."""
    with patch.object(os, "fsync"):
        yield


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch writes for one tensor."""
    folder = tmp_path_factory.mktemp("written") / "tensors"
    save({"model.actor.w": torch.arange(3.0)}, checkpoint_id=folder, no_dist=True)
    return folder


def write(
    tensors: Path, folder: Path, step: int, *, best_by: str | None = None, **state: Any
) -> Path:
    """A save of one rank, step by step as the writer does it."""
    beside = folder / f"step_{step:08d}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    folders.remove_leftovers(folder)
    shutil.copytree(tensors, beside / "tensors")
    files = record_files(beside / "tensors", beside)
    train_state = {"step": step, "world_size": 1, "optimizers": {}, "state": state}
    content = bound_train_state(train_state, files)
    files["train_state.json"] = write_durably(beside / "train_state.json", content)
    metric = state.get("metric")
    path = folders.publish(
        beside, folder, step=step, files=files, metric=metric, metric_name=best_by
    )
    folders.point_latest_to(path)
    folders.prune(folder, max_to_keep=state.get("max_to_keep", 2), best_by=best_by)
    return path


class _Killed(BaseException):
    pass


@contextmanager
def killed_at(call: int) -> Iterator[None]:
    """The process ends before its `call`-th change of the file system; 0 = never."""
    counted = SimpleNamespace(left=call)

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            counted.left -= 1
            if counted.left == 0:
                raise _Killed
            return original(*args, **kwargs)

        return change

    with (
        patch.object(os, "rename", counting(os.rename)),
        patch.object(os, "replace", counting(os.replace)),
        patch.object(os, "unlink", counting(os.unlink)),
        patch.object(os, "rmdir", counting(os.rmdir)),
    ):
        try:
            yield
        except _Killed:
            return


events = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 6), st.integers(0, 30)),
    st.tuples(st.just("go back"), st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.just("copy"), st.integers(0, 3), st.integers(1, 6)),
)


@settings(max_examples=60, deadline=None)
@given(
    story=st.lists(events, min_size=1, max_size=8),
    clocks=st.lists(st.floats(0, 1e12), min_size=8, max_size=8),
    metrics=st.lists(st.none() | st.just(float("nan")) | st.floats(0, 1), min_size=8, max_size=8),
    max_to_keep=st.none() | st.integers(1, 3),
    best_by=st.none() | st.just("reward"),
)
def test_the_newest_complete_checkpoint_survives_and_is_what_latest_and_a_resume_name(
    tensors, story, clocks, metrics, max_to_keep, best_by
):
    """Saves of any step under any clock, killed anywhere; runs that go back; copies by people."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        run = Path(name)
        folder, newest, copies = run / "checkpoints", None, set()
        for number, (kind, which, moment) in enumerate(story):
            clock, metric = clocks[number], metrics[number]
            there = list_checkpoints(folder)
            if kind == "save":
                state = {"number": number, "metric": metric, "max_to_keep": max_to_keep}
                with killed_at(moment), patch("time.time", lambda clock=clock: clock):
                    write(tensors, folder, which, best_by=best_by, **state)
                path = folder / f"step_{which:08d}"
                if path.is_dir() and state_of(path) == number:  # the renaming was reached
                    newest = number
            elif kind == "go back" and there:
                path = there[which % len(there)]
                with killed_at(moment):
                    folders.make_newest(path)
                if list_checkpoints(folder)[0] == path:
                    newest = state_of(path)
            elif kind == "copy" and there:
                copy = folder / f"step_keep_{number}"
                shutil.copytree(there[which % len(there)], copy)
                copies.add(copy)
            if newest is not None:
                found = find_checkpoint(run)
                assert found == list_checkpoints(folder)[0]
                assert state_of(found) == newest
                if kind != "copy" and moment == 0:  # a whole save, or a whole going back
                    assert (folder / "latest").read_text() == f"{found.name}\n"
            assert all(find_damage(copy) is None for copy in copies)


def state_of(path: Path) -> int:
    return json.loads((path / "train_state.json").read_text())["state"]["number"]


def test_a_clock_that_was_ahead_hides_no_checkpoint_and_costs_none(tensors, tmp_path):
    """Manifests of an earlier version, an hour ahead: what is written now is newer all the same."""
    for step in (1, 2):
        path = write(tensors, tmp_path, step)
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["sequence"], manifest["metric_name"]
        manifest["saved_at"] += 3600 + step
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000001"]
    write(tensors, tmp_path, 3)
    write(tensors, tmp_path, 1)  # the run went back to the start
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000003"]
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def test_the_best_is_kept_by_its_metric_and_not_by_another(tensors, tmp_path):
    for step, best_by, metric in (
        *((1, "reward", 0.5), (2, "reward", 0.4), (3, "reward", float("nan"))),
        *((4, "reward", None), (5, "reward", 0.1)),
    ):
        write(tensors, tmp_path, step, best_by=best_by, metric=metric, max_to_keep=1)
    assert sorted(p.name[-1] for p in list_checkpoints(tmp_path)) == ["1", "5"]
    write(tensors, tmp_path, 6, best_by="-loss", metric=-3.0, max_to_keep=1)
    assert sorted(p.name[-1] for p in list_checkpoints(tmp_path)) == ["6"]


def test_what_people_put_beside_the_checkpoints_is_left_alone(tensors, tmp_path, caplog):
    write(tensors, tmp_path, 1)
    for name in ("step_keep", "step_00000001_good", "step_1", "step_00000001.bak"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    (tmp_path / "step_notes.tmp").write_text("mine")
    (tmp_path / "step_00000003").write_text("a note under the name of a step")
    (tmp_path / "step_00000004").symlink_to(tmp_path / "gone")
    (tmp_path / "step_00000002.tmp").write_text("a leftover that is a file")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    before = {p for p in tmp_path.iterdir() if p.name not in ("step_00000002.tmp", "latest")}
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009")  # says that it is 1
    for step in (2, 3, 4):
        write(tensors, tmp_path, step)
    assert "latest does not name step_00000002" in caplog.text
    assert "step_00000003 is not the checkpoint that its name says" in caplog.text
    assert (tmp_path / "step_00000003.old1").read_text() == "a note under the name of a step"
    assert (tmp_path / "step_00000004.old1").is_symlink()
    kept = before - {tmp_path / f"step_0000000{n}" for n in (1, 3, 4)}
    assert all(path.exists() for path in kept) and (tmp_path / "step_00000009").is_dir()
    whole = [p for p in list_checkpoints(tmp_path) if find_damage(p) is None]
    assert [p.name for p in whole] == ["step_00000004", "step_00000003"]
    assert "copy under another step's name" in str(find_damage(tmp_path / "step_00000009"))
    assert find_checkpoint(tmp_path / "step_keep") == tmp_path / "step_keep"


def edit_manifest(**changes: Any) -> Callable[[Path], Any]:
    def edit(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest.update(changes)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return edit


def forge(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and what the manifest says about it."""
    (path / name).write_bytes(content)
    files = {k: [*r] for k, r in record_files(path, path).items() if k != "manifest.json"}
    edit_manifest(files=files)(path)


def edit_state(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        state = json.loads((path / "train_state.json").read_text())
        forge(path, "train_state.json", json.dumps({**state, **changes}).encode())

    return edit


def write_index(make: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        index = SafeReader(path / "tensors").read_metadata()
        forge(path, "tensors/.metadata", pickle.dumps(make(index)))

    return edit


def without_tensors(index: Metadata) -> Metadata:
    return Metadata({}, planner_data=None, storage_data={})


def elsewhere(index: Metadata) -> Metadata:
    storage = {key: SimpleNamespace(relative_path="../w") for key in index.storage_data}
    assert all(isinstance(key, MetadataIndex) for key in storage)
    return Metadata(index.state_dict_metadata, storage_data=storage)


def list_only(*names: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        files = read_manifest(path)["files"]
        edit_manifest(files={name: [*files[name]] for name in names})(path)

    return edit


def of_another_step(path: Path) -> None:
    other = path.with_name("step_00000001") / "train_state.json"
    state = json.loads(other.read_text()) | {"step": 2}
    forge(path, "train_state.json", json.dumps(state).encode())


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (list_only("train_state.json"), "does not list tensors/.metadata"),
        (list_only("train_state.json", "tensors/.metadata"), "does not list tensors/__0_0"),
        (list_only("tensors/.metadata", "tensors/__0_0.distcp"), "does not list train_state"),
        (edit_manifest(files={}), "does not list"),
        (edit_manifest(files=[]), "not a complete checkpoint"),
        (edit_manifest(files={"a\0b": [1, 1]}), "file name"),
        (edit_manifest(files={"../../x": [1, 1]}), "file name"),
        (edit_manifest(files={"x": [1, "1"]}), "record of x"),
        (edit_manifest(files={"x": [1]}), "not a complete checkpoint"),
        (edit_manifest(step=1_000_000_000), "under another step's name"),
        (edit_manifest(step="2"), "step = '2'"),
        (edit_manifest(step=True), "step = True"),
        (edit_manifest(sequence=10**30), "sequence = 1000"),
        (edit_manifest(sequence=-1), "sequence = -1"),
        (edit_manifest(metric="0.5"), "metric = '0.5'"),
        (edit_manifest(metric_name=5), "metric_name = 5"),
        (edit_manifest(sequence=0, saved_at="noon"), "not a complete checkpoint"),
        (edit_manifest(sequence=0, saved_at=None), "not a complete checkpoint"),
        (edit_manifest(sequence=0, saved_at=10**400), "not a complete checkpoint"),
        (lambda path: (path / "manifest.json").write_bytes(DEEP), "manifest.json: RecursionError"),
        (lambda path: (path / "manifest.json").write_text("[1]"), "not a complete checkpoint"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "not a complete"),
        (lambda path: forge(path, "train_state.json", DEEP), "train_state.json: RecursionError"),
        (lambda path: forge(path, "train_state.json", b"[]"), "holds a list"),
        (edit_state(step=3), "is of step 3"),
        (edit_state(state={"number": 7}), "other tensors, or changed since"),
        (edit_state(state=[]), "state is a list"),
        (edit_state(optimizers={"actor": [{}]}), "parameter groups"),
        (edit_state(optimizers=None), "parameter groups"),
        (edit_state(world_size=None), "world_size = None"),
        (of_another_step, "other tensors, or changed since"),
        (lambda path: forge(path, "tensors/.metadata", b""), "Ran out of input"),
        (lambda path: forge(path, "tensors/.metadata", b"\x80\x04no"), ".metadata: "),
        (write_index(lambda index: ["no", "index"]), "holds a list"),
        (write_index(lambda index: Metadata(None)), ".metadata: "),  # pyright: ignore
        (write_index(without_tensors), "other tensors, or changed since"),
        (write_index(elsewhere), "does not belong into an index"),
    ],
)
def test_a_changed_checkpoint_is_named_and_the_one_before_is_found(
    tensors, tmp_path, caplog, how, words
):
    for step in (1, 2):
        write(tensors, tmp_path, step, number=step)
    how(tmp_path / "step_00000002")
    damage = find_damage(tmp_path / "step_00000002")
    assert damage is not None and words in damage and "step_00000002" in damage, damage
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000001"
    assert words in caplog.text
    write(tensors, tmp_path, 3)  # the next save is not disturbed
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000003"


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "with\nnewline", "/dev/null", "absent"])
def test_a_path_that_holds_no_checkpoint_is_one_message(path):
    with pytest.raises(CheckpointError):
        find_checkpoint(Path(path))


def test_the_record_of_a_file_is_its_size_and_checksum(tmp_path):
    assert write_durably(tmp_path / "a", b"123456789") == FileRecord(9, 0xCBF43926)
    assert record_files(tmp_path, tmp_path) == {"a": FileRecord(9, 0xCBF43926)}
