"""The README's table of memory: what `--check` predicts per model and number of GPUs.

    python -m tests.memory_table

For each model and cluster the first of some settings that fits: one engine on 1, 2, 4, 8 GPUs, then
the same with the optimizers on the host. configs/ppo.yaml otherwise (PPO with a critic of the
model's size, 512 + 512 tokens) / without critic (GRPO, eight responses).
"""

import argparse
import sys
from collections.abc import Iterator

from ppo.check.fits import fits
from ppo.check.memory_phases import GIB, phases
from ppo.check.preflight import check_shapes, find_models, plan_of
from ppo.check.rules import check_config
from ppo.check.shard_size import sized
from ppo.config import ConfigError, load_config

MODELS = (
    *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"),
    *("Qwen/Qwen3-14B", "Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-72B"),
)
CLUSTERS = ((1, 1, 24), (1, 1, 80), (1, 8, 80), (2, 8, 80), (4, 8, 80), (8, 8, 80))
"""nodes, GPUs of a node, GiB of a GPU"""
OFFLOAD = ("actor.fsdp.optimizer_offload=true", "critic.fsdp.optimizer_offload=true")
GRPO = ("algorithm.adv_estimator=grpo", "rollout.n=8", "data.train_batch_size=256",
        "actor.ppo_mini_batch_size=64")  # fmt: skip


def cell(model: str, cluster: tuple[int, int, int], settings: tuple[str, ...]) -> str:
    """`65.5 T2 o`: GiB of the fullest phase, the engine's GPUs, offload; or a dash."""
    for offload in ((), OFFLOAD):
        for tp in (1, 2, 4, 8):
            more = (f"rollout.tensor_model_parallel_size={tp}", *offload)
            peak = predicted(model, cluster, (*settings, *more))
            if peak is not None:
                return f"{peak:.1f}{f' T{tp}' if tp > 1 else ''}{' o' if offload else ''}"
    return "-"


def predicted(model: str, cluster: tuple[int, int, int], settings: tuple[str, ...]) -> float | None:
    """GiB of the fullest phase, or None where it does not fit or cannot be split so."""
    nodes, gpus, memory = cluster
    machine = (f"check.nnodes={nodes}", f"check.nproc_per_node={gpus}",
               f"check.device_memory_gib={memory}")  # fmt: skip
    try:
        config = load_config(
            "ppo.yaml",
            [f"model.path={model}", *machine, *settings],
            check=lambda c: check_config(c, world_size=nodes * gpus, ranks_per_node=gpus),
        )
    except ConfigError:
        return None
    shapes = find_models(config).shapes
    plan, _ = sized(plan_of(config, config.dims(nodes * gpus, gpus), shapes))
    most = max(phase.bytes for phase in phases(plan))
    return most / GIB if fits(plan) and not check_shapes(config, shapes, plan.dims) else None


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| Model | " + " | ".join(f"{n * g} x {m} GB" for n, g, m in CLUSTERS) + " |"
    yield "| --- |" + " --: |" * len(CLUSTERS)
    for model in MODELS:
        pairs = [
            f"{cell(model, cluster, ())} / {cell(model, cluster, GRPO)}" for cluster in CLUSTERS
        ]
        yield f"| {model.split('/')[1]} | {' | '.join('-' if p == '- / -' else p for p in pairs)} |"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.memory_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    for line in table():
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
