"""Samples in, scores out: functions and reward model, failures, and their sum.

Owns step 2 of an iteration, which training, validation and rollout.py share. Must not know engines
or training. Every method is called by every rank and leaves the same batch on each.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ppo.batch import RolloutBatch
from ppo.config import Config
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.metrics import Metrics
from ppo.rewards.contract import RewardError, RewardRequest, RewardResult
from ppo.rewards.pool import RewardPool
from ppo.rollout.reward_model import RewardModel, build_reward_model, conversation_ids
from ppo.run.run import Run
from sharding.agree import gather

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """One reward pool per node, one reward model over all ranks."""

    config: Config
    run: Run
    tokenizer: "PreTrainedTokenizerBase"
    pool: RewardPool | None
    """on local rank 0 of each node, None elsewhere"""
    reward_model: RewardModel | None
    """None where functions score alone"""

    def texts(self, batch: RolloutBatch) -> list[str]:
        """The responses as text, special tokens left out; B entries."""
        return self.tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)

    def score(self, batch: RolloutBatch, metrics: Metrics) -> None:
        """Fill batch.scores: the weighted sum of function and reward model.

        A sample whose reward failed or is not finite is masked out and counted. Raises RuntimeError
        on all ranks when more than reward.max_failed_fraction of the samples failed.
        """
        texts, failures = self.texts(batch), []
        if self.config.reward.uses_function:
            failures += self._add_function_scores(batch, texts, metrics)
        if self.reward_model is not None:
            with metrics.timed("reward_model"):
                scores = self.reward_model.score(batch.prompts, texts, self.run)
            failures += self._add_model_scores(batch, scores, metrics)
        if batch.greedy is not None:
            self.score(batch.greedy, Metrics())
            failures += self._compare_with_greedy(batch, batch.greedy, metrics)
        batch.scores[batch.failed] = 0.0
        batch.response_mask &= ~batch.failed[:, None]
        metrics.set("reward/failed", sum(r.failed != "timeout" for r in failures))
        metrics.set("reward/timeout", sum(r.failed == "timeout" for r in failures))
        self._report(failures, len(texts))

    def _add_function_scores(
        self, batch: RolloutBatch, texts: Sequence[str], metrics: Metrics
    ) -> list[RewardResult]:
        """Add the function's scores to the batch, and return those that failed."""
        weight = self.config.reward.weights.function
        weight = 1.0 if weight is None else weight
        results = self._function_results(batch, texts)
        for index, result in enumerate(results):
            if result.score is None:
                batch.failed[index] = True
                continue
            batch.scores[index] += weight * result.score
            if self.reward_model is not None:
                metrics.add("reward/function_score", result.score, 1)
            for name, value in result.extra.items():
                metrics.add(f"reward/{name}", value, 1)
        return [r for r in results if r.failed]

    def _add_model_scores(
        self, batch: RolloutBatch, scores: Tensor, metrics: Metrics
    ) -> list[RewardResult]:
        """Add the reward model's scores [B] to the batch, and return those that are not finite."""
        finite = scores.isfinite()
        batch.scores += self.config.reward.weights.model * scores
        metrics.add("reward/model_score", scores[finite].sum().item(), int(finite.sum()))
        bad = ~finite & ~batch.failed
        batch.failed |= ~finite
        return [
            RewardResult(None, "error", f"the reward model's score is {score}")
            for score in scores[bad].tolist()
        ]

    def _compare_with_greedy(
        self, batch: RolloutBatch, greedy: RolloutBatch, metrics: Metrics
    ) -> list[RewardResult]:
        """A sample whose greedy sibling has no score has nothing to be compared with: it fails."""
        scored = ~greedy.failed
        metrics.add("reward/greedy_score", greedy.scores[scored].sum().item(), int(scored.sum()))
        alone = greedy.failed[batch.group_ids] & ~batch.failed
        batch.failed |= alone
        message = "the reward of the greedy response to the same prompt failed"
        return [RewardResult(None, "error", message)] * int(alone.sum())

    def _function_results(self, batch: RolloutBatch, texts: Sequence[str]) -> list[RewardResult]:
        """Results of all samples, in order, on every rank; every node scores its share."""
        mesh = self.run.mesh
        share = range(mesh.node_rank, len(texts), mesh.dims.nodes) if self.pool else range(0)
        mine: dict[int, RewardResult] = {}

        def work() -> Iterator[None]:
            if self.pool is None:
                return
            job = self.pool.submit([reward_request(batch.prompts[i], texts[i]) for i in share])
            while not job.poll(0.5):
                self._limit(job.failures, len(texts))  # not only when every sample has hung
                yield
            mine.update(zip(share, job.results, strict=True))

        self.run.drive(work(), label="score")
        parts = gather(mine, mesh.host_group)
        merged = {index: result for part in parts for index, result in part.items()}
        return [merged[index] for index in range(len(texts))]

    def _report(self, failures: list[RewardResult], total: int) -> None:
        if not failures:
            return
        logger.warning(
            "the reward of %d of %d samples failed and they are masked out; the first (%s): %s",
            len(failures),
            total,
            failures[0].failed,
            failures[0].traceback.strip(),
            extra={"every_rank": True},
        )
        self._limit(failures, total)

    def _limit(self, failures: list[RewardResult], total: int) -> None:
        limit = self.config.reward.max_failed_fraction
        if len(failures) > limit * total:
            raise RuntimeError(
                f"the reward failed for {len(failures)} of {total} samples, more than "
                f"reward.max_failed_fraction = {limit}; the first: {failures[0].traceback.strip()}"
            )


def reward_request(prompt: Prompt, text: str = "") -> RewardRequest:
    """A response to a prompt as the reward function gets it."""
    return RewardRequest(
        data_source=prompt.data_source,
        solution_str=text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.messages,
    )


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


def build_scorer(config: Config, run: Run, prompts: PromptSets, pool: RewardPool | None) -> Scorer:
    """Rewards, with the reward model where one is asked for."""
    reward_model = build_reward_model(config, run)
    if reward_model is not None:  # a template that fails is said now, not after a generation
        conversation_ids(reward_model.tokenizer, next(prompts.all()), "")
    return Scorer(
        config=config,
        run=run,
        tokenizer=prompts.tokenizer,
        pool=pool,
        reward_model=reward_model,
    )
