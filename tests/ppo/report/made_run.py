"""A run folder as a long run leaves it, made up: for the report's test and its benchmark."""

import json
import math
import random
from pathlib import Path

from ppo.tracking.tracker import counted

PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
SPREADS = ("critic/rewards", "critic/advantages", "critic/returns", "critic/values")
HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(2)"> & \x1b[31m \ud83d'


def make_run(
    folder: Path, *, steps: int, num_extra: int = 40, num_tokens: int = 64, seed: int = 0
) -> Path:
    """Write metrics, histograms, samples, configuration and status of so many steps.

    num_extra: metrics besides the usual ones. num_tokens: of a logged sample.
    """
    rng = random.Random(seed)
    (folder / "samples").mkdir(parents=True)
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "histograms.jsonl").open("w") as histograms,
    ):
        for step in range(1, steps + 1):
            metrics.write(json.dumps(_row(step, steps, num_extra, rng)) + "\n")
            for name, scale in (("score", 1.0), ("response_length", 900.0)):
                values = [scale * rng.betavariate(1 + 3 * step / steps, 2) for _ in range(64)]
                bins = counted(values)
                row = {"step": step, "name": name, "low": bins.low, "high": bins.high}
                histograms.write(json.dumps(row | {"counts": bins.counts}) + "\n")
            _write_samples(folder / "samples" / f"train_{step:08d}.jsonl", 4, num_tokens, rng)
            if step % 100 == 0 or step == steps:
                _write_samples(folder / "samples" / f"val_{step:08d}.jsonl", 64, 0, rng)
        metrics.write('{"step": 999999, "actor/gr')  # a live run is about to write it
    status = {"state": "running", "step": steps, "reason": "", "alarms": {"ref_kl": "0.2 > 0.1"}}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text(
        f"trainer:\n  total_training_steps: {steps}\n  seed: {seed}\nactor:\n  shuffle: false\n"
    )
    start = {"time": "2026-11-30T10:00:00", "command": "train_ppo.py --config <b>", "world_size": 8}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def _row(step: int, steps: int, num_extra: int, rng: random.Random) -> dict:
    done, noise = step / steps, lambda scale: rng.gauss(0, scale)
    row: dict = {
        "step": step,
        "critic/score/mean": 0.8 * (1 - math.exp(-4 * done)) + noise(0.03),
        "actor/ref_kl": 0.1 * done + abs(noise(0.005)),
        "actor/ppo_kl_k3": 0.002 + abs(noise(0.0005)),
        "actor/ppo_kl": 0.002 + noise(0.0005),
        "actor/kl_coef": 0.01 * (1 + (step > steps // 2)),
        "actor/entropy": 1.2 - 0.7 * done + noise(0.01),
        "actor/grad_norm": 1e6 if step == steps // 3 else 1 + abs(noise(0.3)),
        "actor/pg_clipfrac": 0.1 + noise(0.01),
        "actor/pg_clipfrac_lower": 0.001,
        "critic/vf_clipfrac": 0.05 + noise(0.01),
        "critic/vf_explained_var": done - 0.2 + noise(0.05),
        "response_length/mean": 200 + 300 * done + noise(10),
        "response_length/max": 1024.0,
        "response_length/clip_ratio": 0.05 + 0.1 * done,
        "reward/failed": float(step in (7, 8, 9)),
        "guard/lr_factor": 0.5 if step > steps // 2 else 1.0,
        "guard/skip_update": float(step == steps // 3),
        "critic/vf_loss": None if step == steps // 4 else 0.1,
        "perf/throughput": 5000 + noise(100),
    }
    for phase in PHASES:
        row[f"timing_s/{phase}"] = (8.0 if phase == "gen" else 2.0) + abs(noise(0.2))
        row[f"memory_gib/{phase}"] = 40 + 20 * (phase == "update_actor") + noise(0.1)
    row["timing_s/reshard"] = 0.4
    row["timing_s/step"] = sum(row[f"timing_s/{phase}"] for phase in PHASES) + 0.5
    for name in SPREADS:
        row |= {f"{name}/mean": noise(1), f"{name}/max": 3.0, f"{name}/min": -3.0}
    if step % 10 == 0:
        for source in ("gsm8k", "math", "<b>odd</b>"):
            row[f"val-core/{source}/reward/mean@4"] = 0.7 * done + noise(0.01)
            row |= {f"val-core/{source}/pass@{k}": 0.8 * done + 0.05 * k for k in (1, 2, 4)}
    return row | {f"extra/metric_{i}": noise(1) for i in range(num_extra)}


def _write_samples(path: Path, number: int, num_tokens: int, rng: random.Random) -> None:
    rows = []
    for index in range(number):
        words = [rng.choice(("so ", "we ", "add ", "12 ", "= ", "\n")) for _ in range(num_tokens)]
        row = {
            "prompt": [{"role": "user", "content": f"question {index} {HOSTILE} " + "why? " * 40}],
            "response": "".join(words) + HOSTILE if words else "answer " * 60,
            "score": None if index == 3 else rng.choice((0.0, 1.0, 0.5)),
            "components": {"function": 1.0, "extra/format": 0.5},
            "failure": "error: Traceback\nValueError: <i>" if index == 3 else None,
            "data_source": "gsm8k",
            "ground_truth": "42",
            "finish_reason": "stop",
            "response_length": num_tokens,
            "where": "data/train.parquet, row 3",
        }
        if num_tokens:
            row["tokens"] = {
                "text": [*words[:-1], HOSTILE],
                "kl": [round(rng.gauss(0, 0.1), 4) for _ in words],
                "advantage": [round(rng.gauss(0, 1), 4) for _ in words],
            }
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
