"""The real SGLang on a CPU behind the engine contract: in the ranks, and (full) in processes of its
own. What only those can suffer is in test_host.py.

Everything that shares a layout shares an engine, and all engines of the ranks one import of SGLang.
"""

import gc
import inspect
import io
import logging
import multiprocessing
import os
import pdb
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist

from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang.rank_executor import RankExecutor
from ppo.models.tiny import build_tiny_model
from tests.distributed import run_distributed
from tests.ppo.engines.drive import drive, generate
from tests.ppo.engines.sglang.session import (
    FAULT_S,
    MAX_MODEL_LEN,
    TINY,
    Session,
    long_generation,
    save,
)
from tests.ppo.models.hf_models import add_spare_rows

pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.timeout(900)]

KINDS = ["rank", pytest.param("host", marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", KINDS)
def test_engines_sample_agree_and_follow_the_trainer_in_every_layout(tmp_path: Path, kind: str):
    """Two replicas; one engine of both ranks with a mixture of experts, whose balancing bias is no
    parameter but a buffer of the checkpoint; an architecture that no table knows."""
    folders = [str(make(tmp_path)) for make in (_tiny, _mixture, _unknown)]
    first, second = run_distributed(_all_layouts, 2, kind, *folders, timeout_s=300)
    assert first["replica"] != second["replica"]  # seeds differ between replicas
    for name in ("mixture", "unknown"):
        assert first[name] and second[name] == (first[name] if kind == "rank" else [])


def _tiny(folder: Path) -> Path:
    return add_spare_rows(build_tiny_model(folder / "tiny"), 64)


def _mixture(folder: Path) -> Path:
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
    return save(model, folder / "moe")


def _unknown(folder: Path) -> Path:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        **TINY,
        intermediate_size=128,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    )
    return save(GraniteForCausalLM(config), folder / "granite")


def _all_layouts(
    rank: int, world_size: int, kind: str, tiny: str, mixture: str, unknown: str
) -> dict[str, Any]:
    return {
        "replica": _replica(rank, world_size, kind, tiny),
        "mixture": _two_syncs(Session(rank, world_size, mixture, kind, tp=2)),
        "unknown": _two_syncs(
            Session(rank, world_size, unknown, kind, tp=2, free_cache_engine=False)
        ),
    }


def _replica(rank: int, world_size: int, kind: str, folder: str) -> list[list[int]]:
    """All that a replica of one rank is asked for; nothing of the process is another afterwards."""
    before, frozen = _process_state(), gc.get_freeze_count()
    session = Session(rank, world_size, folder, kind, tp=1, stop=["unused"], verify_weights=2)
    engine = session.engine
    try:
        session.wake()
        _check_reshard(session)
        samples = _check_sampling(session)
        _check_verification(session)
        _check_signals()
        for step in (1, 2):
            engine.release()
            _check_released(session)
            session.train(step)
            session.wake()
            session.generate([[5, 6, 7]] * 4, temperature=0.8)
        _check_abandoned(session)
        if kind == "rank":
            _check_exception(session)
            _check_debugger(session)
        engine.release()
    finally:
        engine.close()
        engine.close()
    after = _process_state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert changed == {}, changed
    assert gc.get_freeze_count() <= frozen  # fewer where some have gone
    return samples


def _two_syncs(session: Session) -> list[list[int]]:
    """Agreement after the first sync, and after training, release and another sync."""
    prompts = [[5, 6, 7], [300, 4]] * 4
    try:
        session.wake()
        session.generate(prompts, temperature=0.7)
        session.engine.release()
        session.train(1)
        session.wake()
        if session.kind == "rank":
            _check_abandoned(session)
        completions = session.generate(prompts, temperature=0.7)
        return [completion.response_ids for completion in completions]
    finally:
        session.engine.close()


def _process_state() -> dict[str, Any]:
    """What SGLang would change in the process that it runs in."""
    numpy_random: Any = np.random.get_state()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD)
    return {
        "environment": dict(os.environ),
        "import path": list(sys.path),
        "signals": [signal.getsignal(number) for number in signals],
        "exception hook": sys.excepthook,
        "log handlers": list(logging.root.handlers),
        "log level": (logging.root.level, logging.root.manager.disable),
        "warnings": (warnings.showwarning, list(warnings.filters)),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "handles": torch.multiprocessing.reductions.reduce_tensor,
        "random numbers": (random.getstate(), numpy_random[1].tobytes()),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "device module": torch.get_device_module,
        "compiler": (torch._dynamo.config.disable, torch._dynamo.config.suppress_errors),
        "default type": torch.get_default_dtype(),
        "threads of kernels": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default group": (dist.group.WORLD, dist.get_rank(), dist.get_world_size()),
        "cores": os.sched_getaffinity(0),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "threads": {t.name for t in threading.enumerate()} - {"tqdm_monitor"},  # a progress bar's
        "children": multiprocessing.active_children(),
    }


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
    """A parameter that something has overwritten is found, with both values; so is one that nothing
    was written to."""
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
    with engine.executor.update() as update:
        update.begin()
        load = {"action": "load", "style": "slices", "entries": [], "zeros": [], "checksums": {}}
        for stage in ("begin", "end"):
            answer = update.send({**load, "stage": stage}, torch.zeros(1))
        update.end()
    assert answer is not None and "never written in the engine: " in answer["error"]
    engine.release()
    session.wake()
    assert engine._sync.run(engine.executor.update(), action="verify") == []


def _check_signals() -> None:
    """SIGTERM between calls reaches this process's handler, not the engine."""
    received = []
    handler = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    assert received == ["SIGTERM"]


def _check_released(session: Session) -> None:
    if isinstance(session.engine.executor, RankExecutor):
        memory = session.engine.executor._memory
        assert memory.held_bytes() == 0  # type: ignore[union-attr]


def _check_abandoned(session: Session) -> None:
    """A stop request drops the generation: its slots are free, release and the next sync work."""
    work = long_generation(session)
    started = time.monotonic()
    work.close()
    if isinstance(session.engine.executor, RankExecutor):
        scheduler = session.engine.executor.steps.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        assert free == scheduler.max_total_num_tokens and not scheduler.running_batch.reqs
    session.engine.release()
    assert time.monotonic() - started < FAULT_S
    session.wake()
    session.generate([[5, 6, 7]])
    # episodes end while a turn of theirs is sampled: nobody waits for it, and nothing of it is left
    params = SamplingParams(max_new_tokens=MAX_MODEL_LEN, ignore_eos=True)
    generation = session.engine.begin(params, longest_prompt=8, most=64)
    generation.submit([Request(number, [5, 6]) for number in range(3_000)])
    ended = generation.advance(0.05)
    assert len(ended) < 3_000 and generation.metrics().keys() <= {
        "rollout/tokens_per_s",
        "rollout/kv_tokens",
    }
    generation.close()
    session.generate([[5, 6, 7]])


def _check_exception(session: Session) -> None:
    """What is raised inside of SGLang is raised by who advances it; the engine goes on."""
    assert isinstance(session.engine.executor, RankExecutor)
    runner = session.engine.executor.steps.scheduler.tp_worker.model_runner
    whole, calls = runner.forward, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 4:
            raise FloatingPointError("deep inside the model runner")
        return whole(*args, **kwargs)

    runner.forward = broken
    try:
        with pytest.raises(FloatingPointError, match="deep inside") as caught:
            session.generate([[5, 6, 7], [300, 4]] * 4, ignore_eos=True)
    finally:
        runner.forward = whole
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert {"advance", "run_batch", "broken"} <= set(names), names
    session.generate([[5, 6, 7], [300, 4]] * 4)


def _check_debugger(session: Session) -> None:
    """A breakpoint in SGLang's scheduler stops a generation, and shows the tokens of a request."""
    from sglang.srt.managers.scheduler import Scheduler

    place = inspect.unwrap(Scheduler.process_batch_result)
    lines, first = inspect.getsourcelines(place)
    line = first + next(i for i, text in enumerate(lines) if text.strip().startswith("if "))
    commands = (
        f"break {inspect.getsourcefile(place)}:{line}, len(batch.reqs[0].output_ids) == 3",
        *("continue", "p 'tokens', list(batch.reqs[0].output_ids)", "clear 1", "continue"),
    )
    told, screen = io.StringIO("\n".join(commands) + "\n"), io.StringIO()
    debugger = pdb.Pdb(stdin=told, stdout=screen, nosigint=True, readrc=False)
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    work = generate(session.engine, [Request(0, [5, 6, 7])], params)
    made: Any = debugger.runcall(drive, work)
    (completion,) = made.completions
    assert f"('tokens', {completion.response_ids[:3]})" in screen.getvalue(), screen.getvalue()
