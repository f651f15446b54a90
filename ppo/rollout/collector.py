"""Prompts in, samples out: the engine, awake and asleep, and how it samples.

Owns step 1 of an iteration, which training, validation and rollout.py share. Must not know
training or rewards. Every method is called by every rank, and each gets what its engine has made.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppo.batch.samples import Samples
from ppo.config import Config, ValSetConfig
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.engines.agreement import Probe
from ppo.engines.choose import build_engine
from ppo.engines.contract import Completion, Engine, SamplingParams, stop_token_ids
from ppo.errors import StopRequested
from ppo.metrics import Metrics
from ppo.models.folder import model_folder, read_generation_config
from ppo.models.learner import Model
from ppo.rollout.episodes import Episodes, open_episodes, sample_episodes
from ppo.rollout.generate import ScoresToCome, generate
from ppo.run.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STEPS_OF_A_ROUND = 2**20
"""iterations whose noise a round leaves room for: a sampler tells 2**32 apart"""


BeginScores = Callable[[Sequence[Prompt], int], ScoresToCome | None]
"""Given the prompts of a batch and the number of responses to each."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """One engine per rollout group, and what a prompt needs to become a sample."""

    config: Config
    run: Run
    actor: Model
    engine: Engine
    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]
    episodes: Episodes | None = None
    """the user's, where a sample is one"""
    probe: Probe | None = None
    """a question to an engine whose code is not the trainer's"""

    @contextmanager
    def awake(self, metrics: Metrics) -> Iterator[None]:
        """The engine with the actor's weights; its memory is given back afterwards.

        Not where the run fails: the release is collective, and others may be in another collective.
        """
        try:
            with metrics.timed("reshard"), ExitStack() as resident:
                self.run.drive(self.engine.start())
                resident.enter_context(self.actor.on_device())
                work = self.engine.wake(loaded=resident.close)
                found = self.run.drive(work, holds_collectives=True)
            for name, value in found.items():
                metrics.add(name, value, 1)
            if self.probe is not None:
                together = self.engine.generates_together
                self.run.drive(self.probe.ask(self.engine), holds_collectives=together)
            yield
        except StopRequested:
            self._release(metrics)
            raise
        self._release(metrics)
        if self.probe is not None:
            self.probe.check()

    def _release(self, metrics: Metrics) -> None:
        with metrics.timed("release"):
            self.engine.release()

    def validation_params(self, step: int, val: ValSetConfig) -> SamplingParams:
        """Sampling of the validation after `step` iterations, by a set of config.val_sets."""
        assert val.temperature is not None and val.top_p is not None
        sampling = {"temperature": val.temperature, "top_p": val.top_p, "top_k": -1}
        return self._params(step, max_new_tokens=val.max_response_length, **sampling)

    def _params(
        self,
        step: int,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_new_tokens: int | None = None,
    ) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens or self.config.data.max_response_length,
            stop=tuple(self.config.rollout.stop),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.config.rollout.ignore_eos,
            seed=self.config.trainer.seed,
            step=step,
        )

    def sample_training(
        self,
        prompts: Sequence[Prompt],
        metrics: Metrics,
        step: int,
        begin: BeginScores,
        *,
        round: int = 0,
    ) -> Samples:
        """rollout.n responses to each prompt for iteration `step`, and greedy ones where needed.

        round: of the iteration, from 0; each has noise of its own, also for the same prompt.
        """
        rollout = self.config.rollout
        params = self._params(
            step + round * STEPS_OF_A_ROUND,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        samples = self.sample(prompts, params, rollout.n, metrics, begin)
        if self.config.algorithm.needs.greedy:
            greedy = self._params(params.step, temperature=0.0, top_p=1.0, top_k=-1)
            samples.greedy = self.sample(prompts, greedy, 1, metrics, begin)
        return samples

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n: int,
        metrics: Metrics,
        begin: BeginScores,
    ) -> Samples:
        """n responses to each prompt, as tokens and as text.

        begin: what it returns, if anything, is told each response when it has ended.
        """
        if self.episodes is not None:
            return sample_episodes(
                *(self.episodes, self.engine, prompts, params),
                n=n,
                run=self.run,
                metrics=metrics,
                rollout=self.config.rollout,
                scores=begin(prompts, n),
            )
        texts = _Texts(self.tokenizer, begin(prompts, n))
        numbers, completions = generate(
            self.engine, prompts, params, n=n, run=self.run, metrics=metrics, listener=texts
        )
        return Samples(
            prompts=prompts,
            n=n,
            numbers=numbers,
            completions=completions,
            texts=[texts.known[number] for number in numbers],
            scores_to_come=texts.scores,
        )


class _Texts:
    """Decodes samples as they end, and tells who scores them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", scores: ScoresToCome | None) -> None:
        self._tokenizer, self.scores = tokenizer, scores
        self.known: dict[int, str] = {}

    def ended(self, completions: Mapping[int, Completion]) -> None:
        """Responses without special tokens, valid Unicode."""
        if not completions:
            return  # transformers takes no sequences for an empty one
        ids = [np.asarray(c.response_ids).tolist() for c in completions.values()]
        decoded = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts = [text.encode("utf-8", "replace").decode() for text in decoded]
        new = dict(zip(completions, texts, strict=True))
        self.known |= new
        if self.scores is not None:
            self.scores.add(new)

    def exchange(self) -> None:
        """Collective."""
        if self.scores is not None:
            self.scores.exchange()


@contextmanager
def open_collector(
    config: Config, run: Run, prompts: PromptSets, actor: Model
) -> Iterator[Collector]:
    """Start the engine, asleep."""
    folder = model_folder(config.model.path, run.mesh, run.dir)
    stops = model_stop_token_ids(prompts.tokenizer, folder, actor.module.config)
    if not config.rollout.ignore_eos:
        warn_if_nothing_ends(stops, prompts.num_ids)
    engine = build_engine(
        *(config, run.mesh, actor.module, prompts.tokenizer),
        model_path=folder,
        run_dir=run.dir,
        give_up=run.give_up,
    )
    on_gpu = run.mesh.device.type == "cuda"
    is_foreign = config.rollout.engine_kind(cuda=on_gpu) != "torch" and config.model.verify_forward
    with closing(engine), open_episodes(config, run, prompts, stops) as episodes:
        yield Collector(
            config=config,
            run=run,
            actor=actor,
            engine=engine,
            tokenizer=prompts.tokenizer,
            stop_token_ids=stops,
            episodes=episodes,
            probe=Probe(config, run.mesh, actor) if is_foreign else None,
        )


def warn_if_nothing_ends(stops: Sequence[int], num_ids: int) -> None:
    """Say that no response can end by a token: a token beyond the model's ids is never sampled."""
    if not any(stop < num_ids for stop in stops):
        logger.warning(
            "none of the ids that end a response, %s, is one of the %d that are sampled: responses "
            "end at data.max_response_length, or at a text of rollout.stop",
            *(list(stops), num_ids),
        )


def model_stop_token_ids(tokenizer: Any, folder: Path, hf_config: Any) -> tuple[int, ...]:
    """Ids that end a response of this model, for every engine; `folder` is the model's."""
    configs = (hf_config, hf_config.get_text_config())
    return stop_token_ids(
        tokenizer, read_generation_config(folder), *(config.to_dict() for config in configs)
    )
