"""Episodes in a batch: what counts, once, and the advantages that a hand works out."""

import json
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ppo.batch.packing import make_micro_batch
from ppo.batch.samples import RolloutBatch, joined, mini_batches, of_prompts
from ppo.config import AlgorithmConfig, load_config
from ppo.data.sampler import PromptSampler
from ppo.estimators import estimate
from ppo.kl import token_rewards
from ppo.rollout.filter import GroupPool
from ppo.rollout.samples import sample_rows
from ppo.rollout.scoring import Scorer
from ppo.rollout.surplus import decoded, encoded
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.ppo.conversations import batch_of, make_episodes, segment

# Two tools between three turns, each of which is rewarded: ids above 90 were observed.
THREE_TURNS = segment(
    [
        *[(11, True, 0.0), (12, True, 0.5), (90, False, 0.0), (91, False, 0.0)],
        *[(13, True, 0.25), (92, False, 0.0), (14, True, 0.0), (15, True, 0.125)],
    ]
)
REQUIRED = ["model.path=tiny", "data.train_files=tiny"]
GRPO = ["algorithm.adv_estimator=grpo", "rollout.n=2"]
LEARNED = [True, True, False, False, True, False, True, True]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with init_distributed(torch.device("cpu")):
        yield build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))


def rewarded(batch: RolloutBatch, scores: torch.Tensor | None = None) -> torch.Tensor:
    scores = (batch.all.scores if scores is None else scores)[batch.rows]
    batch.rewards = token_rewards(
        scores, None, batch.response_mask, kl_coef=0.0, turn_rewards=batch.turn_rewards
    )
    return batch.rewards


def advantages(batch: RolloutBatch, name: Any, **keys: Any) -> torch.Tensor:
    rewarded(batch)
    found = estimate(batch, AlgorithmConfig(adv_estimator=name, **keys)).advantages
    assert (found[~batch.response_mask] == 0).all()
    return found


def whitened(values: list[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / std for value in values]


def test_what_was_observed_is_read_and_counts_nowhere(mesh):
    batch = batch_of(make_episodes([[THREE_TURNS]], [1.0], n=1), mesh)
    assert batch.response_mask.tolist() == [LEARNED]
    assert batch.all.counted.tolist() == [5] and batch.all.response_lengths.tolist() == [8]
    assert batch.is_scored.tolist() == [LEARNED]
    assert rewarded(batch).tolist() == [[0, 0.5, 0, 0, 0.25, 0, 0, 1.125]]  # score 1 at 15
    micro = make_micro_batch(batch, [0], device=torch.device("cpu"))
    assert micro.inputs["input_ids"].tolist() == [[7, 11, 12, 90, 91, 13, 92, 14, 15]]
    assert micro.labels.tolist() == [11, 12, 13, 14, 15]
    assert micro.take(batch.rollout_logprobs).tolist() == pytest.approx(
        [-0.11, -0.12, -0.13, -0.14, -0.15]
    )


def test_gae_passes_through_what_was_observed(mesh):
    batch = batch_of(make_episodes([[THREE_TURNS]], [1.0], n=1), mesh)
    batch.values = torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.3, 9.0, 0.4, 0.5]])
    rewards, values = [0.0, 0.5, 0.25, 0.0, 1.125], [0.1, 0.2, 0.3, 0.4, 0.5, 0.0]
    deltas = [r + 0.9 * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    expected = [
        sum((0.9 * 0.8) ** (later - t) * deltas[later] for later in range(t, 5)) for t in range(5)
    ]
    keys: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}
    found = advantages(batch, "gae", **keys)[0, LEARNED].tolist()
    assert found == pytest.approx(whitened(expected), rel=1e-5)
    returns = estimate(batch, AlgorithmConfig(adv_estimator="gae", **keys)).returns
    assert returns is not None
    assert returns[0, LEARNED].tolist() == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=False)], rel=1e-5
    )


def test_reinforce_plus_plus_carries_the_return_through_what_was_observed(mesh):
    batch = batch_of(make_episodes([[THREE_TURNS]], [1.0], n=1), mesh)
    fifth = 1.125
    fourth, third = 0.9 * fifth, 0.25 + 0.81 * fifth
    second = 0.5 + 0.9 * third
    expected = whitened([0.9 * second, second, third, fourth, fifth])
    found = advantages(batch, "reinforce_plus_plus", gamma=0.9)[0, LEARNED].tolist()
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_an_episode_has_earned_is_its_score_and_its_turns_wherever_people_look(mesh):
    single = segment([(21, True, 0.0)])
    samples = make_episodes([[single], [THREE_TURNS]], [0.0, 0.0], n=2)
    overview = batch_of(samples, mesh).all
    assert overview.scores.tolist() == [0, 0]
    assert overview.total_scores.tolist() == [0, 0.875]
    rows = sample_rows(samples, mesh)
    assert rows is not None and [row["score"] for row in rows] == [0, 0.875]
    scorer = Scorer.__new__(Scorer)
    scorer.had_equal_scores = False
    scorer.warn_of_equal_scores(overview, rows)
    assert not scorer.had_equal_scores


def test_a_group_compares_whole_episodes_of_unequal_turns(mesh):
    single = segment([(21, True, 0.0)])
    batch = batch_of(make_episodes([[THREE_TURNS], [single]], [1.0, 0.5], n=2), mesh)
    found = advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    # 1 + 0.5 + 0.25 + 0.125 = 1.875 against 0.5
    assert found[0, LEARNED].tolist() == pytest.approx([0.6875] * 5)
    assert found[1, 0].item() == pytest.approx(-0.6875)
    assert advantages(batch, "rloo")[1, 0].item() == pytest.approx(-1.375)
    baseline = (5 * 1.875 + 1 * 0.5) / 6  # opo: by the tokens that were sampled
    assert advantages(batch, "opo")[0, 0].item() == pytest.approx(1.875 - baseline)


def test_segments_share_the_score_of_their_episode_and_are_one_sample(mesh):
    first = segment([(31, True, 0.0), (32, True, 0.0)])
    # goes on from the first: what that counts is read here, and counted once
    branch = segment([(31, False, 0.0), (32, False, 0.0), (33, True, 0.5)])
    other = segment([(41, True, 0.0)])
    episodes = [[first, branch], [other], [other], [other, other]]
    batch = batch_of(make_episodes(episodes, [2.0, 1.0, 0.0, 4.0], n=2), mesh)
    overview = batch.all
    assert overview.sample_ids.tolist() == [0, 0, 1, 2, 3, 3]
    assert overview.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert overview.scores.tolist() == [2, 2, 1, 0, 4, 4]
    assert overview.num_samples == 4
    assert overview.has_score_again.tolist() == [True, False, False, False, True, False]
    found = advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert batch.rewards is not None and batch.rewards[:2].tolist() == [[0, 2, 0], [0, 0, 2.5]]
    # 2 + 0.5 against 1; 0 against 4
    expected = [[0.75, 0.75, 0], [0, 0, 0.75], [-0.75, 0, 0], [-2, 0, 0], [2, 0, 0], [2, 0, 0]]
    assert found.flatten().tolist() == pytest.approx([x for row in expected for x in row])
    parts = mini_batches(overview.group_ids, num_prompts=1)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    scores = 10 * overview.scores  # normalised ones
    rewarded(batch, scores)
    rloo = AlgorithmConfig(adv_estimator="rloo")
    whole = estimate(batch, rloo, charged=scores).advantages
    assert whole[0, 0].item() == pytest.approx(20.5 - 10)


def test_an_episode_without_a_token_of_the_policy_is_compared_with_nothing(mesh):
    nothing = segment([(90, False, 0.0)])
    some = segment([(51, True, 0.0)])
    batch = batch_of(
        make_episodes([[nothing], [some], [some], [some, nothing]], [5.0, 1.0, 0.0, 3.0], n=2), mesh
    )
    assert batch.all.failed.tolist() == [True, False, False, False, False]
    assert batch.all.alone.tolist() == [False, True, False, False, False]
    found = advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert found[:, 0].tolist() == pytest.approx([0, 0, -1.5, 1.5, 0])


def test_groups_that_differ_in_rewards_of_turns_are_no_flat_ones(mesh):
    some, better = segment([(51, True, 0.0)]), segment([(51, True, 0.25)])
    samples = make_episodes([[some], [better], [better], [better]], [1.0] * 4, n=2)
    config = load_config(None, [*REQUIRED, "algorithm.filter_groups.enable=true", *GRPO])
    pool = GroupPool(config, mesh, cast("PromptSampler", SimpleNamespace(wants_notes=False)))
    pool.add(samples)
    assert [len(part.prompts) for part in pool._waiting] == [1]


def test_a_crash_costs_its_episode_alone(mesh):
    some, crashed = segment([(61, True, 0.0)]), segment([])
    episodes = [[some], [crashed], [some]]
    batch = batch_of(make_episodes(episodes, [1.0, None, 3.0], n=3), mesh)
    found = advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert found[:, 0].tolist() == pytest.approx([-1, 0, 1])
    assert batch.all.counted.tolist() == [1, 0, 1]


def test_episodes_that_wait_come_back_with_their_rows(mesh):
    branch = segment([(33, True, 0.5)], [7, 31])
    samples = make_episodes([[THREE_TURNS, branch], [branch], [branch], [branch]], [1.0] * 4, n=2)
    second, first = of_prompts(samples, [1]), of_prompts(samples, [0])
    state = json.loads(json.dumps(encoded([second, first], mesh)))
    found = decoded(state, 2, holds=True)
    assert found is not None
    batch, expected = (batch_of(x, mesh) for x in (found, joined([second, first])))
    assert torch.equal(batch.tokens, expected.tokens)
    for name, values in expected.per_token().items():
        assert torch.equal(batch.per_token()[name], values), name
    assert batch.all.sample_ids.tolist() == [0, 1, 2, 2, 3]
