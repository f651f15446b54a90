"""Generate from checkpoints, score, report, write the samples; every rank runs this program.

    torchrun --nproc_per_node=8 rollout.py --config X [--checkpoint RUN_OR_STEP_OR_HF_DIR ...] \\
        [--steps all|10,20,30] --data FILE --out samples.parquet [key.sub=value ...]

Owns its command line and what it writes. Sampling is that of validation (rollout.val_kwargs), with
the same noise for all checkpoints. Must not know training.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ppo.check.commands import before_evaluation

if __name__ == "__main__" and (code := before_evaluation(sys.argv[1:], os.environ)) is not None:
    sys.exit(code)  # a wrong command line is said before torch is imported

from torch.distributed.elastic.multiprocessing.errors import record

from ppo.config import Config, ConfigError, Problem, load_config
from ppo.config.evaluation import Options, parse_options
from ppo.files import replace_text
from ppo.models.build import build_causal_lm
from ppo.models.folder import model_folder
from ppo.models.learner import Model
from ppo.models.roles import build_options
from ppo.rollout.collector import open_collector
from ppo.rollout.figures import Summary, metrics_of, summarise, table
from ppo.rollout.prompts import open_prompts
from ppo.rollout.samples import write_samples
from ppo.rollout.scoring import build_scorer, open_rewards
from ppo.rollout.targets import (
    Target,
    find_targets,
    is_hf_folder,
    load_target,
    lora_of,
    path_problems,
)
from ppo.rollout.validation import Job, sample_and_score
from ppo.run.run import Run
from ppo.run.start import Launch, open_run, program
from ppo.tracking.tracker import Tracker

logger = logging.getLogger("rollout")


def load_evaluation(options: Options, check: Callable[[Config], list[Problem]]) -> Config:
    """The configuration of an evaluation: its data and weights, a run folder beside the samples.

    Raises ConfigError.
    """
    overrides = [
        *options.overrides,
        f"data.train_files={json.dumps([options.data])}",
        "data.val_files=[]",
        "data.val_sets={}",
        f"trainer.default_local_dir={json.dumps(str(options.out.with_suffix('.run')))}",
        "trainer.resume_mode=disable",
        "trainer.val_only=false",
        "trainer.keep_best=null",
        "trainer.early_stop.metric=null",
    ]
    if options.out.suffix not in (".parquet", ".jsonl"):
        rule = "must end with .parquet or .jsonl"
        raise ConfigError([Problem("--out", str(options.out), rule)])
    if options.out.is_dir():
        raise ConfigError([Problem("--out", str(options.out), "is a folder: name a file in it")])
    if problems := path_problems(options.checkpoint, options.steps):
        raise ConfigError(problems)
    if options.checkpoint and is_hf_folder(options.checkpoint[0]):
        overrides.append(f"model.path={json.dumps(str(options.checkpoint[0]))}")
    config = load_config(options.config, overrides, check=check)
    limits = [config.data.train_max_samples, config.data.val_max_samples]
    limit = min((limit for limit in limits if limit > 0), default=-1)
    return replace(config, data=replace(config.data, train_max_samples=limit))


def evaluate(config: Config, run: Run, options: Options) -> None:
    """Generate from every target, score, log and write. Collective.

    Engine and model are built once; each target's weights come into them. When too many rewards
    fail, the samples are written all the same, each with its failure.
    """
    targets = find_targets(options.checkpoint, options.steps, run.mesh)
    prompts = open_prompts(config, run)
    if config.data.train_max_samples > 0:
        limit = config.data.train_max_samples
        logger.info("data.train_max_samples or val_max_samples: the first %d rows only", limit)
    base = model_folder(config.model.path, run.mesh, run.dir)
    actor = _build_actor(config, run, base, targets, prompts.num_ids)
    results = Results(options, config.rollout.val_kwargs.n, several=len(targets) > 1)
    load = partial(load_target, actor.module, config=config, mesh=run.mesh, base=base)
    first = load(targets[0], holds=base)
    with (
        open_rewards(config, run, prompts) as pool,
        open_collector(config, run, prompts, actor) as collector,
        Tracker(run.record, enabled=run.mesh.rank == 0, loggers=["jsonl"]) as tracker,
        closing(results),
    ):
        scorer = build_scorer(config, run, prompts, pool)
        run.begin()
        job = Job(prompts.train, config.sampling_of([options.data]))
        for number, named in enumerate(run.polled(targets), 1):
            target = first if number == 1 else load(named, holds=targets[number - 2].path)
            step = number if len(options.checkpoint) > 1 else target.step or 0
            found = sample_and_score(
                *(collector, scorer, {"": job}),
                step=0,  # the same noise for all
                keep=partial(results.keep, target, tracker, step),
            )
            if found is not None:
                tracker.log(step, results.add(target, found[""]))


class Results:
    """What is written and said of each target, on the first rank."""

    def __init__(self, options: Options, n: int, *, several: bool) -> None:
        self._options, self._n, self._several = options, n, several
        self._summaries: list[tuple[str, dict[str, Summary]]] = []

    def keep(
        self, target: Target, tracker: Tracker, step: int, _: str, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the samples, as a file and for the report."""
        path = self._options.samples_file(target.label if self._several else None)
        write_samples(path, rows)
        tracker.samples(step, rows, split="val", num_text=0)
        logger.info("%d samples written to %s", len(rows), path)

    def add(self, target: Target, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Log a line per data source and write the figures of all targets so far; this one's."""
        summaries = summarise(rows, pass_score=self._options.pass_score)
        self._summaries.append((target.label, summaries))
        head = f"{target.label}: " if self._several else ""
        for source, summary in summaries.items():
            logger.info("%s%s: %s", head, source, summary)
        found = {label: metrics_of(each, self._n) for label, each in self._summaries}
        figures = found if self._several else found[target.label]
        replace_text(figures_file(self._options.out), json.dumps(figures, indent=1) + "\n")
        return found[target.label]

    def close(self) -> None:
        """Log the table of several targets, also of those before an error or a stop."""
        if self._several and self._summaries:
            logger.info("%d evaluated\n%s", len(self._summaries), table(self._summaries))


def figures_file(out: Path) -> Path:
    """Beside the samples: {"val-core/SOURCE/reward/mean@N": 0.5, ...}, as training logs them; of
    several targets, that by label."""
    return out.with_suffix(".metrics.json")


def _build_actor(
    config: Config, run: Run, base: Path, targets: Sequence[Target], num_ids: int
) -> Model:
    """The model of a folder, at rest, with the adapters that the targets have."""
    lora = lora_of(targets, config, run.mesh)
    options = build_options(config, config.models["actor"]._replace(lora=lora))
    options |= {"checkpointing": False, "forward_only": True}
    module = build_causal_lm(
        *(base, run.mesh),
        num_ids=num_ids,
        **options,
    )
    offloads = config.actor.fsdp.param_offload
    actor = Model(module=module, device=run.mesh.device, param_offload=offloads)
    actor.rest()
    return actor


def start(launch: Launch, words: Sequence[str]) -> int:
    """Evaluate what the command line says; the exit code."""
    options = parse_options(words)
    config = load_evaluation(options, launch.problems)
    with open_run(config, launch, sys.argv) as run:
        evaluate(config, run, options)
    return run.exit_code


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped; 2 wrong configuration, data or weights."""
    return program(start, os.environ, argv)


if __name__ == "__main__":
    sys.exit(main())
