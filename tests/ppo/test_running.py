"""Normalised scores and returns: running moments against numpy, and by hand."""

import json
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from ppo.batch.samples import RolloutBatch
from ppo.config import Config, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.kl import make_kl_controller
from ppo.metrics import Metrics
from ppo.update import Running, add_advantages
from ppo.update.running import RunningMoments
from tests.ppo.batches import make_batch


def config_of(*overrides: str) -> Config:
    keys = ("reward.normalize=true", "critic.normalize_returns=true")
    return load_config("ppo_tiny.yaml", [*keys, "algorithm.use_kl_in_reward=false", *overrides])


def batch_of(scores: list[float], failed: tuple[int, ...] = ()) -> RolloutBatch:
    """Responses of 1, 2, ... tokens."""
    prompts = [Prompt(uid, [1], "", None, {}, "") for uid in range(len(scores))]
    sizes = range(1, len(scores) + 1)
    completions = [Completion([5] * size, [0.0] * size, "stop") for size in sizes]
    batch = make_batch(prompts, completions, scores=scores, failed=failed)
    batch.old_logprobs = torch.zeros(batch.response_mask.shape)
    return batch


def test_moments_of_ragged_batches_are_those_of_all_their_numbers() -> None:
    generator = np.random.default_rng(0)
    moments, seen = RunningMoments(), []
    for size, shift in ((1, 0.0), (7, 1e4), (0, 3.0), (64, -5.0), (3, 1e4)):
        numbers = generator.normal(shift, 2.0, (4, size))
        mask = generator.random((4, size)) < 0.6
        seen += numbers[mask].tolist()
        moments.add(torch.tensor(np.where(mask, numbers, np.nan)), torch.tensor(mask))
        if len(seen) > 1:
            assert moments.scale.mean == pytest.approx(np.mean(seen), rel=1e-12)
            assert moments.scale.std == pytest.approx(np.std(seen, ddof=1), rel=1e-8)
    assert moments.count == len(seen)
    assert RunningMoments(**json.loads(json.dumps(vars(moments)))) == moments


def test_scores_are_normalised_by_all_so_far_and_logged_as_they_are() -> None:
    running, config = Running(config_of("algorithm.adv_estimator=remax")), config_of()
    seen: list[float] = []
    for scores, failed in (([1.0, 3.0, 9.0], (2,)), ([5.0, 0.0, 2.0], ()), ([2.0] * 3, (0, 1, 2))):
        batch, metrics = batch_of(scores, failed), Metrics()
        batch.all = replace(batch.all, greedy_scores=torch.tensor(scores))
        found = running.scores_of(batch, metrics)
        seen += [score for i, score in enumerate(scores) if i not in failed]
        normal = [(score - mean(seen)) / stdev(seen) for score in scores]
        wanted = [0.0 if i in failed else score for i, score in enumerate(normal)]
        assert found.tolist() == pytest.approx(wanted, rel=1e-6)
        assert batch.all.greedy_scores is not None
        assert batch.all.greedy_scores.tolist() == pytest.approx(normal, rel=1e-6)
        assert batch.all.scores.tolist() == scores
        logged = metrics.reduce()
        assert logged["reward/running_mean"] == pytest.approx(mean(seen))
        assert logged["reward/running_std"] == pytest.approx(stdev(seen))
    assert config.reward.normalize


def test_a_first_success_after_many_failures_is_no_hundred_standard_deviations() -> None:
    running = Running(config_of())
    for _ in range(50):
        running.scores_of(batch_of([0.0] * 40), Metrics())
    found = running.scores_of(batch_of([0.0] * 39 + [1.0]), Metrics())
    assert found[-1] == 10.0 and -0.1 < found[0] < 0


def test_a_critic_of_normalised_returns_is_read_in_the_units_of_rewards() -> None:
    """Returns without discount at lam 1 are the score at every token, whatever the values."""
    keys = ("reward.normalize=false", "algorithm.lam=1.0")
    config, controller = config_of(*keys), make_kl_controller(config_of().algorithm.kl_ctrl)
    running, seen = Running(config), []
    output = torch.linspace(-1, 1, 9).view(3, 3)
    scale = (0.0, 1.0)
    for scores in ([10.0, 20.0, 60.0], [0.0, 80.0, 30.0]):
        batch, metrics = batch_of(scores), Metrics()
        batch.values = output.clone()
        add_advantages(batch, config, controller, metrics, running=running)
        torch.testing.assert_close(batch.values, output * scale[1] + scale[0])
        seen += [score for i, score in enumerate(scores) for _ in range(i + 1)]  # a token each
        assert batch.value_scale == scale
        scale = tuple(batch.return_scale)
        assert scale == pytest.approx((mean(seen), stdev(seen)))
        mask, returns = batch.response_mask, torch.tensor(scores)[:, None].expand(3, 3)
        assert batch.returns is not None
        torch.testing.assert_close(batch.returns[mask], returns[mask])
        back = batch.return_scale.denormalised(batch.return_scale.normalised(returns))
        torch.testing.assert_close(back, returns)
        assert metrics.reduce()["critic/returns/running_mean"] == pytest.approx(mean(seen))
    again = Running(config)
    again.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert again.returns == running.returns and again.scores.count == 0


def test_what_is_not_normalised_is_left_as_it_is_and_not_counted() -> None:
    config = config_of("reward.normalize=false", "critic.normalize_returns=false")
    running, batch, metrics = Running(config), batch_of([1.0, 2.0]), Metrics()
    batch.values = torch.zeros(2, 2)
    controller = make_kl_controller(config.algorithm.kl_ctrl)
    add_advantages(batch, config, controller, metrics, running=running)
    assert running.scores.count == running.returns.count == 0
    assert not [name for name in metrics.reduce() if "running" in name]
