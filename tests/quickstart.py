"""The quickstart's model, trained by its commands on questions of a task: minutes, full tier."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import train_ppo
from tests.test_train import rows_of

ROOT = Path(train_ppo.__file__).parent
SUMS = ("chain_sum", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")
"""the quickstart's task in reasoning-gym, and its options"""
LETTERS = ("letter_counting", "min_words=4", "max_words=8")
"""that of episodes/try_again.yaml"""


def train_smollm2(
    folder: Path, config: str, *overrides: str, task: tuple[str, ...] = SUMS
) -> list[dict[str, Any]]:
    """Rows of metrics of SmolLM2-135M-Instruct on 2 ranks."""

    def command(*words: Any) -> None:
        subprocess.run([sys.executable, "-m", *map(str, words)], check=True, cwd=ROOT)

    model, data, run = (folder / name for name in ("model", "data", "run"))
    command("ppo.models.smollm2", "--out", model)
    name, *options = task
    command(
        *("ppo.data.prepare", "reasoning_gym", "--out", data, "--task", name, "--option"),
        *(*options, "--method", "last_number", "--train_size", 2048, "--test_size", 128),
    )
    command(
        *("torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_ppo.py"),
        *("--config", config, f"model.path={model}", *overrides),
        *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
        f"trainer.default_local_dir={run}",
    )
    return rows_of(run)


def validations(rows: list[dict[str, Any]], end: str) -> list[float]:
    """Values over the steps of the validation metric whose name ends so."""
    return [v for row in rows for name, v in row.items() if name[:4] == "val-" and end in name]
