"""ppo_tiny in float32 on the device and on the CPU: the same numbers, as far as kernels agree."""

from collections.abc import Iterator

import torch

import train_ppo
from ppo.config import load_config
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.gpu.parts import Options, Row
from tests.test_train import BASE, COMPARED, rows_of

TOLERANCE = 2e-3
"""of a metric of the first iteration, relative to the larger of it and 0.01: two optimizer steps"""


def compare_devices(options: Options) -> Iterator[Row]:
    """One row an iteration: the metric that differs most. Then one in bfloat16, as by default."""
    steps = options.pick(3, 1)
    with init_distributed(options.device):
        rows = []
        for name, device in (("cpu", torch.device("cpu")), ("device", options.device)):
            # a trial has one device: other micro-batches, so that there is something to compare
            other = ("actor.ppo_max_token_len_per_gpu=64",) if options.dry and rows else ()
            rows.append(_run(options, name, device, steps, other))
        for one, other in zip(*rows, strict=True):
            apart = {
                name: abs(one[name] - other[name]) / max(abs(one[name]), 1e-2) for name in COMPARED
            }
            worst = max(apart, key=lambda name: apart[name])
            row: Row = {"iteration": one["step"], "worst": worst, "difference": apart[worst]}
            yield row
            if one["step"] == 1 and apart[worst] > TOLERANCE:
                raise AssertionError(f"the first iteration differs: {apart}")
        half = ("actor.fsdp.mixed_precision.param_dtype=bfloat16", "rollout.dtype=bfloat16")
        if not options.dry:
            [last] = _run(options, "bfloat16", options.device, 1, half)
            yield {
                "iteration": 1,
                "worst": "bfloat16: actor/ppo_kl_k3",
                "difference": last["actor/ppo_kl_k3"],
            }


def _run(
    options: Options, name: str, device: torch.device, steps: int, more: tuple[str, ...]
) -> list[Row]:
    folder = options.folder / f"agreement_{name}"
    quick = (
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=2",
        "reward.num_workers=1",
        "data.train_max_samples=8",
    )
    config = load_config(
        "ppo_tiny.yaml",
        [
            *BASE,
            *(quick if options.dry else ()),
            *("data.val_files=[]", "trainer.save_freq=-1", "trainer.logger=[jsonl]"),
            *("model.verify_forward=false", "data.max_response_length=24"),
            f"trainer.device={device.type}",
            f"trainer.default_local_dir={folder}",
            f"trainer.total_training_steps={steps}",
            *more,
        ],
    )
    with Run(config, build_mesh(config.dims(1, 1), device), command=["tests.gpu"]) as run:
        train_ppo.train(config, run)
    return rows_of(folder)
