"""Metrics over ranks, FLOPs worked out by hand, and what the tracker leaves in its files."""

import json
import logging
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo.metrics import Metrics, timing_shares
from ppo.models.flops import ModelSize, batch_flops, flops_per_token, peak_tflops, utilisation
from ppo.run.progress import progress_bar
from ppo.tracking.tracker import Tracker, console_line
from tests.distributed import run_distributed

LOSSES = [[1.0, 2.0, 3.0], [10.0]]  # token losses of two ranks


def _fill(metrics: Metrics, losses: list[float]) -> None:
    for loss in losses:  # one micro-batch each
        metrics.add("actor/pg_loss", torch.tensor(loss, requires_grad=True), 1)
        metrics.maximum("largest", torch.tensor(loss))


def _reduced(rank: int, _world_size: int) -> dict[str, float]:
    metrics = Metrics(torch.device("cpu"))
    _fill(metrics, LOSSES[rank])
    metrics.add("empty", 0.0, 0)
    metrics.set("actor/lr", 1e-6)
    if rank == 1:
        metrics.add("only here", torch.tensor(6.0), torch.tensor(4))
        metrics.maximum("not finite", math.nan)
    else:
        metrics.maximum("not finite", 1.0)
    with metrics.timed("gen"):
        time.sleep(0.05 if rank == 0 else 0.3)
    with metrics.timed("gen"):
        pass
    return metrics.reduce(torch.distributed.group.WORLD)


@pytest.mark.distributed
def test_ranks_with_uneven_counts_reduce_to_the_mean_over_tokens() -> None:
    first, second = run_distributed(_reduced, 2)
    assert repr(first) == repr(second)  # repr: NaN is not equal to itself
    assert first["actor/pg_loss"] == 4.0  # 16 / 4, not the mean of means 6
    assert first["largest"] == 10.0
    assert first["only here"] == 1.5
    assert first["actor/lr"] == 1e-6
    assert math.isnan(first["not finite"])
    assert "empty" not in first
    assert 0.3 <= first["timing_s/gen"] < 5


def test_one_process_gives_what_two_ranks_give() -> None:
    metrics = Metrics()
    _fill(metrics, [loss for part in LOSSES for loss in part])
    assert metrics.reduce() == {"actor/pg_loss": 4.0, "largest": 10.0}


def test_many_tokens_do_not_drown_the_next() -> None:
    metrics = Metrics()
    metrics.add("x", torch.tensor(2.0**24), 1)  # float32 could not hold 2^24 + 1
    metrics.add("x", torch.tensor(1.0), 0)
    assert metrics.reduce()["x"] == 2.0**24 + 1


def test_shares_are_of_the_step() -> None:
    times = {"timing_s/step": 40.0, "timing_s/gen": 30.0, "timing_s/reshard": 1.0}
    assert timing_shares(times) == {"timing_share/gen": 0.75, "timing_share/reshard": 0.025}
    assert timing_shares({"timing_s/gen": 1.0}) == {}


SIZE = ModelSize(num_params=1000, num_layers=2, num_heads=4, head_dim=8)


def test_flops_by_hand() -> None:
    # attention: 12 * 2 layers * 8 * 4 heads * 10 tokens / 2 = 3840
    assert flops_per_token(SIZE, 10) == 6000 + 3840
    # lengths 1 and 3: 4 tokens * 6000 + 384 * (1 + 9)
    assert batch_flops(SIZE, [1, 3], num_scored=3, epochs=2) == 2 * (24000 + 3840)
    # the head of 500 parameters for 3 scored tokens
    with_head = replace(SIZE, head_params=500)
    assert batch_flops(with_head, [1, 3], num_scored=3) == 24000 + 3840 + 9000


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peak_rates_are_found_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_utilisation_is_mfu_or_a_rate_where_the_peak_is_unknown() -> None:
    known = utilisation("actor", 8 * 312e12, seconds=2, num_devices=8, device_name="NVIDIA A100")
    assert known == {"perf/mfu/actor": pytest.approx(0.5)}
    unknown = utilisation("critic", 4e12, seconds=2, num_devices=2, device_name="cpu")
    assert unknown == {"perf/tflops/critic": pytest.approx(1.0)}
    assert utilisation("critic", 4e12, seconds=0, num_devices=2, device_name="cpu") == {}


def test_the_console_line_reads_as_documented() -> None:
    values = {
        "critic/score/mean": 0.61,
        "actor/ref_kl": 0.042,
        "actor/pg_clipfrac": 0.11,
        "response_length/mean": 212.4,
        "timing_s/step": 48.1,
        "timing_s/gen": 29.0,
        "timing_s/reshard": 0.8,
        "perf/throughput": 3100.0,
        "perf/max_memory_allocated_gb": 61.2,
        "val-core/gsm8k/reward/mean@1": 0.5,
    }
    assert console_line(12, values) == (
        "step 12 | reward 0.610 | kl 0.0420 | clip 0.110 | len 212 | "
        "val gsm8k/reward/mean@1 0.500 | 48.1s (gen 29.0 reshard 0.8) | "
        "3.1k tok/s/gpu | 61.2 GiB"
    )
    assert console_line(3, {"perf/throughput": 80.0}) == "step 3 | 80 tok/s/gpu"


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _log(folder: Path, *, after: int, steps: list[int], note: float) -> None:
    with Tracker(folder, enabled=True, loggers=["console", "jsonl", "tensorboard"]) as tracker:
        tracker.truncate(after)
        for step in steps:
            tracker.log(step, {"loss": note + step, "bad": math.nan})
            sample = {"prompt": "2 + 2", "response": "4\n<b>", "score": 1.0}
            tracker.samples(step, [sample, sample], split="train", num_text=1)
            tracker.histogram(step, "response_length", [1, 2, math.inf])
            tracker.histogram(step, "beyond the last bin", [-1e30, 1e30])


def test_a_resume_cuts_the_rows_after_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ppo.tracking"):
        _log(tmp_path, after=-1, steps=[0, 1, 2, 3], note=0.0)
    assert [record.getMessage() for record in caplog.records][-1] == "step 3"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    time.sleep(1.1)  # event files of one second have no order: their names end with a counter
    _log(tmp_path, after=2, steps=[3], note=100.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0),
    ]  # fmt: skip
    assert rows(tmp_path)[0]["bad"] is None  # valid JSON
    names = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert names == [f"train_{step:08d}.jsonl" for step in range(4)]
    sample = json.loads((tmp_path / "samples" / names[0]).read_text().splitlines()[1])
    assert sample == {"prompt": "2 + 2", "response": "4\n<b>", "score": 1.0}

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0)]
    assert events.Tags()["histograms"] == ["response_length"]
    assert "samples/train/text_summary" in events.Tags()["tensors"]


def test_a_fresh_start_forgets_everything(tmp_path: Path) -> None:
    _log(tmp_path, after=-1, steps=[0, 1], note=0.0)
    _log(tmp_path, after=-1, steps=[0], note=50.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(0, 50.0)]
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path, enabled=False, loggers=["console", "jsonl", "tensorboard"]) as tracker:
        tracker.truncate(-1)
        tracker.log(1, {"loss": 1.0})
        tracker.samples(1, [{"prompt": "p"}], split="val", num_text=1)
        tracker.histogram(1, "x", [1.0])
    assert list(tmp_path.iterdir()) == []


def test_the_progress_bar_shows_on_a_terminal_only(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for enabled, terminal in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        with progress_bar("gen", enabled=enabled) as bar:
            bar.update(0.5)
        assert ("gen" in capsys.readouterr().err) == (enabled and terminal)


@pytest.mark.gpu
def test_each_block_reports_the_peak_of_device_memory_and_an_outer_one_that_of_its_inner_ones():
    device = torch.device("cuda")
    metrics, mib = Metrics(device), 2**20
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    with metrics.timed("outer"):
        del_me = torch.empty(64 * mib, dtype=torch.uint8, device=device)
        del del_me
        with metrics.timed("inner"):
            held = torch.empty(32 * mib, dtype=torch.uint8, device=device)
        del held
        with metrics.timed("last"):
            pass
    values = metrics.reduce()
    assert values["memory_gib/outer"] * 1024 == pytest.approx(base / mib + 64, abs=1)
    assert values["memory_gib/inner"] * 1024 == pytest.approx(base / mib + 32, abs=1)
    assert values["memory_gib/last"] * 1024 == pytest.approx(base / mib, abs=1)
