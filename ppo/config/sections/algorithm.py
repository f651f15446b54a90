"""Section algorithm, and what each advantage estimator needs of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

from ppo.config.bounds import (
    Bound,
    Coefficient,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Text,
    Weight,
)
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
class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: prompts whose responses are all as good are left out, and others
    are drawn until data.train_batch_size are there."""

    enable: bool = False
    """draw data.gen_batch_size prompts in a round, leave out those whose responses do not differ
    in the metric, and go on until there are enough"""
    metric: Text | None = None
    """what has to differ: null, score or seq_reward = the score; else an entry of the dict that the
    reward returns, such as acc (of a function that returns a number, acc is that number)"""
    max_num_gen_batches: NonNegativeInt = 0
    """rounds of an iteration at most, after which it trains on what is there; 0 = until each prompt
    of an epoch could have been drawn"""
    surplus: Literal["drop", "keep"] = "drop"
    """groups of the last round beyond data.train_batch_size: drop, or keep them for the next
    iteration, whose policy is then one iteration newer than the one that sampled them"""

    @property
    def is_of_score(self) -> bool:
        """Whether it is the score that has to differ."""
        return self.metric in (None, "score", "seq_reward", "seq_final_reward")


RejectRule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": 5.0, "icepop": [0.5, 5.0]}
_GEO_RS = {"reject": {"seq_mean_k1": [0.999, 1.001]}}
_K3_RS = {"reject": {"seq_mean_k3": 0.01}}
_BYPASS = {"bypass_old_logprob": True}
CorrectionPreset = Literal[
    "disabled",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "ppo_is_bypass",
    "pg_is",
    "pg_rs",
]
CORRECTION_PRESETS: dict[CorrectionPreset, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQ_IS,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQ_IS | {"reject": {"seq_sum_k1": [0.5, 2.0]}},
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": _SEQ_IS | _GEO_RS,
    "decoupled_geo_rs_token_tis": _TOKEN_IS | _GEO_RS,
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": _SEQ_IS | _K3_RS,
    "decoupled_k3_rs_token_tis": _TOKEN_IS | _K3_RS,
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _BYPASS | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _BYPASS | _K3_RS,
    "bypass_pg_is": _BYPASS | _SEQ_IS,
    "bypass_pg_token_icepop": _BYPASS | _ICEPOP,
    "bypass_pg_geo_rs": _BYPASS | _GEO_RS,
    "bypass_pg_geo_rs_seq_tis": _BYPASS | _SEQ_IS | _GEO_RS,
    "bypass_pg_geo_rs_token_tis": _BYPASS | _TOKEN_IS | _GEO_RS,
    # what earlier releases of verl called them
    "ppo_is_bypass": _BYPASS,
    "pg_is": _BYPASS | _SEQ_IS,
    "pg_rs": _BYPASS | _GEO_RS | {"rollout_token_veto_threshold": 1e-4},
}
"""what verl's presets of these names set, in the keys below"""


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Against the mismatch of engine and trainer, whose probabilities of a token differ."""

    preset: CorrectionPreset | None = None
    """values for the keys below that are null, as verl's preset of that name has them; those with
    pg need actor.policy_loss.loss_mode gpg"""
    rollout_is: Literal["token", "sequence"] | None = None
    """importance weights, of each token or each sequence; null = the preset's, else none"""
    rollout_is_threshold: Annotated[float, Bound(ge=1, le=1e9, usual=(1, 100))] | None = None
    """weights are cut here; null = the preset's, else 2.0"""
    icepop: list[Positive] | None = None
    """[lo, hi]: tokens with a ratio outside have weight 0; null = the preset's, else none are"""
    reject: dict[str, Any] | None = None
    """what is taken out of the mask, so that it counts neither in sums nor in divisors: {rule:
    bounds}. token_k1, seq_sum_k1, seq_mean_k1: [lo, hi] of the ratio of trainer and engine, of
    sequences their product and geometric mean, N = [1/N, N]. token_, seq_sum_, seq_mean_, seq_max_
    with k2 (half the squared log ratio) or k3 (ratio - 1 - log ratio): at most N. null = the
    preset's, else nothing; {} = nothing"""
    rollout_token_veto_threshold: Annotated[float, Bound(gt=0, lt=1, usual=(1e-8, 0.1))] | None = (
        None
    )
    """a sequence with a token whose ratio is below is rejected whole; null = the preset's, else
    none is"""
    bypass_old_logprob: bool | None = None
    """take the engine's log-probs for the old ones, which saves a forward pass: the ratio of the
    update then carries the mismatch. Weights and rejections are then those of the policy that is
    updated, and what they leave out still counts in divisors. null = the preset's, else false"""

    @property
    def resolved(self) -> RolloutCorrectionConfig:
        """With the preset's values where none is given, and defaults where neither is."""
        given = {name: getattr(self, name) for name in _CORRECTION_DEFAULTS}
        preset = CORRECTION_PRESETS[self.preset or "disabled"]
        filled = {
            name: given[name] if given[name] is not None else preset.get(name, default)
            for name, default in _CORRECTION_DEFAULTS.items()
        }
        return replace(self, preset=None, **filled)

    @property
    def weighs(self) -> bool:
        """Whether losses are multiplied with weights; of what is resolved."""
        return self.rollout_is is not None or self.icepop is not None

    @property
    def rejects(self) -> bool:
        """Whether tokens are taken out; of what is resolved."""
        return bool(self.reject) or self.rollout_token_veto_threshold is not None

    @property
    def rejections(self) -> dict[str, tuple[float, float]]:
        """Bounds by rule, of what is resolved. Raises ValueError, which says what is wrong."""
        return {rule: _bounds(rule, given) for rule, given in (self.reject or {}).items()}


_CORRECTION_DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "icepop": None,
    "reject": {},
    "rollout_token_veto_threshold": None,
    "bypass_old_logprob": False,
}


def _bounds(rule: str, given: Any) -> tuple[float, float]:
    if rule not in get_args(RejectRule):
        raise ValueError(f"{rule} is none of the rules {', '.join(get_args(RejectRule))}")
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(type(x) in (int, float) and 0 < x < math.inf for x in listed):
        raise ValueError(f"{rule}: {given!r} must be above 0")
    if not rule.endswith("k1"):
        if len(listed) != 1:
            raise ValueError(f"{rule}: {given!r} must be one number, the largest that is kept")
        return -math.inf, float(listed[0])
    low, high = listed if len(listed) == 2 else (1 / listed[0], listed[0])
    if len(listed) > 2 or not low <= 1 <= high or low == high:
        raise ValueError(
            f"{rule}: {given!r} must be [lo, hi] with lo < hi and 1, the ratio where engine and "
            "trainer agree, between them, or one number above 1"
        )
    return float(low), float(high)


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
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """dynamic sampling: which prompts are trained on"""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """weights and rejections against the mismatch of engine and trainer"""

    @property
    def correction(self) -> RolloutCorrectionConfig:
        """rollout_correction with what its preset says."""
        return self.rollout_correction.resolved

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
