"""What rollout.py does as a program: generate from a checkpoint, score, report, write the samples.

Owns its command line, which weights a path means, pass@k and the samples file. Sampling is that of
validation (rollout.val_kwargs). Must not know training.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ppo.build import model_folder
from ppo.collect import Collector
from ppo.config import Config, ConfigError, Problem, load_config
from ppo.config.cli import build_parser
from ppo.data.files import new_file
from ppo.errors import InputError
from ppo.learner import Frozen
from ppo.metrics import Metrics
from ppo.models import build_causal_lm
from ppo.run import Run
from ppo.setup import load_prompts, open_collector, open_rewards
from ppo.summary import sample_rows
from sharding.checkpoint import Checkpointer, CheckpointError
from sharding.checkpoint_files import MANIFEST, list_checkpoints

logger = logging.getLogger("rollout")


class Options(NamedTuple):
    """What the command line says."""

    config: str
    overrides: list[str]
    checkpoint: Path | None
    """run folder, step folder or Hugging Face folder; None = model.path"""
    data: str
    out: Path
    pass_score: float
    """a sample passes with this score or more"""


class Summary(NamedTuple):
    """Figures of one data source; samples whose reward failed are left out of the scores."""

    num_prompts: int
    num_samples: int
    num_failed: int
    mean_score: float
    pass_at: dict[int, float]
    """by k"""
    mean_length: float
    max_length: int
    clip_ratio: float
    """share of responses that were cut by length"""

    def __str__(self) -> str:
        passes = " ".join(f"pass@{k} {share:.3f}" for k, share in self.pass_at.items())
        return (
            f"{self.num_prompts} prompts, {self.num_samples} samples ({self.num_failed} failed) | "
            f"score {self.mean_score:.3f} | {passes} | length {self.mean_length:.1f} "
            f"max {self.max_length} clipped {self.clip_ratio:.3f}"
        )


def parse_options(argv: Sequence[str]) -> Options:
    """Options of rollout.py; what is not an option is an override. Raises ConfigError."""
    parser = build_parser("Generate from a checkpoint, score the samples and write them.")
    parser.add_argument("--checkpoint", type=Path, help="run, step or Hugging Face folder")
    parser.add_argument("--data", required=True, help="prompts: parquet or JSONL, or a glob")
    parser.add_argument("--out", required=True, type=Path, help="samples: .parquet or .jsonl")
    parser.add_argument("--pass_score", type=float, default=1.0, help="score that counts as passed")
    known, overrides = parser.parse_known_args(list(argv))
    return Options(overrides=overrides, **vars(known))


def load_evaluation(options: Options, check: Callable[[Config], list[Problem]]) -> Config:
    """The configuration of an evaluation: its data and weights, a run folder beside the samples.

    Raises ConfigError.
    """
    overrides = [
        *options.overrides,
        f"data.train_files={json.dumps([options.data])}",
        "data.val_files=[]",
        "data.train_max_samples=-1",
        f"trainer.default_local_dir={json.dumps(str(options.out.with_suffix('.run')))}",
        "trainer.resume_mode=disable",
        "trainer.val_only=false",
        "trainer.keep_best=null",
    ]
    if options.out.suffix not in (".parquet", ".jsonl"):
        rule = "must end with .parquet or .jsonl"
        raise ConfigError([Problem("--out", str(options.out), rule)])
    path = options.checkpoint
    if path is not None and (path / "config.json").is_file():
        overrides.append(f"model.path={json.dumps(str(path))}")
    elif path is not None and not _step_folders(path):
        raise ConfigError(
            [
                Problem(
                    "--checkpoint",
                    str(path),
                    "is neither a run, nor a checkpoint, nor a Hugging Face folder",
                    "give a folder with checkpoints/, manifest.json or config.json",
                )
            ]
        )
    return load_config(options.config, overrides, check=check)


def evaluate(config: Config, run: Run, options: Options) -> dict[str, Summary]:
    """Generate, score, log one line per data source and write the samples. Collective."""
    prompts = load_prompts(config, run)
    actor = _load_actor(config, run, options.checkpoint)
    with (
        open_rewards(config, run, prompts) as pool,
        open_collector(config, run, prompts, actor, pool) as collector,
    ):
        rows = _sample_and_score(collector, actor, list(prompts.all()))
    summaries = summarise(rows, pass_score=options.pass_score)
    if run.mesh.rank == 0:
        write_samples(options.out, rows)
        logger.info("%d samples written to %s", len(rows), options.out)
        for source, summary in summaries.items():
            logger.info("%s: %s", source, summary)
    return summaries


def summarise(rows: Sequence[Mapping[str, Any]], *, pass_score: float = 1.0) -> dict[str, Summary]:
    """Summaries by data source, in alphabetical order."""
    sources: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        sources[row["data_source"]].append(row)
    return {source: _summarise(sources[source], pass_score) for source in sorted(sources)}


def _summarise(rows: Sequence[Mapping[str, Any]], pass_score: float) -> Summary:
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]] += [] if row["score"] is None else [row["score"]]
    scores = [score for group in groups.values() for score in group]
    lengths = [row["response_length"] for row in rows]
    most = max(len(group) for group in groups.values())
    return Summary(
        num_prompts=len(groups),
        num_samples=len(rows),
        num_failed=len(rows) - len(scores),
        mean_score=_mean(scores),
        pass_at={
            k: _mean(
                [
                    pass_at_k(len(group), sum(score >= pass_score for score in group), k)
                    for group in groups.values()
                    if len(group) >= k
                ]
            )
            for k in [2**i for i in range(most.bit_length())]
        },
        mean_length=_mean(lengths),
        max_length=max(lengths),
        clip_ratio=_mean([row["finish_reason"] == "length" for row in rows]),
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k samples, drawn without replacement, passes (Chen et al. 2021)."""
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def write_samples(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL or parquet, as the name says, beside and renamed.

    In parquet, what is neither a number nor text becomes JSON.
    """
    if path.suffix == ".jsonl":
        with new_file(path) as beside, beside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return
    plain = [
        {
            key: value
            if value is None or isinstance(value, (str, int, float))
            else json.dumps(value, ensure_ascii=False, default=str)
            for key, value in row.items()
        }
        for row in rows
    ]
    with new_file(path) as beside:
        pq.write_table(pa.Table.from_pylist(plain), beside)


def _load_actor(config: Config, run: Run, checkpoint: Path | None) -> Frozen:
    """The model of model.path, with the weights of a checkpoint of ours where one is given."""
    module = build_causal_lm(
        model_folder(config.model.path, run),
        run.mesh,
        model_config=config.model,
        fsdp_config=config.actor.fsdp,
        checkpointing=False,
        forward_only=True,
        dtype=getattr(torch, config.model.dtype),
    )
    if checkpoint is not None and not (checkpoint / "config.json").is_file():
        folder = checkpoint / "checkpoints"
        folder = folder if folder.is_dir() else checkpoint
        with Checkpointer(folder, run.mesh) as checkpoints:
            step = checkpoint if (checkpoint / MANIFEST).exists() else checkpoints.latest()
            if step is None:
                raise ConfigError(
                    [Problem("--checkpoint", str(checkpoint), "holds no complete checkpoint")]
                )
            try:
                checkpoints.load(step, {"actor": module}, {})
            except CheckpointError as error:
                raise InputError(f"--checkpoint = {checkpoint}: {error}") from error
    return Frozen(
        module=module,
        device=run.mesh.device,
        param_offload=config.actor.fsdp.param_offload,
    )


def _step_folders(path: Path) -> list[Path]:
    """The checkpoints that a path may mean."""
    own = [path] if (path / MANIFEST).exists() else []
    return own + list_checkpoints(path) + list_checkpoints(path / "checkpoints")


def _sample_and_score(
    collector: Collector, actor: Frozen, prompts: Sequence[Any]
) -> list[dict[str, Any]]:
    """One row per sample, prompt-major."""
    config, metrics = collector.config, Metrics()
    size = config.data.val_batch_size or len(prompts)
    params, n = collector.validation_params(0), config.rollout.val_kwargs.n
    parts = [
        [prompts[i] for i in range(start, min(start + size, len(prompts)))]
        for start in range(0, len(prompts), size)
    ]
    with collector.awake(actor, metrics):
        batches = [collector.sample(part, params, n) for part in parts]
    rows = []
    for batch in batches:
        collector.score(batch, metrics)
        scored = zip(sample_rows(batch, collector), batch.prompts, batch.response_ids, strict=True)
        for row, prompt, response_ids in scored:
            index = len(rows)
            numbers = {"prompt_index": index // n, "sample": index % n, "uid": prompt.uid}
            rows.append(numbers | row | {"response_length": len(response_ids)})
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
