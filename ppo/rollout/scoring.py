"""Samples in, scores out: functions and reward model, failures, and their sum.

Owns step 2 of an iteration, which training, validation and rollout.py share. Must not know engines
or training. Every method is called by every rank and leaves the same batch on each.
"""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ppo.batch import RolloutBatch
from ppo.config import Config
from ppo.data.prompts import PromptSets
from ppo.metrics import Metrics
from ppo.rewards.contract import RewardError, RewardResult
from ppo.rewards.pool import RewardPool
from ppo.rewards.scorers import builtin
from ppo.rollout.reward_data import (
    check_columns,
    check_truths,
    describe,
    reward_request,
    warn_of_null_truths,
)
from ppo.rollout.reward_model import RewardModel, build_reward_model, conversation_ids
from ppo.run.run import Run
from sharding.agree import gather

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


NOT_APPLICABLE = RewardResult(
    None, "error", "no reward function applies to the sample: all returned None"
)
NOT_SCORED = RewardResult(None, "not scored", "the rewards were given up before")


class RewardsFailed(RuntimeError):
    """Too many samples of a batch have no score; the batch says which, and why. On every rank."""


@dataclass(kw_only=True)
class Scorer:
    """One reward pool per node, one reward model over all ranks."""

    config: Config
    run: Run
    tokenizer: "PreTrainedTokenizerBase"
    pool: RewardPool | None
    """on local rank 0 of each node, None elsewhere"""
    reward_model: RewardModel | None
    """None where functions score alone"""
    has_shown_failure: bool = False
    """a sample whose reward failed is shown whole once, later ones in a line"""
    had_equal_scores: bool = False
    """in the last step; said when it begins"""

    def texts(self, batch: RolloutBatch) -> list[str]:
        """The responses as text, special tokens left out; B entries, valid Unicode."""
        texts = self.tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
        return [text.encode("utf-8", "replace").decode() for text in texts]

    def score(self, batch: RolloutBatch, metrics: Metrics) -> None:
        """Fill batch.scores, the weighted sum of function and reward model, and what it is made of.

        A sample whose reward failed or is not finite is masked out and counted. Raises
        RewardsFailed when more than reward.max_failed_fraction of the samples failed; the batch
        then holds what is known.
        """
        texts, failures, given_up = self.texts(batch), dict[int, RewardResult](), None
        if self.config.reward.uses_function:
            results, given_up = self._function_results(batch, texts)
            failures |= self._add_function_scores(batch, results, metrics)
        if self.reward_model is not None and given_up is None:
            with metrics.timed("reward_model"):
                scores = self.reward_model.score(batch.prompts, texts, self.run)
            failures |= self._add_model_scores(batch, scores, metrics)
        if batch.greedy is not None and given_up is None:
            self.score(batch.greedy, Metrics())
            failures |= self._compare_with_greedy(batch, batch.greedy, metrics)
        batch.scores[batch.failed] = 0.0
        batch.response_mask &= ~batch.failed[:, None]
        metrics.set("reward/failed", sum(r.failed == "error" for r in failures.values()))
        metrics.set("reward/timeout", sum(r.failed == "timeout" for r in failures.values()))
        self._report(batch, texts, failures, given_up)

    def warn_of_equal_scores(self, batch: RolloutBatch) -> None:
        """Say when all scores of a step are the same, if those of the step before were not."""
        scored = (~batch.failed).nonzero()[:, 0].tolist()
        scores = batch.scores[scored]
        are_equal = len(scored) > 1 and bool((scores == scores[0]).all())
        if are_equal and not self.had_equal_scores:
            prompt, text = batch.prompts[scored[0]], self.texts(batch)[scored[0]]
            advice = builtin.advice(prompt.data_source) if self.config.reward.uses_builtin else ""
            logger.warning(
                "all scores of the step are %g: nothing can be learned from them%s; a sample:\n%s",
                *(scores[0].item(), advice, describe(prompt, text, None)),
            )
        self.had_equal_scores = are_equal

    def leave_unscored(self, batch: RolloutBatch) -> None:
        """Mark all samples of a batch that will not be scored any more."""
        _marked(batch, dict.fromkeys(range(len(batch)), NOT_SCORED))

    def _add_function_scores(
        self, batch: RolloutBatch, results: Sequence[RewardResult], metrics: Metrics
    ) -> dict[int, RewardResult]:
        """Add the function's scores to the batch, and return those that failed, by sample."""
        weight = self.config.reward.weights.function
        weight = 1.0 if weight is None else weight
        failures = {}
        for index, result in enumerate(results):
            if result.score is not None:
                batch.scores[index] += weight * result.score
                batch.components[index]["function"] = result.score
                if self.reward_model is not None:
                    metrics.add("reward/function_score", result.score, 1)
            elif result.failed or self.reward_model is None:
                failures[index] = result if result.failed else NOT_APPLICABLE
            for name, value in result.extra.items():
                batch.components[index][f"extra/{name}"] = value
                metrics.add(f"reward/extra/{name}", value, 1)
        return _marked(batch, failures)

    def _add_model_scores(
        self, batch: RolloutBatch, scores: Tensor, metrics: Metrics
    ) -> dict[int, RewardResult]:
        """Add the reward model's scores [B], and return those that are not finite, by sample."""
        finite = scores.isfinite()
        batch.scores += self.config.reward.weights.model * scores
        metrics.add("reward/model_score", scores[finite].sum().item(), int(finite.sum()))
        failures = {}
        for index, score in enumerate(scores.tolist()):
            batch.components[index]["model"] = score
            if not finite[index] and not batch.failed[index]:
                text = f"the reward model's score is {score}"
                failures[index] = RewardResult(None, "error", text)
        return _marked(batch, failures)

    def _compare_with_greedy(
        self, batch: RolloutBatch, greedy: RolloutBatch, metrics: Metrics
    ) -> dict[int, RewardResult]:
        """A sample whose greedy sibling has no score has nothing to be compared with: it fails."""
        scored = ~greedy.failed
        metrics.add("reward/greedy_score", greedy.scores[scored].sum().item(), int(scored.sum()))
        alone = greedy.failed[batch.group_ids] & ~batch.failed
        message = "the reward of the greedy response to the same prompt failed"
        result = RewardResult(None, "error", message)
        return _marked(batch, dict.fromkeys(alone.nonzero()[:, 0].tolist(), result))

    def _function_results(
        self, batch: RolloutBatch, texts: Sequence[str]
    ) -> tuple[list[RewardResult], str | None]:
        """Results of all samples, in order, on every rank; every node scores its share.

        Also why scoring was given up before all had one; the same on every rank.
        """
        mesh = self.run.mesh
        share = range(mesh.node_rank, len(texts), mesh.dims.nodes) if self.pool else range(0)

        def work() -> Generator[None, None, tuple[dict[int, RewardResult], str | None]]:
            if self.pool is None:
                return {}, None
            job = self.pool.submit([reward_request(batch.prompts[i], texts[i]) for i in share])
            problem = None
            try:
                while not job.poll(0.5):
                    if problem := self._too_many(len(job.failures), len(texts)):
                        break  # not only when every sample has hung
                    yield
            except RewardError as error:
                problem = str(error)
            return {share[index]: result for index, result in job.finished.items()}, problem

        parts = gather(self.run.drive(work(), label="score"), mesh.host_group)
        merged = {index: result for part, _ in parts for index, result in part.items()}
        results = [merged.get(index, NOT_SCORED) for index in range(len(texts))]
        return results, next((problem for _, problem in parts if problem is not None), None)

    def _too_many(self, failures: int, total: int) -> str | None:
        """What is said when more samples failed than may."""
        limit = self.config.reward.max_failed_fraction
        if failures <= limit * total:
            return None
        return (
            f"the reward failed for {failures} of {total} samples, more than "
            f"reward.max_failed_fraction = {limit}"
        )

    def _report(
        self,
        batch: RolloutBatch,
        texts: Sequence[str],
        failures: Mapping[int, RewardResult],
        given_up: str | None,
    ) -> None:
        failed = [index for index, result in failures.items() if result is not NOT_SCORED]
        end = given_up or self._too_many(len(failed), len(texts))
        if end is None and not failed:
            return
        shown = ""
        if failed and (end is not None or not self.has_shown_failure):
            first = failed[0]
            sample = describe(batch.prompts[first], texts[first], batch.failures[first])
            shown = f"; the first:\n{sample}"
            self.has_shown_failure = True
        elif failed:
            shown = f"; the first: {(batch.failures[failed[0]] or '').splitlines()[-1]}"
        if end is not None:
            raise RewardsFailed(end + shown)
        logger.warning(
            "the reward of %d of %d samples failed and they are masked out%s",
            len(failed),
            len(texts),
            shown,
            extra={"every_rank": True},
        )


def _marked(batch: RolloutBatch, failures: dict[int, RewardResult]) -> dict[int, RewardResult]:
    """Note in the batch which samples have failed, and why; the failures."""
    for index, result in failures.items():
        batch.failed[index] = True
        batch.failures[index] = f"{result.failed}: {result.traceback.strip()}"
    return failures


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
                check_columns(pool.columns, prompts)
                if config.reward.uses_builtin:
                    check_truths(prompts, config.reward.function.kwargs)
                else:
                    warn_of_null_truths(prompts)
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
