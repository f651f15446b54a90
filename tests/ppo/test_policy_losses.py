"""Policy losses by the keys of section actor, against numbers worked out by hand."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ppo.config import KEYS_OF_LOSS_MODES, ActorConfig
from ppo.policy_losses import POLICY_LOSSES, PolicyInputs


def test_vanilla_clips_by_the_keys_of_the_actor_and_says_how_often():
    keys = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    ratios = torch.tensor([1.5, 0.5, 0.5, 3.0])
    inputs = PolicyInputs(
        logprobs=ratios.log() - 1.0,
        old_logprobs=torch.full((4,), -1.0),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        keys=keys,
    )
    loss, metrics = POLICY_LOSSES["vanilla"](inputs)
    # held at 1 + 0.3; free; held at 1 - 0.1; the dual clip holds it at 2
    assert loss.tolist() == pytest.approx([-1.3, -0.5, 0.9, 2.0])
    assert metrics["pg_clipfrac"].tolist() == [True, False, True, False]
    assert metrics["pg_clipfrac_lower"].tolist() == [False, False, False, True]


@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_keys_that_a_loss_reads_are_those_that_are_not_warned_about(mode):
    read: set[str] = set()

    class Keys:
        """Section actor, which takes note of what is read."""

        def __init__(self, section: Any, path: str = "") -> None:
            self.section, self.path = section, path

        def __getattr__(self, name: str):
            if name == "policy_loss":
                return Keys(self.section.policy_loss, "policy_loss.")
            read.add(self.path + name)
            return getattr(self.section, name)

    keys = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3)
    POLICY_LOSSES[mode](problem().inputs(Keys(keys)))  # type: ignore[arg-type]
    known = {key for key, modes in KEYS_OF_LOSS_MODES.items() if mode in modes}
    chosen_elsewhere = {"clip_ratio", *(key for key in known if "_cov_" in key)}
    assert read == known - chosen_elsewhere


class Problem(NamedTuple):
    """Tokens of some sequences, float64; advantages are one a sequence."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor  # [K] which one each token belongs to

    def sum_of_sequence(self, values: Tensor) -> Tensor:
        sums = values.new_zeros(int(self.sequence.max()) + 1).index_add_(0, self.sequence, values)
        return sums[self.sequence]

    def inputs(self, keys: ActorConfig) -> PolicyInputs:
        return PolicyInputs(
            *(self.logprobs, self.old, self.advantages, keys),
            sum_of_sequence=self.sum_of_sequence,
            selected=torch.arange(len(self.old)) % 3 == 0,
        )


def problem(spread: float = 0.5) -> Problem:
    """Sequences of 1 to 9 tokens, in an order that mixes them; advantages of both signs."""
    g = torch.Generator().manual_seed(4)
    lengths = [3, 1, 9, 5, 2, 6]
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    sequence = sequence[torch.randperm(len(sequence), generator=g)]
    old = -2 * torch.rand(len(sequence), generator=g, dtype=torch.float64) - 0.01
    noise = spread * torch.randn(len(sequence), generator=g, dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.7, 0.0, 3.0], dtype=torch.float64)
    logprobs = (old + noise).clamp(max=-1e-3).requires_grad_()
    return Problem(logprobs, old, advantages[sequence], sequence)


KEYS = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)


def of_sequence(name: str, d: Tensor, advantage: float) -> Tensor:
    """The loss of a whole sequence as its paper writes it, from the log ratios of its tokens."""
    if name == "gspo":
        ratio = d.mean().exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
    bound = torch.full_like(d, 0.3 if advantage > 0 else -0.1)  # on the pessimistic side
    kept = torch.minimum(d, bound) if advantage > 0 else torch.maximum(d, bound)
    return -advantage * kept.mean().exp()


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_a_loss_of_sequences_is_that_of_its_paper_with_the_mean_over_tokens(name, spread):
    given = problem(spread)
    loss, metrics = POLICY_LOSSES[name](given.inputs(KEYS))
    count = given.sum_of_sequence(torch.ones_like(given.old))
    mine = (loss / count).sum()  # seq-mean-token-mean, but for the number of sequences
    wanted = []
    for i in given.sequence.unique():
        own = given.sequence == i
        d = given.logprobs[own] - given.old[own]
        wanted.append(of_sequence(name, d, given.advantages[own][0].item()))
    want = torch.stack(wanted).sum()
    torch.testing.assert_close(mine, want)
    grads = [torch.autograd.grad(x, given.logprobs)[0] for x in (mine, want)]
    torch.testing.assert_close(*grads)
    assert metrics["pg_clipfrac"].any() == (spread == 0.5 or name == "geo_mean")


def token_by_token(name: str, p: float, q: float, a: float, selected: bool) -> tuple[float, float]:
    """Loss and its derivative by log p of a token, with KEYS; p and q = now and before."""
    r = p / q
    if name == "clip_cov":
        held = (a > 0 and r > 1.3) or (a < 0 and r < 0.9)
        free = 0.0 if held else -a * r
        return (0.0, 0.0) if selected else (-a * min(max(r, 0.9), 1.3) if held else -a * r, free)
    if name == "kl_cov":
        d = math.log(r)
        more = 0.1 if selected else 0.0
        return -a * r + more * abs(d), -a * r + math.copysign(more, d)
    if name == "cispo":
        w = min(max(r, 0.9), 1.3)
        return -w * a * math.log(p), -w * a
    if name == "gpg":
        return -a * math.log(p), -a
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * r
    if name == "dppo_tv":
        near = p - q <= 0.3 if a > 0 else p - q >= -0.1
    else:
        assert name == "dppo_kl", f"{name} has no branch here"
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        near = (kl <= 0.3 or p <= q) if a > 0 else (kl <= 0.1 or p >= q)
    w = min(r, 2.0) if near else 0.0
    return -a * w * math.log(p), -a * w


@pytest.mark.parametrize(
    "name", ["cispo", "gpg", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"]
)
def test_a_loss_of_tokens_and_its_gradient_are_those_worked_out_by_hand(name):
    given = problem(1.0)
    loss, metrics = POLICY_LOSSES[name](given.inputs(KEYS))
    (gradient,) = torch.autograd.grad(loss.sum(), given.logprobs)
    rows = zip(given.logprobs.detach().exp(), given.old.exp(), given.advantages, strict=True)
    chosen = [i % 3 == 0 for i in range(len(given.old))]
    want = torch.tensor(
        [
            token_by_token(name, p.item(), q.item(), a.item(), is_chosen)
            for (p, q, a), is_chosen in zip(rows, chosen, strict=True)
        ]
    )
    torch.testing.assert_close(torch.stack((loss, gradient), 1).detach(), want.double(), rtol=1e-5,
                               atol=1e-6)  # fmt: skip
    share = metrics.get("pg_clipfrac")
    assert share is None or 0 < share.double().mean() < 1


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_reaches_no_gradient_but_its_own(name, bad):
    for field in ("logprobs", "old", "advantages"):
        given = problem()
        spoilt = getattr(given, field).detach().clone()
        spoilt[3] = bad
        given = given._replace(**{field: spoilt.requires_grad_(field == "logprobs")})
        loss, _ = POLICY_LOSSES[name](given.inputs(KEYS))
        weights = torch.ones_like(loss)
        weights[3] = 0.0  # as a masked token's is
        own = given.sequence != given.sequence[3]  # sequences are spoilt whole
        kept = torch.where(own, loss, 0.0) if name in ("gspo", "geo_mean") else loss * weights
        (gradient,) = torch.autograd.grad(kept[own].sum(), given.logprobs)
        assert gradient[own].isfinite().all() and gradient[3] == 0, field


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_log_ratios_beyond_twenty_are_finite_in_float32(name):
    given = problem(1.0)
    far = torch.where(given.sequence % 2 == 0, 60.0, -60.0)
    now = (given.old + far).float().requires_grad_()
    inputs = given._replace(
        logprobs=now, old=given.old.float(), advantages=given.advantages.float()
    )
    loss, _ = POLICY_LOSSES[name](inputs.inputs(KEYS))
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all() and gradient.isfinite().all()
