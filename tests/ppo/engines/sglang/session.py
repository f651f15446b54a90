"""One rank of the real SGLang on a CPU beside a sharded model, in either kind of process."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo.config import Config, DataConfig, ModelConfig, RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang.engine import SGLangEngine
from ppo.engines.sglang.executor import EngineError
from ppo.logprobs import LogitTransform
from ppo.models.forward import ForwardPlan
from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh
from tests.ppo.engines.drive import Listed, drive, generate

MAX_MODEL_LEN = 64
IDS = 512
"""of the tokenizer; the model of the sessions may have more rows, which are never sampled"""
FAULT_S = 30.0


class Session:
    """One rank's engine beside a sharded model, and the same model whole as the reference."""

    def __init__(
        self, rank: int, world_size: int, folder: str, kind: str, *, tp: int, **rollout: Any
    ):
        from transformers import AutoModelForCausalLM

        self.rank, self.kind = rank, kind
        dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=tp)
        mesh = build_mesh(dims.resolve(), torch.device("cpu"))
        options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32}
        config = Config(
            data=DataConfig(train_files=["tiny"]),
            model=ModelConfig(path=folder),
            rollout=RolloutConfig(
                engine_process=kind,  # type: ignore[arg-type]
                tensor_model_parallel_size=tp,
                **{**options, **rollout},
            ),
        )
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plan = ForwardPlan(LogitTransform(), None, None, mesh.device, num_ids=IDS)
        self.module.forward_plan = plan  # pyright: ignore
        shard_model(self.module, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        logs = Path(folder).parent / "logs"
        self.engine = SGLangEngine(config, mesh, self.module, model_path=folder, log_dir=logs)

    def wake(self) -> None:
        loaded = []
        self.reshard = drive(self.engine.wake(lambda: loaded.append(True)))
        assert loaded == [True]

    @torch.no_grad()
    def train(self, step: int) -> None:
        """Move the weights of both models by the same amounts."""
        for sharded, whole in zip(self.module.parameters(), self.whole.parameters(), strict=True):
            sharded.mul_(1 + 0.05 * step).add_(0.01 * step)
            whole.mul_(1 + 0.05 * step).add_(0.01 * step)

    def generate(self, prompts: list[list[int]], **params: Any) -> list[Listed]:
        """Completions on the leader, after their log-probs agree with the reference to 1e-4."""
        sampling = SamplingParams(**{"max_new_tokens": 20, **params})
        requests = [Request(i, prompt) for i, prompt in enumerate(prompts)]
        completions, self.metrics = drive(generate(self.engine, requests, sampling))
        for prompt, completion in zip(prompts, completions, strict=False):
            expected = self.logprobs(prompt, completion.response_ids, sampling.temperature or 1.0)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4
            )
        return completions

    @torch.no_grad()
    def logits(self, prompt: list[int], response: list[int]) -> Tensor:
        """Logits [T, IDS] of the unsharded model that predict the response."""
        row = self.whole(torch.tensor([prompt + response])).logits[0, :, :IDS]
        return row[len(prompt) - 1 : -1].float()

    def logprobs(self, prompt: list[int], response: list[int], temperature: float) -> Tensor:
        rows = (self.logits(prompt, response) / temperature).log_softmax(-1)
        return rows.gather(1, torch.tensor(response)[:, None])[:, 0]


def fails(work: Generator[None, None, Any], *texts: str) -> float:
    """Seconds until ``work`` raises an EngineError that contains ``texts``."""
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        drive(work)
    for text in texts:
        assert text in str(caught.value)
    return time.monotonic() - started


def long_generation(session: Session) -> Generator[None, None, Any]:
    """A generation that takes a minute, started."""
    params = SamplingParams(max_new_tokens=MAX_MODEL_LEN, ignore_eos=True)
    work = generate(session.engine, [Request(i, [5, 6]) for i in range(3_000)], params)
    next(work)
    return work


TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


def save(model: Any, folder: Path) -> Path:
    """A folder with weights large enough to make the tokens unequal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return folder
