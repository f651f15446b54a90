"""Train a reward model on preference pairs; every rank runs this program.

    torchrun --nproc_per_node=2 -m ppo.rollout.train_reward_model --config X --data PAIRS \\
        [--val PAIRS] --out FOLDER [key.sub=value ...]

The model of model.path gets a head of one number, and learns that the chosen response of a pair
scores higher than the rejected one (Bradley and Terry; arXiv 1706.03741, eq. 1). FOLDER is then a
sequence classifier for reward.model.path. Owns pairs, their layout and the loss; a conversation is
read as a reward model reads it when it scores. Must not know rollouts.
"""

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import logsigmoid

from ppo.batch.packing import PAD_ID
from ppo.config import Config, ConfigError, Problem, load_config
from ppo.config.cli import build_parser, join_values, path
from ppo.data.dataset import Prompt
from ppo.data.prepare.sources import preference_rows
from ppo.data.reading import Split
from ppo.data.rows import DataError, Row, find_files, read_rows
from ppo.data.tiny import tiny_pairs
from ppo.data.tokenizer import load_tokenizer
from ppo.errors import InputError
from ppo.metrics import Metrics
from ppo.models.build import build_value_model, is_packable
from ppo.models.folder import model_folder
from ppo.models.learner import Learner, make_optimizer
from ppo.models.roles import build_options
from ppo.rollout.reward_model import conversation_ids, until_scored
from ppo.run.run import Run
from ppo.run.start import Launch, open_run, program
from sharding.agree import together
from sharding.checkpoint import Checkpointer
from sharding.mesh import Mesh
from sharding.offload import to_device
from sharding.partition import Budget, assign, count_micro_batches, micro_batches

logger = logging.getLogger("ppo.rollout.train_reward_model")  # __name__ is __main__

NAME = "reward_model"
DESCRIPTION = """Train a reward model on preference pairs; every rank runs this program.

    python -m ppo.rollout.train_reward_model --config tiny/reward_model.yaml --data tiny --out rm
    torchrun --nproc_per_node=8 -m ppo.rollout.train_reward_model --config ppo.yaml \\
        --data data/hh/train.parquet --val data/hh/test.parquet --out models/reward

A step takes --batch_size pairs, over all ranks, in micro-batches of actor.ppo_max_token_len_per_gpu
tokens; actor.optim, actor.fsdp and model.* say how, trainer.seed in which order. Every rank holds
the tokens of all pairs; nothing is saved before the end; a conversation is not cut over ranks."""


class Options(NamedTuple):
    """What the command line says."""

    config: str
    overrides: list[str]
    data: str
    """pairs: {prompt, chosen, rejected} or what `prepare preference` writes; or tiny"""
    val: str | None
    out: Path
    batch_size: int
    epochs: int


class Pair(NamedTuple):
    """Token ids of two conversations, up to the token that is scored."""

    chosen: list[int]
    rejected: list[int]


def parse_options(argv: Sequence[str]) -> Options:
    """Options of the program; what is not an option is an override. Raises ConfigError."""
    parser = build_parser(DESCRIPTION)
    parser.prog = "python -m ppo.rollout.train_reward_model"
    parser.usage = "%(prog)s --config FILE --data PAIRS --out FOLDER [options] [key.sub=value ...]"
    parser.add_argument("--data", required=True, help="pairs: parquet or JSONL, a glob, or tiny")
    parser.add_argument("--val", help="held-out pairs, for the accuracy at the end of each epoch")
    parser.add_argument("--out", required=True, type=path, help="new folder of the reward model")
    parser.add_argument("--batch_size", type=int, default=64, help="pairs of a step (64)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the pairs (1)")
    known, rest = parser.parse_known_args(list(argv))
    return Options(overrides=join_values(rest), **vars(known))


def load_training(options: Options, check: Callable[[Config], list[Problem]]) -> Config:
    """The configuration, whose run folder is beside FOLDER. Raises ConfigError."""
    if options.out.exists() and any(options.out.iterdir()):
        rule = "exists and is not empty"
        raise ConfigError([Problem("--out", str(options.out), rule, "name a new folder")])
    for name in ("batch_size", "epochs"):
        if getattr(options, name) < 1:
            raise ConfigError([Problem(f"--{name}", getattr(options, name), "must be at least 1")])
    # a model that is trained, and nothing that is done with it in a run
    alone = {
        "data.train_files": "tiny",
        "data.val_files": [],
        "data.val_sets": {},
        "reward.model.enable": False,
        "reward.weights.function": 1.0,
        "rollout.tensor_model_parallel_size": 1,
        "data.train_batch_size": options.batch_size,
        "actor.ppo_mini_batch_size": options.batch_size,
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.lam": 1.0,
        "algorithm.filter_groups.enable": False,
        "reward.model.path": None,
        "model.lora_rank": 0,
        "actor.use_kl_loss": False,
        "trainer.default_local_dir": str(options.out.with_name(options.out.name + ".run")),
        "trainer.resume_mode": "disable",
        "trainer.val_only": False,
        "trainer.keep_best": None,
        "trainer.early_stop.metric": None,
        "actor.ulysses_sequence_parallel_size": 1,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in alone.items()]
    return load_config(options.config, [*options.overrides, *overrides], check=check)


def train(config: Config, run: Run, options: Options) -> None:
    """Learn from the pairs and write the folder. Collective."""
    mesh, folder = run.mesh, model_folder(config.model.path, run.mesh, run.dir)
    tokenizer = load_tokenizer(
        model_folder(config.model.tokenizer_path, mesh, run.dir),
        trust_remote_code=config.model.trust_remote_code,
        custom_chat_template=config.model.custom_chat_template,
    )
    module: Any = build_value_model(folder, mesh, **build_options(config, config.models["actor"]))
    text = module.config.get_text_config()
    pad = getattr(text, "pad_token_id", None)

    def read(files: str, split: Split) -> list[Pair]:
        pairs: list[Pair] = []
        together(
            lambda: pairs.extend(fitting([*read_pairs(files, tokenizer, pad, split)], text, files)),
            *(mesh.host_group, InputError),
            expected=InputError,
            name_ranks=False,
        )
        return pairs

    pairs, held_out = read(options.data, "train"), read(options.val, "val") if options.val else []
    section, size = config.actor, options.batch_size
    per_epoch = len(pairs) // size
    if per_epoch == 0:
        raise InputError(f"--data = {options.data}: {len(pairs)} pairs, and --batch_size is {size}")
    steps = options.epochs * per_epoch
    learner = Learner(
        name=NAME,
        module=module,
        optimizer=make_optimizer(module, section.optim, mesh.device),
        optim=section.optim,
        grad_clip=section.grad_clip,
        total_steps=steps,
        device=mesh.device,
    )
    layout = Layout(config, mesh, is_packable(module) and config.model.use_remove_padding)
    run.begin()
    with learner.updating():
        for step in run.polled(range(1, steps + 1)):
            epoch, place = divmod(step - 1, per_epoch)
            order = torch.Generator().manual_seed(config.trainer.seed + epoch)
            chosen = torch.randperm(len(pairs), generator=order)[place * size : (place + 1) * size]
            metrics = Metrics(mesh.device)
            learner.set_lr(step)
            learn(learner, [pairs[i] for i in chosen.tolist()], layout, metrics)
            values = metrics.reduce(mesh.host_group)
            logger.info(
                "step %d of %d | loss %.4f | right %.3f",
                step,
                steps,
                values["loss"],
                values["right"],
            )
            if held_out and (step == steps or place == per_epoch - 1):
                found = accuracy(module, held_out, layout)
                logger.info("step %d | %.3f of %d held-out pairs right", step, found, len(held_out))
    save(module, mesh, tokenizer, options.out)


def read_pairs(
    files: str, tokenizer: Any, pad_token_id: int | None, split: Split
) -> Iterator[Pair]:
    """Pairs of preference files, as token ids. Raises InputError.

    A row has prompt (text or messages), chosen and rejected, or is one of `prepare preference`,
    whose extra_info has these. `tiny`: made from a seed.
    """
    if files == "tiny":
        made = enumerate(tiny_pairs(split, seed=0))
        rows = (Row(Path("tiny"), index, None, values) for index, values in made)
    else:
        rows = (row for file in find_files(files) for row in read_rows(file))
    for row in rows:
        extra = row.values.get("extra_info")
        values = row.values
        if not isinstance(extra, dict) or "chosen" not in extra:
            [values] = preference_rows([row], split)
            extra = values["extra_info"]
        prompt = Prompt(0, [], "", None, {}, values["prompt"], row.where)
        texts = [extra.get("chosen"), extra.get("rejected")]
        named = [text for text in texts if isinstance(text, str)]
        if len(named) < 2:
            raise row.error("needs the texts chosen and rejected", "extra_info")
        try:
            ids = [conversation_ids(tokenizer, prompt, text) for text in named]
        except InputError as error:
            raise DataError(row.where, str(error)) from error
        yield Pair(*(until_scored(each, pad_token_id) for each in ids))


def fitting(pairs: Sequence[Pair], text_config: Any, files: str) -> list[Pair]:
    """The pairs that the model can take; those that leave it no position are told and left out, as
    a reward model does not score them either. Raises InputError where its ids do not reach."""
    highest = max((max(ids) for pair in pairs for ids in pair), default=0)
    if highest >= text_config.vocab_size:
        raise InputError(
            f"{files}: its tokens have ids up to {highest}, and the model has "
            f"{text_config.vocab_size} of them: use its own tokenizer (model.tokenizer_path)"
        )
    limit = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    kept = [pair for pair in pairs if max(map(len, pair)) < limit]
    if len(kept) < len(pairs):
        logger.warning(
            "%s: %d of %d pairs are left out: a conversation of %d tokens or more leaves none of "
            "the model's positions (max_position_embeddings)",
            *(files, len(pairs) - len(kept), len(pairs), limit),
        )
    return kept


class Layout(NamedTuple):
    """How pairs become forward passes: both conversations of a pair in the same one."""

    config: Config
    mesh: Mesh
    packed: bool

    def plan(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """This rank's pairs as micro-batches, equally many on every rank. Collective."""
        dims, section = self.mesh.dims, self.config.actor
        lengths = [len(pair.chosen) + len(pair.rejected) for pair in pairs]
        budget = Budget(dp=dims.dp, tokens=section.ppo_max_token_len_per_gpu)
        mine = assign(lengths, range(len(pairs)), budget)[self.mesh.dp_rank]
        number = torch.tensor(max(1, count_micro_batches(lengths, mine, budget)))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.mesh.host_group)
        parts = micro_batches(lengths, mine, budget, int(number))
        return [[pairs[index] for index in part] for part in parts]

    def margins(self, module: nn.Module, pairs: Sequence[Pair]) -> Tensor:
        """Score of the chosen minus that of the rejected conversation, [pairs]."""
        documents = [torch.tensor(ids) for pair in pairs for ids in pair]
        inputs = self._inputs(documents or [torch.tensor([PAD_ID])])
        scores = module(**inputs)[: len(documents)]
        return scores[0::2] - scores[1::2] + 0.0 * scores.sum()

    def _inputs(self, documents: list[Tensor]) -> dict[str, Tensor]:
        """One packed row, or padded rows; scored at the last token of each document."""
        lengths = torch.tensor([len(d) for d in documents])
        positions = [torch.arange(len(d)) for d in documents]
        if self.packed:
            bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
            rows, position_ids = torch.cat(documents)[None], torch.cat(positions)[None]
            inputs, last = {"cu_seqlens": bounds}, bounds[1:] - 1
        else:
            pad = nn.utils.rnn.pad_sequence
            rows, position_ids = pad(documents, True, PAD_ID), pad(positions, True)
            mask = torch.arange(rows.shape[1]) < lengths[:, None]
            inputs = {"attention_mask": to_device(mask.long(), self.mesh.device)}
            last = torch.arange(len(documents)) * rows.shape[1] + lengths - 1
        moved = {"input_ids": rows, "position_ids": position_ids, "positions": last}
        return inputs | {name: to_device(x, self.mesh.device) for name, x in moved.items()}


def learn(learner: Learner, pairs: Sequence[Pair], layout: Layout, metrics: Metrics) -> None:
    """One optimizer step: -log sigmoid(margin), mean over all pairs. Collective."""
    ranks = layout.mesh.dims.world_size  # FSDP takes the mean over them
    for part in layout.plan(pairs):
        margins = layout.margins(learner.module, part)
        loss = -logsigmoid(margins).sum()
        (loss * ranks / len(pairs) + 0.0 * margins.sum()).backward()
        metrics.add("loss", loss.detach(), len(part))
        metrics.add("right", (margins > 0).sum(), len(part))
    if math.isfinite(learner.clip_gradients()):  # the same on every rank
        learner.step()
    else:
        learner.drop_gradients()


def accuracy(module: nn.Module, pairs: Sequence[Pair], layout: Layout) -> float:
    """Share of the pairs whose chosen conversation scores higher. Collective."""
    right = torch.zeros(1)
    with torch.no_grad():
        for part in layout.plan(pairs):
            right += (layout.margins(module, part) > 0).sum().cpu()
    dist.all_reduce(right, group=layout.mesh.dp_group)
    return right.item() / len(pairs)


def save(module: nn.Module, mesh: Mesh, tokenizer: Any, out: Path) -> None:
    """Write the classifier and its tokenizer as a Hugging Face folder. Collective."""
    beside = out.with_name(out.name + ".tmp")
    with Checkpointer(
        *(beside, mesh), async_save=False, assets=[tokenizer], hf_models=[NAME]
    ) as checkpoints:
        checkpoints.save(1, {NAME: module}, {}, {})

    def move() -> None:
        if mesh.rank == 0:
            shutil.rmtree(out, ignore_errors=True)  # an empty folder
            (beside / "step_00000001" / f"hf_{NAME}").rename(out)
            shutil.rmtree(beside)

    together(move, mesh.host_group, expected=OSError)
    logger.info("the reward model is in %s", out)


def start(launch: Launch, words: Sequence[str]) -> int:
    """Train as the command line says; the exit code."""
    options = parse_options(words)
    config = load_training(options, launch.problems)
    with open_run(config, launch, sys.argv) as run:
        train(config, run, options)
    return run.exit_code


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped; 2 wrong configuration, data or weights."""
    return program(start, os.environ, argv)


if __name__ == "__main__":
    sys.exit(main())
