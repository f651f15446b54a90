"""Pieces of a run around its models; train_ppo.py and rollout.py share them.

Owns construction only: no loop, no order of steps. Models are built in ppo/build.py.
Every rank calls everything here.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ppo.build import build_reward_model, model_folder
from ppo.collect import Collector, reward_request
from ppo.config import Config
from ppo.data.dataset import Prompt, Prompts, Split, build_dataset
from ppo.data.sampler import PromptSampler
from ppo.data.tokenizer import load_tokenizer
from ppo.engines.contract import stop_token_ids
from ppo.learner import Frozen
from ppo.reward_model import conversation_ids
from ppo.rewards.contract import RewardError
from ppo.rewards.pool import RewardPool
from ppo.run import Run
from ppo.tracking import Tracker
from rollout import build_engine
from sharding.checkpoint import Checkpointer

if TYPE_CHECKING:  # --check answers without the seconds that transformers takes
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptSets(NamedTuple):
    """Tokenizer and prompts of a run; val is empty without data.val_files."""

    tokenizer: "PreTrainedTokenizerBase"
    train: Prompts
    val: Prompts

    def all(self) -> Iterator[Prompt]:
        """Training prompts, then validation prompts."""
        for prompts in (self.train, self.val):
            yield from (prompts[index] for index in range(len(prompts)))

    def sampler(self, config: Config) -> PromptSampler:
        """The order of the training prompts."""
        return PromptSampler(
            self.train,
            batch_size=config.data.train_batch_size,
            shuffle=config.data.shuffle,
            seed=config.data.seed,
            drop_last=config.data.drop_last,
        )


def load_prompts(config: Config, run: Run) -> PromptSets:
    """Load the tokenizer and all prompts. Raises DataError, on every rank alike."""
    tokenizer = load_tokenizer(
        model_folder(config.model.tokenizer_path, run),
        trust_remote_code=config.model.trust_remote_code,
        custom_chat_template=config.model.custom_chat_template,
    )

    def load(files: Sequence[str], split: Split) -> Prompts:
        if not files:
            return []
        return build_dataset(
            files,
            tokenizer,
            config.data,
            split=split,
            need_data_source=config.reward.uses_builtin,
        )

    train = load(config.data.train_files, "train")
    return PromptSets(tokenizer, train, load(config.data.val_files, "val"))


@contextmanager
def open_rewards(config: Config, run: Run, prompts: PromptSets) -> Iterator[RewardPool | None]:
    """The scoring processes of this node, tried out; None where another rank holds them, or
    where the reward model scores alone.

    Raises ConfigError on every rank when the reward cannot work.
    """
    with ExitStack() as owned:
        pool, error = None, None
        if run.mesh.local_rank == 0 and config.reward.uses_function:
            try:
                pool = RewardPool(config.reward, log_path=run.dir / "logs" / "rewards.log")
                owned.enter_context(pool)
                for warning in pool.probe(map(reward_request, prompts.all())):
                    logger.warning("%s", warning)
            except RewardError as problem:
                error = problem
        run.agree(error)
        yield pool


@contextmanager
def open_collector(
    config: Config, run: Run, prompts: PromptSets, actor: Frozen, pool: RewardPool | None
) -> Iterator[Collector]:
    """Start the engine, asleep, and put it together with tokenizer and rewards."""
    reward_model = build_reward_model(config, run)
    if reward_model is not None:  # a template that fails is said now, not after a generation
        conversation_ids(reward_model.tokenizer, next(prompts.all()), "")
    folder = model_folder(config.model.path, run)
    engine = build_engine(config, run.mesh, folder, prompts.tokenizer, run.dir, module=actor.module)
    with closing(engine):
        yield Collector(
            config=config,
            run=run,
            engine=engine,
            tokenizer=prompts.tokenizer,
            pool=pool,
            reward_model=reward_model,
            stop_token_ids=_stop_token_ids(prompts, folder),
        )


def _stop_token_ids(prompts: PromptSets, folder: Path) -> tuple[int, ...]:
    from transformers import GenerationConfig

    has_file = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if has_file else None
    return stop_token_ids(prompts.tokenizer, generation)


def total_steps_of(config: Config, sampler: PromptSampler) -> int:
    """Iterations of the run: trainer.total_training_steps, else all of trainer.total_epochs."""
    epochs = config.trainer.total_epochs * len(sampler)
    return config.trainer.total_training_steps or epochs


def open_tracker(config: Config, run: Run) -> Tracker:
    """Where metrics and samples go; rank 0 writes."""
    return Tracker(run.dir, enabled=run.mesh.rank == 0, loggers=config.trainer.logger)


def open_checkpoints(config: Config, run: Run, prompts: PromptSets) -> Checkpointer:
    """The checkpoints of the run folder."""
    wants_hf = "hf_model" in config.actor.checkpoint.save_contents
    return Checkpointer(
        run.dir / "checkpoints",
        run.mesh,
        async_save=config.trainer.async_save,
        max_to_keep=config.trainer.max_ckpt_to_keep,
        keep_best=config.trainer.keep_best is not None,
        assets=[prompts.tokenizer],
        hf_models=["actor"] if wants_hf else [],
    )
