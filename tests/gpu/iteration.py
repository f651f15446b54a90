"""One whole PPO iteration, as `torchrun train_ppo.py` does it: generation to the updates."""

import json
from collections.abc import Iterator

import train_ppo
from ppo.config import load_config
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.gpu.parts import Options, Row
from tests.gpu.shapes import model_folder
from tests.test_train import BASE, rows_of

MARKS = 3
"""tokens that the chat template puts around a prompt of one byte a token"""
PUBLISHED_S = 68.0


def measure_iteration(options: Options) -> Iterator[Row]:
    """PPO with critic and reference, embedded engine: 256 prompts x 105 tokens, 239 new tokens."""
    prompts, length, new, steps = options.pick((256, 105, 239, 2), (4, 32, 8, 1))
    folder = model_folder(options.pick("Qwen/Qwen2.5-0.5B", "tiny"), options.folder, options.device)
    data = options.folder / "prompts.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for number in range(prompts * steps):
            text = f"{number} abc ".ljust(length - MARKS, "d")
            row = {
                "data_source": "tiny",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": "abc"},
            }
            file.write(json.dumps(row) + "\n")
    run_folder = options.folder / "iteration"
    config = load_config(
        None,
        [
            *BASE,
            *("trainer.save_freq=-1", "trainer.logger=[jsonl]", "model.verify_forward=false"),
            f"trainer.device={options.device.type}",
            f"trainer.default_local_dir={run_folder}",
            f"trainer.total_training_steps={steps}",
            f"model.path={folder}",
            f"data.train_files={data}",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={length}",
            f"data.max_response_length={new}",
            f"actor.ppo_mini_batch_size={prompts // 2}",
            f"reward.num_workers={options.pick(4, 1)}",
            "rollout.engine=torch",
            "rollout.ignore_eos=true",
            f"rollout.max_num_seqs={prompts}",
            *options.pick((), ("rollout.reshard_bucket_mib=1",)),
        ],
    )
    with (
        init_distributed(options.device),
        Run(config, build_mesh(config.dims(1, 1), options.device), command=["tests.gpu"]) as run,
    ):
        train_ppo.train(config, run)
    for row in rows_of(run_folder):
        timed = {
            name: round(value, 3)
            for name, value in row.items()
            if name.startswith("timing_s/") or name in SHOWN
        }
        yield {"iteration": row["step"], "published_s": PUBLISHED_S, **timed}


SHOWN = (
    *("perf/throughput", "perf/mfu/actor", "perf/mfu/critic", "perf/max_memory_allocated_gb"),
    *("prompt_length/mean", "response_length/mean", "rollout/tokens_per_s"),
)
