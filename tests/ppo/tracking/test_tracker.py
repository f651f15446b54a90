"""What is in the run folder already, and a disk that is full, end no training."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppo.tracking.tracker import Tracker


@contextmanager
def tracker_of(folder: Path, *loggers: str) -> Iterator[Tracker]:
    with Tracker(folder, enabled=True, loggers=loggers) as tracker:
        yield tracker


def leave(folder: Path, *rows: bytes) -> None:
    """Steps 1 to 3 of an earlier start, with other rows between them."""
    steps = [json.dumps({"step": step}).encode() for step in (1, 2, 3)]
    (folder / "samples").mkdir()
    (folder / "metrics.jsonl").write_bytes(
        b"".join(r + b"\n" for r in [steps[0], *rows, *steps[1:]])
    )
    for step in (1, 2, 3):
        (folder / "samples" / f"train_{step:08d}.jsonl").write_text("{}\n")


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "row",
    [b'{"loss": 1}', b"null", b"7", b"[]", b"\x80\xff\x00", b'{"step": "2"}', b'{"step": 1.5}',
     b'{"step": true}', b'{"step": null}', b"[" * 100_000, b"not json", b""],
)  # fmt: skip
def test_a_row_that_is_no_step_is_named_left_out_and_kept_elsewhere(tmp_path, caplog, row) -> None:
    leave(tmp_path, row)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.truncate(2)
        tracker.log(3, {})
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert "row 2 is no step of a run" in caplog.text
    assert (tmp_path / "old1" / "metrics.jsonl").read_bytes() == whole


def test_what_a_resume_still_does_of_a_step_is_added_to_its_row(tmp_path) -> None:
    leave(tmp_path)
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.truncate(2)
        tracker.log(2, {"val": 0.5, "step_s": float("nan")})
        tracker.log(3, {"loss": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2, "val": 0.5, "step_s": None}, {"step": 3, "loss": 1.0}]


def test_a_row_that_a_crash_has_cut_off_is_no_news(tmp_path, caplog) -> None:
    leave(tmp_path)
    for end, steps in ((b'{"step": 3, "lo', [1, 2]), (b'{"step": 3}', [1, 2, 3])):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + end)
        with tracker_of(tmp_path, "jsonl") as tracker:
            tracker.truncate(3)
            tracker.log(4, {})
        assert steps_of(tmp_path / "metrics.jsonl") == [*steps, 4]
    assert not caplog.records and not (tmp_path / "old1").exists()


def test_files_of_other_hands_among_the_samples_stay(tmp_path) -> None:
    leave(tmp_path)
    others = [tmp_path / "samples" / n for n in ("my_notes.jsonl", "train_9.jsonl", "val_x.jsonl")]
    for path in others:
        path.write_text("mine")
    folder = tmp_path / "samples" / "val_00000009.jsonl"
    folder.mkdir()
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.truncate(1)
    assert all(path.read_text() == "mine" for path in others) and folder.is_dir()
    assert sorted(p.name for p in (tmp_path / "samples").glob("train_0*")) == [
        "train_00000001.jsonl"
    ]


def test_what_a_run_that_goes_back_forgets_is_set_aside(tmp_path, caplog) -> None:
    leave(tmp_path)
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.truncate(1, keep=True)
    assert steps_of(tmp_path / "metrics.jsonl") == [1]
    assert steps_of(tmp_path / "old1" / "metrics.jsonl") == [1, 2, 3]
    kept = sorted(path.name for path in (tmp_path / "old1" / "samples").iterdir())
    assert kept == ["train_00000002.jsonl", "train_00000003.jsonl"]
    assert "after step 1: now in" in caplog.text
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.truncate(1, keep=True)  # nothing more to forget
    assert not (tmp_path / "old2").exists()


def test_a_run_without_metrics_jsonl_goes_back_too(tmp_path) -> None:
    leave(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with tracker_of(tmp_path, "console") as tracker:
        tracker.truncate(1, keep=True)
    kept = sorted(path.name for path in (tmp_path / "old1" / "samples").iterdir())
    assert kept == ["train_00000002.jsonl", "train_00000003.jsonl"]


def test_half_a_surrogate_pair_in_a_sample_costs_nothing(tmp_path) -> None:
    sample = {"prompt": "p", "response": "half \ud83d", "ground_truth": "é", "score": 1.0}
    with tracker_of(tmp_path, "tensorboard") as tracker:
        tracker.samples(1, [sample, {"prompt": "é"}], split="train", num_text=1)
    lines = (tmp_path / "samples" / "train_00000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == sample and lines[1] == '{"prompt": "é"}'


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """What the kernel does to a file that outgrows its disk, here by the length of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # tensorboard's
def test_rows_wait_for_room_on_the_disk_and_half_a_row_is_never_left(tmp_path, caplog) -> None:
    text = "x" * 300
    with tracker_of(tmp_path, "jsonl", "tensorboard") as tracker:
        tracker.log(1, {"loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with files_no_longer_than(size + 10):
            for step in (2, 3):
                tracker.log(step, {"loss": 1.0})
                tracker.samples(step, [{"response": text}], split="val", num_text=1)
                tracker.histogram(step, "length", [1.0])
            assert steps_of(tmp_path / "metrics.jsonl") == [1]
        tracker.log(4, {"loss": 1.0})
        tracker.samples(4, [{"response": text}], split="val", num_text=1)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert os.listdir(tmp_path / "samples") == ["val_00000004.jsonl"]
    said = [record.getMessage() for record in caplog.records]
    assert [sum(f"/{name} cannot be written" in text for text in said)
            for name in ("metrics.jsonl", "samples", "tensorboard")] == [1, 1, 1]  # fmt: skip


def test_rows_that_never_found_room_are_said_at_the_end(tmp_path, caplog) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    (tmp_path / "metrics.jsonl").mkdir()
    with tracker_of(tmp_path, "jsonl") as tracker:
        tracker.log(1, {})
        tracker.log(2, {})
        tracker.samples(1, [{"response": ""}], split="val", num_text=0)
    assert "lacks the last 2 rows" in caplog.text and "samples cannot be written" in caplog.text
