"""An exported folder, read by SGLang itself, gives the log-probs that transformers gives.

Run as a program it is the engine's side: an Engine belongs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharding.checkpoint.export import export_hf
from tests.distributed import run_distributed
from tests.test_train import train_here

ROOT = Path(__file__).resolve().parents[3]


def largest_difference(folder: str) -> float:
    """Between the engine's log-probs of what it samples, and transformers', in float32."""
    import sglang
    from transformers import AutoModelForCausalLM

    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        attention_backend="torch_native",
        disable_radix_cache=True,
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        log_level="warning",
    )
    prompts = [[5, 6, 7, 90, 101], [65, 66, 67]]
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, return_logprob=True, sampling_params=sampling)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for prompt, output in zip(prompts, list(outputs), strict=True):
        logits = model(torch.tensor([prompt + output["output_ids"]])).logits[0]  # [S, V]
        expected = logits.log_softmax(-1)
        for t, (value, token, _) in enumerate(output["meta_info"]["output_token_logprobs"]):
            difference = expected[len(prompt) + t - 1, token].item() - value
            worst = max(worst, abs(difference))
    engine.shutdown()
    return worst


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.distributed
def test_sglang_and_transformers_read_the_same_model_from_an_exported_folder(tmp_path: Path):
    run = tmp_path / "run"
    overrides = ("trainer.total_training_steps=1", "trainer.save_freq=1")
    run_distributed(train_here, 2, [(str(run), overrides)])
    export_hf(run, tmp_path / "exported")
    env = os.environ | {
        "PYTHONPATH": f"{ROOT / 'launch' / 'cpu_engine'}:{ROOT}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "exported")],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("largest difference ")]
    assert found, done.stderr[-3000:]
    assert float(found[0].split()[-1]) < 1e-4


if __name__ == "__main__":
    sys.stdout.write(f"largest difference {largest_difference(sys.argv[1])}\n")
