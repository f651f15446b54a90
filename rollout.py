"""Generate from a checkpoint, score, report, write the samples; every rank runs this program.

    torchrun --nproc_per_node=8 rollout.py --config X [--checkpoint RUN_OR_STEP_OR_HF_DIR] \\
        --data FILE --out samples.parquet [key.sub=value ...]

Owns its command line and which weights a path means. Sampling is that of validation
(rollout.val_kwargs). Must not know training.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import record

from ppo.config import Config, ConfigError, Problem, load_config
from ppo.config.cli import build_parser, join_values, path
from ppo.errors import InputError
from ppo.files import replace_text
from ppo.models.build import build_causal_lm
from ppo.models.folder import model_folder
from ppo.models.learner import Model
from ppo.models.roles import build_options
from ppo.rollout.collector import open_collector
from ppo.rollout.figures import metrics_of, summarise
from ppo.rollout.prompts import open_prompts
from ppo.rollout.samples import write_samples
from ppo.rollout.scoring import build_scorer, open_rewards
from ppo.rollout.validation import Job, sample_and_score
from ppo.run.run import Run
from ppo.run.signals import EXIT_INTERRUPTED
from ppo.run.start import Launch, open_run
from sharding.checkpoint import Checkpointer, CheckpointError
from sharding.checkpoint.folder import candidates

logger = logging.getLogger("rollout")

DESCRIPTION = """\
Generate from a checkpoint, score the samples and write them; every rank runs this program.

    python rollout.py --config ppo.yaml --data data/gsm8k/test.parquet --out untrained.parquet
    torchrun --nproc_per_node=8 rollout.py --config ppo.yaml --checkpoint runs/ppo/first \\
        --data data/gsm8k/test.parquet --out samples.parquet rollout.val_kwargs.n=8

Prints and writes mean score, pass@k, maj@n and lengths, by data source. Without --checkpoint it is
the untrained model.path that is evaluated.
"""


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


def parse_options(argv: Sequence[str]) -> Options:
    """Options of rollout.py; what is not an option is an override. Raises ConfigError."""
    parser = build_parser(DESCRIPTION)
    parser.usage = "%(prog)s --config FILE --data FILE --out FILE [options] [key.sub=value ...]"
    parser.add_argument("--checkpoint", type=path, help="run, step or Hugging Face folder")
    parser.add_argument("--data", required=True, help="prompts: parquet or JSONL, or a glob")
    parser.add_argument("--out", required=True, type=path, help="samples: .parquet or .jsonl")
    parser.add_argument("--pass_score", type=float, default=1.0, help="score that counts as passed")
    known, rest = parser.parse_known_args(list(argv))
    return Options(overrides=join_values(rest), **vars(known))


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
    ]
    if options.out.suffix not in (".parquet", ".jsonl"):
        rule = "must end with .parquet or .jsonl"
        raise ConfigError([Problem("--out", str(options.out), rule)])
    folder = options.checkpoint
    if folder is not None and (folder / "config.json").is_file():
        overrides.append(f"model.path={json.dumps(str(folder))}")
    elif folder is not None and not _holds_checkpoints(folder):
        raise ConfigError(
            [
                Problem(
                    "--checkpoint",
                    str(folder),
                    "is neither a run, nor a checkpoint, nor a Hugging Face folder",
                    "give a folder with checkpoints/, manifest.json or config.json",
                )
            ]
        )
    config = load_config(options.config, overrides, check=check)
    limits = [config.data.train_max_samples, config.data.val_max_samples]
    limit = min((limit for limit in limits if limit > 0), default=-1)
    return replace(config, data=replace(config.data, train_max_samples=limit))


def evaluate(config: Config, run: Run, options: Options) -> None:
    """Generate, score, log a line per data source, write samples and figures. Collective.

    When too many rewards fail, the samples are written all the same, each with its failure.
    """

    def keep(_: str, rows: Sequence[Mapping[str, Any]]) -> None:
        write_samples(options.out, rows)
        logger.info("%d samples written to %s", len(rows), options.out)

    prompts = open_prompts(config, run)
    if config.data.train_max_samples > 0:
        limit = config.data.train_max_samples
        logger.info("data.train_max_samples or val_max_samples: the first %d rows only", limit)
    actor = _load_actor(config, run, options.checkpoint, prompts.num_ids)
    with (
        open_rewards(config, run, prompts) as pool,
        open_collector(config, run, prompts, actor) as collector,
    ):
        scorer = build_scorer(config, run, prompts, pool)
        run.begin()
        job = Job(prompts.train, config.sampling_of([options.data]))
        found = sample_and_score(collector, scorer, {"": job}, step=0, keep=keep)
    if found is not None:
        summaries = summarise(found[""], pass_score=options.pass_score)
        for source, summary in summaries.items():
            logger.info("%s: %s", source, summary)
        figures = metrics_of(summaries, config.rollout.val_kwargs.n)
        replace_text(figures_file(options.out), json.dumps(figures, indent=1) + "\n")


def figures_file(out: Path) -> Path:
    """Beside the samples: {"val-core/SOURCE/reward/mean@N": 0.5, ...}, as training logs them."""
    return out.with_suffix(".metrics.json")


def _load_actor(config: Config, run: Run, checkpoint: Path | None, num_ids: int) -> Model:
    """The model of model.path, with the weights of a checkpoint of ours where one is given."""
    is_ours = checkpoint is not None and not (checkpoint / "config.json").is_file()
    role = config.models["actor"]
    options = build_options(config, role if is_ours else role._replace(lora=None))
    module = build_causal_lm(
        model_folder(config.model.path, run.mesh, run.dir),
        run.mesh,
        num_ids=num_ids,
        **options | {"checkpointing": False, "forward_only": True},
    )
    actor = Model(
        module=module,
        device=run.mesh.device,
        param_offload=config.actor.fsdp.param_offload,
    )
    actor.rest()
    if checkpoint is not None and is_ours:
        try:
            with Checkpointer(checkpoint, run.mesh) as checkpoints:
                checkpoints.load_newest(checkpoint, {"actor": module})
        except CheckpointError as error:
            raise InputError(f"--checkpoint = {checkpoint}: {error}") from error
    return actor


def _holds_checkpoints(path: Path) -> bool:
    try:
        return bool(candidates(path))
    except CheckpointError:
        return False


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped; 2 wrong configuration, data or weights."""
    launch = Launch.from_env(os.environ)
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        config = load_evaluation(options, launch.problems)
        with open_run(config, launch, sys.argv) as run:
            evaluate(config, run, options)
        return run.exit_code
    except InputError as error:
        return launch.report(error)
    except KeyboardInterrupt:  # before the run could take it
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
