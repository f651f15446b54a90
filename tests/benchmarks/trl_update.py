"""TRL's side of bench_trl_update: run by the python that has TRL, prints JSON.

Trains with GRPOTrainer on given tokens instead of generated ones; nothing else of TRL is changed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import pad  # pyright: ignore[reportMissingImports]


class GivenTokens(GRPOTrainer):
    """GRPOTrainer whose completions are given: prompts padded left, responses padded right."""

    given: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        device = self.accelerator.device
        batch: dict[str, Any] = {
            "advantages": torch.tensor(self.given["advantages"], device=device)
        }
        for name, side in (("prompt", "left"), ("completion", "right")):
            rows = [torch.tensor(row, device=device) for row in self.given[name]]
            ones = [torch.ones_like(row) for row in rows]
            batch[f"{name}_ids"] = pad(rows, padding_value=0, padding_side=side)
            batch[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        return batch


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step: of this process's core on a CPU, else wall."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self._start)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    given = json.loads(args.tokens.read_text())
    accumulate = len(given["prompt"]) // args.batch
    torch.set_num_threads(1)
    config = GRPOConfig(
        output_dir=str(args.tokens.parent / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=True,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=accumulate,
        num_generations=given["n"],
        max_steps=args.steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    times = StepTimes()
    trainer = GivenTokens(
        model=args.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(given["prompt"])}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[times],
    )
    trainer.given = given
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    result = {"seconds": times.seconds[-1], "grad_norm": norms[0]}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
