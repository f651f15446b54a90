"""Section algorithm, and what each advantage estimator needs of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from ppo.config.bounds import Bound, Coefficient, Positive, PositiveInt, Weight
from ppo.config.fields import Section

AdvEstimator = Literal[
    "gae",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "opd",
]


class EstimatorNeeds(NamedTuple):
    """What checks, generation and the loop know of an estimator; ppo/estimators.py computes it."""

    critic: bool = False
    """a value model"""
    siblings: bool = False
    """other responses to the same prompt to compare with: rollout.n > 1"""
    greedy: bool = False
    """one greedy response more per prompt"""
    teacher: bool = False
    """a reference that is another model, ref.model.path"""
    keys: tuple[str, ...] = ()
    """keys of this section that only some estimators read, and this one does"""


ESTIMATOR_NEEDS: dict[AdvEstimator, EstimatorNeeds] = {
    "gae": EstimatorNeeds(critic=True, keys=("gamma", "lam")),
    "grpo": EstimatorNeeds(siblings=True, keys=("norm_adv_by_std_in_grpo",)),
    "rloo": EstimatorNeeds(siblings=True),
    "reinforce_plus_plus": EstimatorNeeds(keys=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorNeeds(siblings=True),
    "remax": EstimatorNeeds(greedy=True),
    "opo": EstimatorNeeds(siblings=True),
    "opd": EstimatorNeeds(teacher=True, keys=("opd_reward_weight",)),
}
KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@dataclass(frozen=True, kw_only=True)
class KlControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive", "step"] = "fixed"
    """adaptive = proportional to the error, step = times or divided by 1.5 outside a band"""
    kl_coef: Coefficient = 0.001
    """the coefficient, at the start if it is not fixed; a resume goes on from where adaptive and
    step were, unless this is another one"""
    target_kl: Annotated[float, Bound(ge=1e-9, le=1000, usual=(1e-4, 10))] = 0.1
    """KL per token that adaptive and step aim at"""
    horizon: PositiveInt = 10000
    """sequences over which adaptive makes up its error"""
    min: Annotated[float, Bound(ge=0, le=1000)] = 1e-4
    """smallest coefficient of adaptive and step"""
    max: Annotated[float, Bound(ge=0, le=1000)] = 10.0
    """largest coefficient of adaptive and step"""


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance weights against the mismatch of engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None = None
    """level of the weights; null = none"""
    rollout_is_threshold: Positive = 2.0
    """weights are cut here"""
    icepop: list[Positive] | None = None
    """[lo, hi]: tokens with a weight outside are dropped; null = none"""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    adv_estimator: AdvEstimator = "gae"
    """gae has a critic; remax samples one greedy response more per prompt; grpo, rloo, opo and
    reinforce_plus_plus_baseline compare responses and need rollout.n > 1; opd (on-policy
    distillation) follows the teacher that ref.model.path names, and needs no reward"""
    gamma: Annotated[float, Bound(ge=0, le=1, usual=(0.9, 1))] = 1.0
    """discount of gae and reinforce_plus_plus"""
    lam: Annotated[float, Bound(ge=0, le=1, usual=(0.5, 1))] = 1.0
    """GAE's lambda"""
    norm_adv_by_std_in_grpo: bool = True
    """divide a group's advantages by its standard deviation"""
    opd_reward_weight: Weight = 0.0
    """of the reward in opd's advantages, beside the teacher: of a response's score less the mean of
    the responses to its prompt, of the score itself with rollout.n = 1; 0 = nothing needs to score
    (and nothing does, unless reward.function.path, weights.function or model asks for it)"""
    use_kl_in_reward: bool = True
    """subtract kl_coef x KL(actor, ref) from the reward of each token; not with opd, whose
    advantages are that KL"""
    kl_penalty: KlKind = "kl"
    """estimator of that KL"""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """its coefficient"""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """importance weights against the mismatch of engine and trainer"""

    @property
    def needs(self) -> EstimatorNeeds:
        """What adv_estimator needs of the run."""
        return ESTIMATOR_NEEDS[self.adv_estimator]

    @property
    def needs_reward(self) -> bool:
        """Whether scores are part of the advantages."""
        return not self.needs.teacher or self.opd_reward_weight != 0

    @property
    def charges_kl(self) -> bool:
        """Whether rewards have the KL penalty in them."""
        return self.use_kl_in_reward and not self.needs.teacher
