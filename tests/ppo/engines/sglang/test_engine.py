"""The real SGLang on a CPU behind the engine contract. One session per layout of the ranks.

Everything that shares an engine shares a session: starting one takes 20 s or more.
"""

import logging
import multiprocessing
import os
import signal
import subprocess
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
from ppo.engines.sglang.host_executor import HostExecutor
from ppo.logprobs import LogitTransform
from ppo.models.forward import ForwardPlan
from ppo.models.tiny import build_tiny_model
from ppo.run.signals import descendants
from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh
from tests.distributed import run_distributed
from tests.ppo.engines.drive import Listed, drive, generate
from tests.ppo.models.hf_models import add_spare_rows

pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.timeout(600)]
pytest.importorskip("sglang")

MAX_MODEL_LEN = 64
IDS = 512
"""of the tokenizer; the model of the sessions has 64 rows more, which are never sampled"""
FAULT_S = 30.0


class Session:
    """One rank's engine beside a sharded model, and the same model whole as the reference."""

    def __init__(self, rank: int, world_size: int, folder: str, *, tp: int, **rollout: Any):
        from transformers import AutoModelForCausalLM

        self.rank, self.dtype = rank, torch.float32
        dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=tp)
        mesh = build_mesh(dims.resolve(), torch.device("cpu"))
        options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32}
        config = Config(
            data=DataConfig(train_files=["tiny"]),
            model=ModelConfig(path=folder),
            rollout=RolloutConfig(tensor_model_parallel_size=tp, **{**options, **rollout}),
        )
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plan = ForwardPlan(LogitTransform(), None, None, mesh.device, num_ids=IDS)
        self.module.forward_plan = plan  # pyright: ignore
        shard_model(self.module, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        logs = Path(folder).parent / "logs"
        self.engine = SGLangEngine(config, mesh, self.module, model_path=folder, log_dir=logs)

    @property
    def host(self) -> Any:
        """The leader's host process."""
        assert isinstance(self.engine.executor, HostExecutor)
        return self.engine.executor.host

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


def schedulers(session: Session) -> list[int]:
    """The engine's tensor-parallel workers."""
    pids = descendants(session.host.process.pid)
    return [p for p in pids if "scheduler" in Path(f"/proc/{p}/cmdline").read_text()]


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that are still running; they get a moment to end."""
    deadline = time.monotonic() + 10
    while True:
        stats = [Path(f"/proc/{pid}/stat") for pid in pids]
        left = [
            s for s in stats if s.exists() and s.read_text().rsplit(")", 1)[1].split()[0] != "Z"
        ]
        if not left or time.monotonic() > deadline:
            return [int(stat.parent.name) for stat in left]
        time.sleep(0.2)


def test_two_replicas_sample_agree_and_fail_in_good_order(tmp_path: Path):
    folder = add_spare_rows(build_tiny_model(tmp_path / "tiny"), 64)
    first, second = run_distributed(_two_replicas, 2, str(folder), timeout_s=300)
    assert first["samples"] != second["samples"]  # seeds differ between replicas
    assert first["left"] == second["left"] == []


def _two_replicas(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    before = _process_state()
    bystander = subprocess.Popen(["sleep", "1000"])  # as a reward process
    session = Session(rank, world_size, folder, tp=1, stop=["unused"], verify_weights=2)
    engine = session.engine
    try:
        session.wake()
        pids = [session.host.process.pid, *descendants(session.host.process.pid)]
        assert len(pids) >= 3 and session.host._shared_files
        _check_reshard(session)
        samples = _check_sampling(session)
        _check_verification(session)
        _check_signals()
        for step in (1, 2):
            engine.release()
            session.train(step)
            session.wake()
            session.generate([[5, 6, 7]] * 4, temperature=0.8)
        _check_abandoned(session)
        _check_faults(session)
        engine.release()  # after a failure: nothing
    finally:
        engine.close()
        engine.close()
    try:
        assert bystander.poll() is None
        assert _process_state() == before
        assert not [file for file in session.host._shared_files if Path(file).exists()]
        return {"samples": samples, "left": alive(pids)}
    finally:
        bystander.kill()
        bystander.wait()


def _process_state() -> Any:
    """What Engine() would change in its own process."""
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    start_method = multiprocessing.get_start_method(allow_none=True)
    strategy = torch.multiprocessing.get_sharing_strategy()
    return dict(os.environ), handlers, list(logging.root.handlers), start_method, strategy


def _check_reshard(session: Session) -> None:
    metrics = session.reshard
    assert metrics["reshard/received_mib"] == metrics["reshard/lower_bound_mib"] > 0


def _check_sampling(session: Session) -> list[list[int]]:
    prompts = [[5, 6, 7], [300, 4], [9] * 20] * 4

    greedy = session.generate(prompts, temperature=0)
    for prompt, completion in zip(prompts, greedy, strict=True):
        best = session.logits(prompt, completion.response_ids).argmax(-1)
        assert best.tolist() == completion.response_ids

    sampled = session.generate(prompts, temperature=0.7)
    assert len({tuple(c.response_ids) for c in sampled}) > 3
    assert session.metrics["rollout/cache_hit"] > 0.3  # siblings share their prompt

    narrow = session.generate(prompts, temperature=1.5, top_k=3, ignore_eos=True)
    for prompt, completion in zip(prompts, narrow, strict=True):
        ids = torch.tensor(completion.response_ids)[:, None]
        kept = session.logits(prompt, completion.response_ids).topk(3).indices
        assert (kept == ids).any(-1).all()
        assert len(completion.response_ids) == 20 and completion.finish_reason == "length"

    nucleus = session.generate(prompts, temperature=1.0, top_p=1e-6, ignore_eos=True)
    for prompt, completion in zip(prompts, nucleus, strict=True):
        best = session.logits(prompt, completion.response_ids).argmax(-1)
        assert best.tolist() == completion.response_ids

    _check_ends(session)
    return [completion.response_ids for completion in sampled]


def _check_ends(session: Session) -> None:
    """Stop tokens, stop texts, and the limit of the whole sequence."""
    prompt = [5, 6, 7]
    (whole,) = session.generate([prompt], temperature=0, ignore_eos=True)
    token = whole.response_ids[7]
    first = whole.response_ids.index(token)
    (cut,) = session.generate([prompt], temperature=0, stop_token_ids=(token,))
    assert cut.response_ids == whole.response_ids[: len(cut.response_ids)]
    assert cut.finish_reason == "stop" and len(cut.response_ids) <= first + 1

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(session.engine.config.model.path)
    text = tokenizer.decode(whole.response_ids[4:6])
    (ended,) = session.generate([prompt], temperature=0, stop=(text,), ignore_eos=True)
    kept = ended.response_ids
    assert kept == whole.response_ids[: len(kept)] and ended.finish_reason == "stop"
    assert text in tokenizer.decode(kept) and text not in tokenizer.decode(kept[:-1])

    (full,) = session.generate([[3] * 50], max_new_tokens=60, ignore_eos=True)
    assert len(full.response_ids) == MAX_MODEL_LEN - 50 and full.finish_reason == "length"
    with pytest.raises(ValueError, match="max_model_len"):
        session.generate([[3] * MAX_MODEL_LEN])


def _check_verification(session: Session) -> None:
    """A parameter that something has overwritten is found, with both values."""
    name, engine = "model.layers.1.mlp.gate_up_proj.weight", session.engine
    found = engine._sync.run(engine.executor.update(), action="verify")
    assert found == [], found
    entry = [name, 130, 0, 1, 64, 0]  # row 2 of up_proj
    instruction = {"action": "load", "stage": "bucket", "style": "slices", "entries": [entry]}
    with engine.executor.update() as update:
        update.begin()
        update.send({**instruction, "zeros": [], "checksums": {}}, torch.full((64,), 0.25))
        update.end()
    (problem,) = engine._sync.run(engine.executor.update(), action="verify")
    value = session.whole.get_parameter("model.layers.1.mlp.up_proj.weight")[2, 0].item()
    assert f"{name} from [" in problem and f"engine 0.25, trainer {value:.9g}" in problem


def _check_signals() -> None:
    """SIGTERM between calls reaches this process's handler, not the engine."""
    received = []
    handler = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    assert received == ["SIGTERM"]


def _check_abandoned(session: Session) -> None:
    """A stop request drops the generation: release and the next sync work at once."""
    work = long_generation(session)
    started = time.monotonic()
    work.close()
    session.engine.release()
    assert time.monotonic() - started < FAULT_S
    session.wake()
    session.generate([[5, 6, 7]])


def _check_faults(session: Session) -> None:
    """Rank 0 loses an engine process during a generation, rank 1 its host between calls."""
    if session.rank == 0:
        work = long_generation(session)
        os.kill(schedulers(session)[0], signal.SIGKILL)
        seconds = fails(
            work,
            "rank 0: the SGLang engine ended in generate",
            "sglang::scheduler ended with exit code -9",
        )
    else:
        session.host.process.kill()
        session.host.process.wait()
        work = generate(session.engine, [Request(0, [5])], SamplingParams(max_new_tokens=2))
        seconds = fails(work, "rank 1: the SGLang engine", "engine_0001.log", "Decode batch")
    assert seconds < FAULT_S


def test_a_mixture_of_experts_loads_by_the_generic_path_and_a_hung_worker_is_an_error(
    tmp_path: Path,
):
    """The bias that balances its experts is no parameter, but a buffer of the checkpoint."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **{**TINY, "head_dim": 8},
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    model = Glm4MoeForCausalLM(config)
    model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").normal_()
    folder = _save(model, tmp_path / "moe")
    for left in run_distributed(_mixture_on_two_ranks, 2, str(folder), timeout_s=300):
        assert left == []


def _mixture_on_two_ranks(rank: int, world_size: int, folder: str) -> list[int]:
    session = Session(rank, world_size, folder, tp=2, timeout_s=20)
    engine, pids = session.engine, []
    try:
        session.wake()
        if engine.is_leader:
            pids = [session.host.process.pid, *descendants(session.host.process.pid)]
        _check_two_syncs(session)
        if engine.is_leader:
            work = long_generation(session)
            assert len(schedulers(session)) == 2
            os.kill(schedulers(session)[1], signal.SIGSTOP)
            seconds = fails(work, "rank 0: the SGLang engine made no progress for 20 s")
            assert seconds < 20 + FAULT_S
        engine.release()
    finally:
        engine.close()
    return alive(pids)


def test_an_architecture_that_no_table_knows_loads_by_the_generic_path(tmp_path: Path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        **TINY,
        intermediate_size=128,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    )
    folder = _save(GraniteForCausalLM(config), tmp_path / "granite")
    assert run_distributed(_unknown_architecture, 1, str(folder), timeout_s=300) == [[]]


def _unknown_architecture(rank: int, world_size: int, folder: str) -> list[int]:
    session = Session(rank, world_size, folder, tp=1, free_cache_engine=False)
    try:
        session.wake()
        pids = [session.host.process.pid, *descendants(session.host.process.pid)]
        _check_two_syncs(session)
    finally:
        session.engine.close()
    return alive(pids)


TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


def _save(model: Any, folder: Path) -> Path:
    """A folder with weights large enough to make the tokens unequal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return folder


def _check_two_syncs(session: Session) -> None:
    """Agreement after the first sync, and after training, release and another sync."""
    session.generate([[5, 6, 7], [300, 4]] * 4, temperature=0.7)
    session.engine.release()
    session.train(1)
    session.wake()
    completions = session.generate([[5, 6, 7], [300, 4]] * 4, temperature=0.7)
    assert len(completions) == (8 if session.engine.is_leader else 0)
