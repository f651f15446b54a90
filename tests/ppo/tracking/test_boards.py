"""Trackers that fail, hang or end the process cost the training nothing; real ones, offline."""

import importlib
import json
import math
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ppo.config import PACKAGES_OF_LOGGERS
from ppo.errors import StopRequested
from ppo.tracking import board, tracker
from ppo.tracking.board import About, Background
from ppo.tracking.tracker import Tracker

SAMPLE = {"prompt": "p \ud83d", "response": "<b>", "score": 1.0, "ground_truth": 4}


class Recording:
    """A board that remembers; `fault` happens at every log."""

    seen: list[Any]

    def __init__(self, about: About, fault: BaseException | None = None) -> None:
        self.run_id = about.run_id or f"id{len(self.seen)}"
        self.fault = fault
        self.seen.append(("open", self.run_id))

    def log(self, step, values) -> None:
        self.seen.append((step, dict(values)))
        if self.fault:
            raise self.fault

    def samples(self, step, split, rows) -> None:
        self.seen.append((step, split, len(rows)))

    def histogram(self, step, name, bins) -> None:
        self.seen.append((step, name, bins.counts[-1], len(bins.edges)))

    def close(self, *, failed: bool) -> None:
        self.seen.append(("close", failed))


@pytest.fixture
def recording(monkeypatch) -> type[Recording]:
    class Fresh(Recording):
        seen: list[Any] = []  # noqa: RUF012

    monkeypatch.setitem(tracker.TRACKERS, "wandb", Fresh)
    return Fresh


def write(folder: Path, *, after: int | None, steps: list[int], keep: bool = False) -> None:
    with Tracker(folder, enabled=True, loggers=["jsonl", "wandb"]) as writer:
        writer.truncate(after, keep=keep)
        for step in steps:
            writer.log(step, {"loss": float(step), "bad": math.nan})


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_every_tracker_of_the_configuration_is_there() -> None:
    assert tuple(tracker.TRACKERS) == PACKAGES_OF_LOGGERS


def test_a_tracker_gets_everything_under_the_same_names(tmp_path, recording) -> None:
    with Tracker(tmp_path, enabled=True, loggers=["wandb"]) as writer:
        writer.truncate(None)
        writer.samples(1, [SAMPLE, SAMPLE], split="val-x", num_text=1)
        writer.log(1, {"val-core/x/reward/mean@1": 0.5, "bad": math.inf})
        writer.histogram(1, "score", [0.0, 1.0, math.nan])
    assert recording.seen == [
        ("open", "id0"),
        (1, "val-x", 1),
        (1, {"val-core/x/reward/mean@1": 0.5}),
        (1, "score", 1, 33),
        ("close", False),
    ]


def test_a_resume_goes_on_with_the_trackers_run_and_another_run_begins_one(tmp_path, recording):
    def opened() -> list[str]:
        return [entry[1] for entry in recording.seen if entry[0] == "open"]

    write(tmp_path, after=None, steps=[1, 2])
    write(tmp_path, after=1, steps=[2])
    assert opened() == ["id0", "id0"]
    write(tmp_path, after=1, steps=[2], keep=True)  # goes back to a checkpoint
    write(tmp_path, after=None, steps=[1])
    assert len(set(opened())) == 3
    with pytest.raises(KeyError), Tracker(tmp_path, enabled=True, loggers=["wandb"]) as writer:
        writer.log(2, {})
        raise KeyError
    assert recording.seen[-1] == ("close", True)


def test_a_run_that_is_stopped_has_not_failed(tmp_path, recording) -> None:
    for error, failed in ((StopRequested("STOP file"), False), (ValueError("rank 0"), True)):
        tracker = Tracker(tmp_path, enabled=True, loggers=["wandb"], good_ends=(StopRequested,))
        with suppress(type(error)), tracker as writer:
            writer.log(1, {"loss": 1.0})
            raise error
        assert recording.seen[-1] == ("close", failed)


@pytest.mark.parametrize("fault", [ValueError("no network"), SystemExit(1), OSError("disk")])
def test_a_tracker_that_fails_is_said_once_and_tried_again(
    tmp_path, recording, monkeypatch, caplog, fault
) -> None:
    monkeypatch.setitem(tracker.TRACKERS, "wandb", lambda about: recording(about, fault))
    write(tmp_path, after=None, steps=[1, 2, 3])
    assert steps_of(tmp_path) == [1, 2, 3]
    assert [entry[0] for entry in recording.seen] == ["open", 1, 2, 3, "close"]
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("trainer.logger: wandb failed (said once") and str(fault) in said


def test_a_tracker_that_cannot_be_started_is_said_once(
    tmp_path, recording, monkeypatch, caplog
) -> None:
    def refuse(about: About) -> Recording:
        raise RuntimeError("no api key")

    monkeypatch.setitem(tracker.TRACKERS, "wandb", refuse)
    write(tmp_path, after=None, steps=[1, 2])
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "wandb could not be started, and gets nothing: RuntimeError: no api key" in said
    assert steps_of(tmp_path) == [1, 2] and not (tmp_path / "trackers").exists()


def test_a_tracker_that_hangs_holds_nobody(tmp_path, recording, monkeypatch, caplog) -> None:
    monkeypatch.setattr(board, "CLOSE_S", 0.2)
    monkeypatch.setattr(board, "MOST_WAITING", 2)
    released = threading.Event()

    def hang(about: About) -> Recording:
        released.wait(30)
        return recording(about)

    monkeypatch.setitem(tracker.TRACKERS, "wandb", hang)
    write(tmp_path, after=None, steps=list(range(1, 9)))
    released.set()
    assert steps_of(tmp_path) == list(range(1, 9))
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "wandb is too slow: it does not get everything" in said


def test_tensorboard_has_the_configuration_and_a_layout(tmp_path) -> None:
    about = About(tmp_path, "project", "name", config={"actor.optim.lr": 1e-6})
    with Tracker(tmp_path, enabled=True, loggers=["tensorboard"], about=about) as writer:
        writer.truncate(None)
        writer.log(1, {"critic/score/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()["tensors"]
    assert "config/text_summary" in tags
    (layout,) = events.Tensors("custom_scalars__config__")
    text = layout.tensor_proto.string_val[0]
    assert b"critic/score/mean" in text and b"val-core/.*/mean@" in text


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_the_real_package_works_offline_and_over_a_resume(
    tmp_path, monkeypatch, caplog, name
) -> None:
    pytest.importorskip(name)
    for variable, value in (
        *(("WANDB_MODE", "offline"), ("SWANLAB_MODE", "offline"), ("WANDB_SILENT", "true")),
        *(("TRACKIO_DIR", str(tmp_path / "db")), ("MLFLOW_TRACKING_URI", "")),
    ):
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    about = About(tmp_path, "project", "name", config={"a.lr": 1e-6, "b": [1], "c": None})
    ids = set()
    for after, steps in ((None, [1, 2]), (1, [2, 3])):
        with Tracker(tmp_path, enabled=True, loggers=[name], about=about) as writer:
            writer.truncate(after)
            for step in steps:
                writer.samples(step, [SAMPLE], split="val", num_text=1)
                writer.log(step, {"val-core/x/reward/mean@1": step / 2, "bad": math.nan})
                writer.histogram(step, "score", [0.0, 1.0])
        ids.add((tmp_path / "trackers" / name).read_text().strip())
    assert len(ids) == 1 and not [r for r in caplog.records if r.name.startswith("ppo.")]
    if name == "mlflow":
        history = (
            importlib.import_module("mlflow")
            .MlflowClient()
            .get_metric_history(ids.pop(), "val-core/x/reward/mean_1")
        )
        assert {(m.step, m.value) for m in history} == {(1, 0.5), (2, 1.0), (3, 1.5)}
    if name == "trackio":
        rows = importlib.import_module("trackio").Api().runs("project")
        assert [run.name for run in rows] == [*ids]
    if name in ("wandb", "swanlab"):
        assert list((tmp_path / name).iterdir())


def test_what_a_board_raises_when_it_closes_is_said(caplog) -> None:
    class Closing(Recording):
        seen: list[Any] = []  # noqa: RUF012

        def close(self, *, failed: bool) -> None:
            raise ConnectionError("gone")

    kept: list[str] = []
    background = Background("x", lambda: Closing(About(Path(), "p", "e")), kept.append)
    background.close(failed=False)
    assert "ConnectionError: gone" in caplog.text and kept == ["id0"]
