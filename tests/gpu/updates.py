"""Updates of models in real shapes: time, peak memory against what `--check` predicts, host syncs.

They run the loop's own update functions on one rank, with a batch of random tokens.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ppo.batch.packing import Batchers, make_batchers
from ppo.batch.samples import RolloutBatch
from ppo.check.memory_phases import Plan, phases
from ppo.check.preflight import find_models
from ppo.config import Config, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.guards.guard import Guard
from ppo.metrics import Metrics
from ppo.models.flops import batch_flops, utilisation
from ppo.models.roles import Models, build_models
from ppo.step_metrics import model_size
from ppo.update import update_actor, update_critic
from sharding.mesh import Mesh, build_mesh, init_distributed
from tests.benchmarks.measure import seconds
from tests.gpu.parts import Options, Row
from tests.gpu.shapes import model_folder
from tests.peak_memory import PeakTracker
from tests.ppo.batches import make_batch

GIB = 1 << 30
PROMPT = 32
"""tokens of a prompt, which no log-prob is computed for"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update: model, lengths of its sequences, tokens of a micro-batch."""

    shape: str
    lengths: Sequence[int]
    budget: int
    published: tuple[float, float] | None = None
    """tokens/s and GiB of others, 1 x H100"""
    critic: bool = False
    more: Sequence[str] = ()
    """overrides"""


def long_tailed(count: int, longest: int) -> list[int]:
    """Lengths proportional to (i / count) ** 1.8: many short, few long."""
    return [max(PROMPT + 1, round(longest * (i / count) ** 1.8)) for i in range(1, count + 1)]


def cases(options: Options) -> list[Case]:
    """What is measured, the most valuable first."""
    if options.dry:
        ragged = long_tailed(6, 100)
        return [
            Case(shape="tiny", lengths=[120], budget=120, published=(1.0, 1.0)),
            Case(shape="tiny", lengths=ragged, budget=128, critic=True),
        ]
    ragged = long_tailed(48, 4096)
    return [
        Case(
            shape="Qwen/Qwen3-0.6B", lengths=[1 << 14], budget=1 << 14, published=(11_900.0, 12.5)
        ),
        Case(
            shape="Qwen/Qwen3-0.6B", lengths=[1 << 16], budget=1 << 16, published=(10_100.0, 19.6)
        ),
        Case(shape="Qwen/Qwen2.5-0.5B", lengths=ragged, budget=1 << 14),
        Case(shape="Qwen/Qwen3-1.7B", lengths=ragged, budget=1 << 14),
        Case(shape="Qwen/Qwen2.5-0.5B", lengths=ragged, budget=1 << 15, critic=True),
    ]


def measure_updates(options: Options) -> Iterator[Row]:
    """Tokens/s, model FLOPs, peak against prediction: one row a case."""
    with init_distributed(options.device):
        for case in cases(options):
            yield measure(case, options)
            if not options.dry:
                torch.cuda.empty_cache()


def measure_compiled(options: Options) -> Iterator[Row]:
    """The same update with layers as they are and compiled, which a dry run leaves out: minutes."""
    ragged = long_tailed(*options.pick((48, 4096), (6, 100)))
    shape, budget = options.pick(("Qwen/Qwen2.5-0.5B", 1 << 14), ("tiny", 128))
    with init_distributed(options.device):
        for value in options.pick(("false", "layers"), ("false",)):
            more = [f"model.compile={value}"]
            case = Case(shape=shape, lengths=ragged, budget=budget, more=more)
            yield {"compile": value} | measure(case, options)


@dataclass
class Updater:
    """A model that is built, and what one update of it takes."""

    config: Config
    models: Models
    batchers: Batchers
    batch: RolloutBatch
    mesh: Mesh
    critic: bool

    def run(self) -> None:
        """One update of the whole batch."""
        metrics = Metrics(self.mesh.device)
        with metrics.timed("update"):
            if self.critic:
                assert self.models.critic is not None and self.batchers.critic is not None
                update_critic(
                    *(self.models.critic, self.batch, self.config, self.batchers.critic),
                    *(metrics, 1, Guard()),
                )
            else:
                update_actor(
                    *(self.models.actor, self.batch, self.config, self.batchers.actor),
                    *(metrics, 1, Guard()),
                )
        metrics.reduce()

    @property
    def module(self) -> Any:
        learner = self.models.critic if self.critic else self.models.actor
        assert learner is not None
        return learner.module

    def states(self) -> Iterator[torch.Tensor]:
        """What the model and its optimizer hold between updates."""
        for learner in self.models.trained().values():
            yield from learner.module.parameters()
            for state in learner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def measure(case: Case, options: Options) -> Row:
    """The second update, when the moments are there; the fastest of two."""
    updater = build(case, options)
    device = options.device
    updater.run()
    with PeakTracker(device) as tracker:
        tracker.watch(updater.states())
        updater.run()
    peak = tracker.peak_bytes
    taken = min(seconds(updater.run, device) for _ in range(options.pick(2, 1)))
    tokens = sum(case.lengths)
    flops = batch_flops(
        model_size(updater.module),
        case.lengths,
        num_scored=tokens - PROMPT * len(case.lengths),
    )
    name = "cpu" if options.dry else torch.cuda.get_device_name(device)
    role = "critic" if case.critic else "actor"
    used = utilisation(role, flops, seconds=taken, num_devices=1, device_name=name)
    predicted = predicted_bytes(updater, f"train {role}", options)
    row: Row = {
        "model": case.shape,
        "updated": role,
        "tokens": tokens,
        "sequences": len(case.lengths),
        "budget": case.budget,
        "tokens_per_s": round(tokens / taken, 1),
        "peak_gib": round(peak / GIB, 4),
        "predicted_gib": round(predicted / GIB, 4),
        "predicted_over_peak": round(predicted / peak, 3),
        **{key.rpartition("/")[0].split("/")[1]: round(value, 4) for key, value in used.items()},
    }
    if case.published is not None:
        row |= {
            "published_tokens_per_s": case.published[0],
            "published_gib": case.published[1],
            "ratio": round(tokens / taken / case.published[0], 2),
        }
    return row


def predicted_bytes(updater: Updater, phase: str, options: Options) -> float:
    """Of the plan: what tensors take, without what is assumed of contexts and communicators."""
    config = updater.config
    plan = Plan(
        config=config,
        dims=updater.mesh.dims,
        shapes=find_models(config).shapes,
        cuda=not options.dry,
        device_bytes=GIB,
    )
    [found] = [found for found in phases(plan) if found.name == phase]
    return sum(item.bytes for item in found.items if "assumed" not in item.name)


def build(case: Case, options: Options, mini_batches: int = 1) -> Updater:
    """Models as a start builds them, and a batch of random tokens."""
    folder = model_folder(case.shape, options.folder, options.device)
    config = config_of(case, folder, options, mini_batches)
    mesh = build_mesh(config.dims(1, 1), options.device)
    num_ids = yaml.safe_load((folder / "config.json").read_text())["vocab_size"]
    models = build_models(config, mesh, options.folder, 1, num_ids=num_ids)
    batchers = make_batchers(config, mesh, models)
    return Updater(config, models, batchers, batch_of(case, num_ids), mesh, case.critic)


def config_of(case: Case, folder: Path, options: Options, mini_batches: int = 1) -> Config:
    """One rank, adaptive advantages without a reference; a critic alone on the device."""
    count = len(case.lengths)
    overrides = {
        "model.path": folder,
        "model.verify_forward": "false",
        "data.train_files": "tiny",
        "data.train_batch_size": count,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": max(case.lengths) - PROMPT,
        "algorithm.adv_estimator": "gae" if case.critic else "grpo",
        "algorithm.use_kl_in_reward": "false",
        "actor.ppo_mini_batch_size": count // mini_batches,
        "actor.ppo_max_token_len_per_gpu": case.budget,
        "actor.fsdp.param_offload": str(case.critic).lower(),
        "actor.fsdp.optimizer_offload": str(case.critic).lower(),
        "critic.ppo_max_token_len_per_gpu": case.budget,
        "critic.fsdp.param_offload": "false",
        "critic.fsdp.optimizer_offload": "false",
        "rollout.engine": "torch",
        "trainer.device": options.device.type,
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    return load_config(None, [*words, *case.more])


def batch_of(case: Case, num_ids: int) -> RolloutBatch:
    """Sequences of the case's lengths with random ids, advantages, values and returns."""
    generator = torch.Generator().manual_seed(0)

    def ids(number: int) -> list[int]:
        return torch.randint(3, num_ids, (number,), generator=generator).tolist()

    prompts = [Prompt(i, ids(PROMPT), "", "", {}, "") for i in range(len(case.lengths))]
    completions = [
        Completion(ids(length - PROMPT), [0.0] * (length - PROMPT), "length")
        for length in case.lengths
    ]
    batch = make_batch(prompts, completions)
    shape = batch.response_mask.shape
    batch.advantages = torch.randn(shape, generator=generator)
    batch.values = torch.randn(shape, generator=generator)
    batch.returns = torch.randn(shape, generator=generator)
    return batch


def count_syncs(options: Options) -> Iterator[Row]:
    """How often an update makes the host wait for the device, with one and with two times as many
    micro-batches: what is more is the hot loop's. On a CPU nothing is counted."""
    lengths = options.pick([1024] * 16, [64] * 8)
    shape = options.pick("Qwen/Qwen2.5-0.5B", "tiny")
    found = {}
    with init_distributed(options.device):
        for per_row in (4, 2):
            case = Case(shape=shape, lengths=lengths, budget=per_row * lengths[0])
            updater = build(case, options)
            updater.run()
            found[per_row] = syncs_of(updater.run, options.device)
    fewer, more = found[4], found[2]
    extra = len(lengths) // 2 - len(lengths) // 4
    yield {
        "micro_batches": len(lengths) // 2,
        "syncs_of_an_update": more.total(),
        "syncs_of_a_micro_batch": (more.total() - fewer.total()) / extra,
        "where": "; ".join(f"{place} x{number}" for place, number in more.most_common(8)),
    }


def syncs_of(work: Callable[[], Any], device: torch.device) -> Counter[str]:
    """Places in Python that waited for the device, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
