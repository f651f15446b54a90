"""Mean and variance over the run, of scores and of returns, and what is normalised with them.

Owns when the statistics are taken and what they are applied to: scores before the KL penalty, the
critic's values and targets. They are the same on every rank, and part of the train state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo.advantages import all_reduced
from ppo.batch.samples import RolloutBatch, Scale
from ppo.config import Config
from ppo.metrics import Metrics

LARGEST = 10.0
"""standard deviations that a normalised score is kept within: a first success after many failures
would be hundreds of them"""


@dataclass
class RunningMoments:
    """Count, mean and variance of all numbers so far, in float64.

    Batches are combined by Chan et al.'s update (Stanford CS-TR-79-773, 1979, eq. 2.1), each with
    its squares taken around its own mean.
    """

    count: float = 0.0
    mean: float = 0.0
    square_sum: float = 0.0
    """of differences from the mean"""

    def add(self, x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> None:
        """Take in the numbers where the mask is True.

        group: ranks that hold a part of them each, as for `masked_whiten`; every one calls.
        """
        x = torch.where(mask, x.double(), 0.0)
        count, total = all_reduced(torch.stack([mask.sum().double(), x.sum()]), group).tolist()
        if count == 0:
            return
        mean = total / count
        squares = torch.where(mask, x - mean, 0.0).square().sum().reshape(1)
        square_sum = all_reduced(squares, group).item()
        whole, difference = self.count + count, mean - self.mean
        self.square_sum += square_sum + difference**2 * self.count * count / whole
        self.mean += difference * count / whole
        self.count = whole

    @property
    def scale(self) -> Scale:
        """Mean and unbiased standard deviation; 0 and 1 as long as there are no two numbers."""
        if self.count < 2:
            return Scale()
        return Scale(self.mean, (self.square_sum / (self.count - 1) + 1e-8) ** 0.5)


class Running:
    """The statistics of a run; those that nothing is normalised with stay empty."""

    def __init__(self, config: Config) -> None:
        self._of_scores = config.reward.normalize
        self._of_returns = config.critic_enabled and config.critic.normalize_returns
        self.scores, self.returns = RunningMoments(), RunningMoments()

    def scores_of(self, batch: RolloutBatch, metrics: Metrics) -> Tensor:
        """Scores of all samples, [B]: as they are, or normalised with theirs already counted.

        Those of greedy responses, which they are compared with, are brought to the same units.
        """
        overview = batch.all
        if not self._of_scores:
            return overview.scores
        self.scores.add(overview.scores, ~overview.failed & overview.is_last)
        scale = self.scores.scale
        metrics.set("reward/running_mean", scale.mean)
        metrics.set("reward/running_std", scale.std)

        def normalised(scores: Tensor) -> Tensor:
            return scale.normalised(scores).clamp(-LARGEST, LARGEST)

        if overview.greedy_scores is not None:
            greedy = normalised(overview.greedy_scores)
            batch.all = replace(overview, greedy_scores=greedy)
        return torch.where(overview.failed, 0.0, normalised(overview.scores))

    def turn_rewards_of(self, batch: RolloutBatch) -> Tensor | None:
        """Rewards of turns, [b, T], in the units of the scores that `scores_of` has given."""
        if batch.turn_rewards is None or not self._of_scores:
            return batch.turn_rewards
        return batch.turn_rewards / self.scores.scale.std

    def denormalise_values(self, batch: RolloutBatch) -> None:
        """Bring what the critic gives to the units of rewards."""
        if self._of_returns and batch.values is not None:
            batch.value_scale = self.returns.scale
            batch.values = batch.value_scale.denormalised(batch.values)

    def note_returns(
        self, batch: RolloutBatch, metrics: Metrics, ranks: ProcessGroup | None
    ) -> None:
        """Count the returns, whose new statistics the critic's targets are normalised with."""
        if self._of_returns and batch.returns is not None:
            self.returns.add(batch.returns, batch.response_mask, ranks)
            batch.return_scale = self.returns.scale
            metrics.set("critic/returns/running_mean", batch.return_scale.mean)
            metrics.set("critic/returns/running_std", batch.return_scale.std)

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"scores": vars(self.scores), "returns": vars(self.returns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was counted."""
        self.scores = RunningMoments(**state["scores"])
        self.returns = RunningMoments(**state["returns"])
