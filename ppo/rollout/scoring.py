"""Samples in, scores out: functions and reward model, failures, and their sum.

Owns step 2 of an iteration, which training, validation and rollout.py share. Must not know engines
or training. Every method is called by every rank, with the samples that its engine has made; they
are scored on their node.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.degeneration import component_sums, variance_parts
from ppo.batch.overview import Overview
from ppo.batch.samples import Samples
from ppo.config import Config
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.metrics import Metrics
from ppo.rewards.contract import RewardError, RewardResult
from ppo.rewards.pool import RewardPool
from ppo.rewards.scorers import builtin
from ppo.rollout.node_scores import NodeScores
from ppo.rollout.overlong import penalise_overlong
from ppo.rollout.reward_data import checked_requests, describe, describe_row
from ppo.rollout.reward_model import RewardModel, build_reward_model, conversation_ids
from ppo.run.run import Run
from sharding.agree import gather

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
    pool: RewardPool | None
    """on local rank 0 of each node, None elsewhere"""
    reward_model: RewardModel | None
    """None where functions score alone"""
    has_shown_failure: bool = False
    """a sample whose reward failed is shown whole once, later ones in a line"""
    had_equal_scores: bool = False
    """in the last step; said when it begins"""

    def score(self, samples: Samples, metrics: Metrics, *, training: bool = False) -> None:
        """Fill samples.scores, the weighted sum of function and reward model, and its components.
        Where neither scores, they stay 0.

        training: with what the score of a training sample has besides, the penalty of its length.

        A sample whose reward failed or is not finite counts as failed. Raises RewardsFailed on all
        ranks when more than reward.max_failed_fraction of the samples failed; the samples then hold
        what is known.
        """
        failures, given_up = dict[int, RewardResult](), None
        scores_itself = self.config.rollout.has_episodes
        samples.are_scored = (
            self.config.uses_function or self.reward_model is not None or scores_itself
        )
        own = own_results(samples)
        if self.config.uses_function:
            results, given_up = self._function_results(samples, own)
            failures |= self._add_function_scores(samples, results, metrics)
        if self.reward_model is not None and given_up is None:
            with metrics.timed("reward_model"):
                scores = self.reward_model.score(samples, self.run)
            failures |= self._add_model_scores(samples, scores, metrics, own)
        failures |= self._add_own_scores(samples, own, metrics)
        if training and self.config.reward.manager == "dapo":
            penalise_overlong(samples, self.config, metrics)
        if samples.greedy is not None and given_up is None:
            self.score(samples.greedy, Metrics(), training=training)
            failures |= self._compare_with_greedy(samples, samples.greedy, metrics)
        samples.scores[samples.failed] = 0.0
        self._report(samples, failures, given_up, metrics)

    def warn_of_equal_scores(self, overview: Overview, rows: Sequence[Mapping[str, Any]]) -> None:
        """Say when all scores of a step are the same, if those of the step before were not.

        rows: some samples of the step, as `sample_rows` gives them.
        """
        scores = overview.total_scores[overview.is_last & ~overview.failed]
        are_equal = overview.are_scored and len(scores) > 1 and bool((scores == scores[0]).all())
        if are_equal and not self.had_equal_scores:
            row = next((row for row in rows if row["score"] is not None), rows[0])
            advice = builtin.advice(row["data_source"]) if self.config.uses_builtin else ""
            logger.warning(
                "all scores of the step are %g: nothing can be learned from them%s; a sample:\n%s",
                *(scores[0].item(), advice, describe_row(row)),
            )
        self.had_equal_scores = are_equal

    def leave_unscored(self, samples: Samples) -> None:
        """Mark samples that will not be scored any more."""
        _marked(samples, dict.fromkeys(range(len(samples)), NOT_SCORED))

    def _add_function_scores(
        self, samples: Samples, results: Mapping[int, RewardResult], metrics: Metrics
    ) -> dict[int, RewardResult]:
        """Add the function's scores to the samples, and return those that failed, by index."""
        weight = self.config.reward.weights.function
        weight = 1.0 if weight is None else weight
        failures = {}
        for index, result in results.items():
            samples.answers[index] = result.answer
            if result.score is not None:
                samples.scores[index] += weight * result.score
                samples.components[index]["function"] = result.score
                if self.reward_model is not None:
                    metrics.add("reward/function_score", result.score, 1)
            elif result.failed or self.reward_model is None:
                failures[index] = result if result.failed else NOT_APPLICABLE
            for name, value in result.extra.items():
                samples.components[index][f"extra/{name}"] = value
                metrics.add(f"reward/extra/{name}", value, 1)
        return _marked(samples, failures)

    def _add_own_scores(
        self, samples: Samples, own: Mapping[int, RewardResult], metrics: Metrics
    ) -> dict[int, RewardResult]:
        """Take the scores of episodes as they are, and return those that failed, by index."""
        for index, result in own.items():
            if result.score is not None:
                samples.scores[index] = result.score
                samples.components[index]["episode"] = result.score
            for name, value in result.extra.items():
                samples.components[index][f"extra/{name}"] = value
                metrics.add(f"reward/extra/{name}", value, 1)
        return _marked(samples, {i: result for i, result in own.items() if result.failed})

    def _add_model_scores(
        self, samples: Samples, scores: Tensor, metrics: Metrics, own: Collection[int]
    ) -> dict[int, RewardResult]:
        """Add the reward model's scores [b], and return those that are not finite, by index.

        own: samples that it does not score.
        """
        scores[list(own)] = 0.0
        finite = scores.isfinite()
        samples.scores += self.config.reward.weights.model * scores
        number = int(finite.sum()) - len(own)
        metrics.add("reward/model_score", scores[finite].sum().item(), number)
        failures = {}
        for index, score in enumerate(scores.tolist()):
            if index in own:
                continue
            samples.components[index]["model"] = score
            if not finite[index] and not samples.failed[index]:
                text = f"the reward model's score is {score}"
                failures[index] = RewardResult(None, "error", text)
        return _marked(samples, failures)

    def _compare_with_greedy(
        self, samples: Samples, greedy: Samples, metrics: Metrics
    ) -> dict[int, RewardResult]:
        """A sample whose greedy sibling has no score has nothing to be compared with: it fails."""
        told = torch.zeros(2, greedy.total)
        told[:, greedy.numbers] = torch.stack([greedy.scores, greedy.failed.float()])
        dist.all_reduce(told, group=self.run.mesh.host_group)  # one rank has each, others zeros
        samples.greedy_scores, failed = told[0], told[1].bool()
        scored = ~failed
        total = samples.greedy_scores[scored].double().sum().item()
        metrics.add("reward/greedy_score", total, int(scored.sum()))
        message = "the reward of the greedy response to the same prompt failed"
        result = RewardResult(None, "error", message)
        alone = [
            index
            for index, number in enumerate(samples.numbers)
            if failed[number // samples.n] and not samples.failed[index]
        ]
        return _marked(samples, dict.fromkeys(alone, result))

    def begin(self, prompts: Sequence[Prompt], n: int) -> NodeScores | None:
        """Scores for samples that are about to be made, which functions score as they end."""
        if not self.config.uses_function:
            return None
        return NodeScores(self.pool, prompts, n, self.run.mesh)

    def _function_results(
        self, samples: Samples, own: Collection[int]
    ) -> tuple[dict[int, RewardResult], str | None]:
        """Results of the samples here by index, but for those that have one of their own.

        Also why scoring was given up before all had one; the same on every rank.
        """
        asked = {i: n for i, n in enumerate(samples.numbers) if i not in own}
        scores: NodeScores | None = samples.scores_to_come
        if scores is None:
            scores = NodeScores(self.pool, samples.prompts, samples.n, self.run.mesh)
            scores.add({number: samples.texts[index] for index, number in asked.items()})
            scores.exchange()
        work = scores.wait(
            lambda failures: self._too_many(failures, samples.total),
            timeout_s=self.config.reward.timeout_s,
        )
        results, problem = self.run.drive(work, label="score")
        results = scores.share(results)
        problems = gather(problem, self.run.mesh.host_group)
        return (
            {index: results.get(number, NOT_SCORED) for index, number in asked.items()},
            next((text for text in problems if text is not None), None),
        )

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
        samples: Samples,
        failures: Mapping[int, RewardResult],
        given_up: str | None,
        metrics: Metrics,
    ) -> None:
        """Count failures over all ranks; say the first, or raise when there are too many."""
        kinds = Counter(result.failed for result in failures.values() if result is not NOT_SCORED)
        first = min((i for i, r in failures.items() if r is not NOT_SCORED), default=None)
        shown = None
        if first is not None:
            prompt, failure = samples.prompt(first), samples.failures[first]
            sample = describe(prompt, samples.texts[first], failure)
            shown = samples.numbers[first], sample, (failure or "").splitlines()[-1]
        scored = [i for i in range(len(samples)) if not samples.failed[i]]
        sums = component_sums(
            samples.scores[scored].tolist(), [samples.components[i] for i in scored]
        )
        told = gather((kinds, shown, sums), self.run.mesh.host_group)
        for name, part in variance_parts([sums for *_, sums in told]).items():
            metrics.set(f"reward/variance_part/{name.removeprefix('extra/')}", part)
        counts = sum((kinds for kinds, *_ in told), Counter())
        metrics.count("reward/failed", counts["error"])
        metrics.count("reward/timeout", counts["timeout"])
        end = given_up or self._too_many(counts.total(), samples.total)
        if end is None and not counts:
            return
        text = ""
        if counts:
            _, sample, line = min(shown for _, shown, _ in told if shown is not None)
            is_new = end is not None or not self.has_shown_failure
            text = f"; the first:\n{sample}" if is_new else f"; the first: {line}"
            self.has_shown_failure = True
        if end is not None:
            raise RewardsFailed(end + text)
        logger.warning(
            "the reward of %d of %d samples failed and they are masked out%s",
            *(counts.total(), samples.total, text),
            extra={"every_rank": True},
        )


def own_results(samples: Samples) -> dict[int, RewardResult]:
    """Of episodes that have scored themselves, or have failed, by index: nothing else scores
    them."""
    return {
        index: RewardResult(one.score, one.failed, one.reason, one.extra)
        for index, one in enumerate(samples.conversations or ())
        if one.score is not None or one.failed is not None
    }


def _marked(samples: Samples, failures: dict[int, RewardResult]) -> dict[int, RewardResult]:
    """Note which samples have failed, and why; the failures."""
    for index, result in failures.items():
        samples.failed[index] = True
        samples.failures[index] = f"{result.failed}: {result.traceback.strip()}"
    return failures


@contextmanager
def open_rewards(config: Config, run: Run, prompts: PromptSets) -> Iterator[RewardPool | None]:
    """The scoring processes of this node, tried out; None where another rank holds them, or
    where the reward model scores alone.

    Raises ConfigError on every rank when the reward cannot work.
    """
    with ExitStack() as owned:
        pool, error = None, None
        if run.mesh.local_rank == 0 and config.uses_function:
            try:
                pool = RewardPool(config.reward, log_path=run.dir / "logs" / "rewards.log")
                owned.enter_context(pool)
                for warning in pool.probe(checked_requests(config, pool.columns, prompts)):
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
        pool=pool,
        reward_model=reward_model,
    )
