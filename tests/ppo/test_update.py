"""Actor and critic updates on 4 ranks against a padded, unsharded float64 loop over tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from ppo.batch.packing import Batcher
from ppo.batch.samples import RolloutBatch, Scale
from ppo.batch.states import put_states
from ppo.config import Config, LossAggMode, MixedPrecisionConfig, load_config
from ppo.guards.guard import Guard, Verdict
from ppo.metrics import Metrics
from ppo.models.build import build_causal_lm, build_value_model
from ppo.models.learner import Learner, Model, make_optimizer
from ppo.update import correct_rollout, update_actor, update_critic
from sharding.fsdp import without_gradients
from sharding.mesh import Mesh, build_mesh, init_distributed
from sharding.partition import Budget, assign, count_micro_batches
from tests.distributed import run_distributed
from tests.ppo import plain_update as plain
from tests.ppo.batches import rows_here
from tests.ppo.models.hf_models import save_model

ROW = 48  # tokens of a micro-batch of an sp group; the longest sequence has 70


@dataclass(frozen=True)
class Case:
    """One layout of the same work."""

    mode: str
    sp: int
    packed: bool
    fsdp_size: int  # of 4 ranks: 4 = FULL_SHARD, 2 = HYBRID_SHARD
    checkpointing: bool
    balance: bool = True
    count: int | None = None  # None = by tokens
    regularised: bool = False  # entropy bonus, KL loss and rollout correction
    loss_mode: str = "vanilla"
    rejecting: bool = False  # by the rules of plain_update.py; with gpg in the update itself
    kl: str | None = None  # of whole distributions, with a reference of another architecture

    @property
    def possible(self) -> bool:
        """Padded rows are not cut over ranks, and a sequence stays within a shard group."""
        return (self.packed or self.sp == 1) and self.fsdp_size % self.sp == 0

    @property
    def bypasses(self) -> bool:
        """The engine's log-probs stand in for the old ones."""
        return self.loss_mode == "gpg"

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        """Every two of the first five properties, with their names."""
        names = ("mode", "sp", "packed", "fsdp_size", "checkpointing")
        return set(combinations([(name, getattr(self, name)) for name in names], 2))


MODES = get_args(LossAggMode)
CASES = [
    Case(MODES[0], 1, False, 4, True, balance=False),
    Case(MODES[1], 1, False, 2, False, balance=False, count=3),
    Case(MODES[2], 1, False, 4, False),
    Case(MODES[3], 1, False, 2, True, count=2),
    Case(MODES[4], 1, False, 4, True),
    Case(MODES[0], 1, True, 2, False, balance=False),
    Case(MODES[1], 1, True, 4, True),
    Case(MODES[0], 2, True, 4, False, balance=False),
    Case(MODES[1], 2, True, 4, True, balance=False, count=1),
    Case(MODES[2], 2, True, 2, True),
    Case(MODES[3], 2, True, 4, False, balance=False),
    Case(MODES[4], 2, True, 2, False),
    Case(MODES[0], 4, True, 4, True),
    Case(MODES[1], 4, True, 4, False),
    Case(MODES[2], 4, True, 4, True, count=3),
    Case(MODES[3], 4, True, 4, False),
    Case(MODES[4], 4, True, 4, False),
    Case(MODES[0], 2, True, 2, True, balance=False, regularised=True),
    Case(MODES[3], 4, True, 4, True, loss_mode="gspo"),
    Case(MODES[3], 2, True, 2, False, loss_mode="geo_mean"),
    Case(MODES[0], 2, True, 4, True, loss_mode="kl_cov"),
    Case(MODES[0], 1, False, 4, True, loss_mode="clip_cov"),
    Case(MODES[0], 2, True, 2, True, rejecting=True),
    Case(MODES[2], 1, False, 4, False, rejecting=True),
    Case(MODES[3], 4, True, 4, True, loss_mode="gspo", rejecting=True),
    Case(MODES[0], 2, True, 4, True, loss_mode="gpg", rejecting=True),
    Case(MODES[0], 4, True, 4, True, kl="full"),
    Case(MODES[3], 2, True, 2, True, kl="full_forward"),
    Case(MODES[1], 1, False, 4, False, kl="full"),
]


def test_the_cases_hold_every_possible_pair_of_properties():
    every = [Case(*x) for x in product(MODES, (1, 2, 4), (True, False), (4, 2), (True, False))]
    wanted = set().union(*(case.pairs for case in every if case.possible))
    assert all(case.possible for case in CASES)
    assert wanted - set().union(*(case.pairs for case in CASES)) == set()


def test_the_batch_is_as_uneven_as_it_is_meant_to_be():
    lengths = [plain.PROMPTS[i // plain.N] + r for i, r in enumerate(plain.RESPONSES)]
    kept = [
        [i for i in part if plain.RESPONSES[i] and i not in plain.FAILED]
        for part in plain.MINI_BATCHES
    ]
    dealt = [assign(lengths, k, Budget(dp=4, balance=False)) for k in kept]
    alone = Budget(dp=1, tokens=ROW)
    needed = [[count_micro_batches(lengths, mine, alone) for mine in d] for d in dealt]
    assert needed == [[5, 1, 1, 1], [1, 1, 0, 0]]  # micro-batches, were each rank alone
    assert max(lengths[i] for i in dealt[0][0]) > ROW
    assert [len(mine) for mine in assign(lengths, kept[1], Budget(dp=4))] == [1, 1, 0, 0]


class Recorder(torch.optim.AdamW):
    """Keeps the whole gradient of every optimizer step, and leaves the weights as they are."""

    def __init__(self, module: nn.Module):
        super().__init__(module.parameters())
        self.names = [name for name, _ in module.named_parameters()]
        self.steps: list[dict[str, Tensor]] = []

    def step(self, closure: Any = None) -> None:
        parameters: list[Any] = self.param_groups[0]["params"]
        grads = [parameter.grad.full_tensor().clone() for parameter in parameters]
        self.steps.append(dict(zip(self.names, grads, strict=True)))


def config_of(case: Case) -> Config:
    overrides = {
        "data.train_batch_size": 20,
        "data.max_response_length": plain.SCALE,
        "model.use_remove_padding": case.packed,
        "rollout.temperature": plain.TEMPERATURE,
        "actor.ppo_mini_batch_size": 10,
        "actor.ulysses_sequence_parallel_size": case.sp,
        "actor.fsdp.fsdp_size": case.fsdp_size,
        "actor.loss_agg_mode": case.mode,
        "actor.policy_loss.loss_mode": case.loss_mode,
        "actor.policy_loss.kl_cov_ratio": plain.COV_SHARE,
        "actor.policy_loss.clip_cov_ratio": plain.COV_SHARE,
        "actor.policy_loss.clip_cov_lb": plain.COV_LOW,
        "actor.policy_loss.clip_cov_ub": plain.COV_HIGH,
        "trainer.seed": plain.SEED,
        "actor.clip_ratio_low": plain.CLIP_LOW,
        "actor.clip_ratio_high": plain.CLIP_HIGH,
        "actor.clip_ratio_c": plain.CLIP_C,
        "actor.grad_clip": 1e9,
        "critic.cliprange_value": plain.CLIP_VALUE,
        "actor.entropy_coeff": plain.ENTROPY_COEFF if case.regularised else 0.0,
        "actor.use_kl_loss": case.regularised or case.kl is not None,
        "actor.kl_loss_type": case.kl or "low_var_kl",
        "actor.kl_loss_coef": plain.KL_LOSS_COEF,
    }
    if case.rejecting:
        rules = {"token_k1": [*plain.TOKEN_BOUNDS], "seq_mean_k1": [*plain.MEAN_BOUNDS]}
        keys = {"reject": rules, "rollout_token_veto_threshold": plain.VETO}
        if case.bypasses:
            keys |= {"rollout_is": "sequence", "rollout_is_threshold": plain.LARGEST_WEIGHT}
        overrides |= {f"algorithm.rollout_correction.{name}": keys[name] for name in keys}
    return load_config("ppo_tiny.yaml", [f"{k}={v}" for k, v in overrides.items()])


@cache
def mesh_of(fsdp_size: int, sp: int) -> Mesh:
    dims = config_of(Case(MODES[0], sp, True, fsdp_size, True)).dims(4, 4)
    return build_mesh(dims, torch.device("cpu"))


@cache
def module_of(kind: Any, path: Path, mesh: Mesh, packed: bool, checkpointing: bool) -> nn.Module:
    config = config_of(Case(MODES[0], 1, packed, 4, True))
    return kind(
        path,
        mesh,
        model_config=config.model,
        fsdp_config=config.actor.fsdp,
        checkpointing=checkpointing,
        forward_only=False,
        dtype=torch.float32,
    )


def batcher_of(case: Case, mesh: Mesh) -> Batcher:
    budget = Budget(
        dp=mesh.dims.dp,
        tokens=ROW if case.count is None else None,
        count=case.count,
        padded=not case.packed,
        balance=case.balance,
    )
    return Batcher(mesh=mesh, budget=budget, packed=case.packed)


def updated(
    update: Callable[..., None], case: Case, path: Path, batch: RolloutBatch
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Metrics of an update, and the gradients of its optimizer steps."""
    config, mesh = config_of(case), mesh_of(case.fsdp_size, case.sp)
    kind = build_causal_lm if update is update_actor else build_value_model
    module = module_of(kind, path, mesh, case.packed, case.checkpointing)
    optimizer = Recorder(module)
    learner = Learner(
        name=path.name,
        module=module,
        device=mesh.device,
        optimizer=optimizer,
        optim=config.actor.optim,
        grad_clip=config.actor.grad_clip,
        total_steps=1,
    )
    metrics = Metrics()
    batch = rows_here(batch, mesh.dims.dp, mesh.dp_rank)
    more: dict[str, Any] = {}
    if case.kl is not None and update is update_actor:
        more["ref"] = passed_through_ref(case, path.with_name("ref"), batch)
    if case.bypasses:
        batch = replace(batch, old_logprobs=batch.rollout_logprobs, bypasses_old=True)
    correct_rollout(batch, config, metrics, mesh.dp_group)
    update(learner, batch, config, batcher_of(case, mesh), metrics, 1, Guard(), **more)
    return metrics.reduce(mesh.host_group), optimizer.steps


def passed_through_ref(case: Case, path: Path, batch: RolloutBatch) -> Model:
    """The reference, whose hidden states are kept in the batch."""
    mesh = mesh_of(case.fsdp_size, case.sp)
    module = module_of(build_causal_lm, path, mesh, case.packed, False)
    batcher = batcher_of(case, mesh)
    plan = batcher.plan(batch, [list(range(len(batch.all)))])
    with without_gradients(module):
        for rows in plan[0]:
            micro = batcher.make(batch, rows)
            found = module(**micro.inputs, labels=micro.labels, with_hidden=True)
            put_states(batch, micro, found.hidden, mesh)
    return Model(module=module, device=mesh.device)


def update_all(
    rank: int, world_size: int, actor: Path, critic: Path, batch: RolloutBatch
) -> list[Any]:
    """(actor's, critic's) outcome of each case; only the first rank's travel back."""
    check_that_failures_take_no_step(actor, critic, batch)
    results = []
    for case in CASES:
        weights = batch.loss_weights if case.regularised else None
        mine = replace(batch, loss_weights=weights)
        of_actor = updated(update_actor, case, actor, mine)
        mine = in_units_of_rewards(mine) if case.sp == 4 else mine
        results.append((of_actor, updated(update_critic, case, critic, mine)))
    return results if rank == 0 else []


def in_units_of_rewards(batch: RolloutBatch) -> RolloutBatch:
    """Values and returns of a critic that gives and learns others: its loss is the same."""
    assert batch.values is not None and batch.returns is not None
    return replace(
        batch,
        value_scale=Scale(3.0, 2.0),
        values=batch.values * 2 + 3,
        return_scale=Scale(-1.0, 4.0),
        returns=batch.returns * 4 - 1,
    )


def check_that_failures_take_no_step(actor: Path, critic: Path, batch: RolloutBatch) -> None:
    """A mini-batch of which nothing counts: momentum and weight decay must not move weights."""
    overview, everything = batch.all, range(len(plain.RESPONSES))
    for out, steps, kind in (
        (plain.MINI_BATCHES[1], 1, "failed"),
        (everything, 0, "failed"),
        (plain.MINI_BATCHES[1], 1, "rejected"),
        (everything, 0, "rejected"),
    ):
        is_out = torch.isin(torch.arange(len(overview)), torch.tensor(out))
        mask = batch.response_mask & ~is_out[:, None]
        rejected = torch.where(is_out, overview.counted, 0)
        mine = replace(
            batch,
            response_mask=mask,
            all=replace(overview, failed=overview.failed | is_out)
            if kind == "failed"
            else replace(overview, rejected=rejected),
        )
        for update, path in ((update_actor, actor), (update_critic, critic)):
            values, taken = updated(update, CASES[6], path, mine)
            assert len(taken) == steps
            assert (f"{path.name}/grad_norm" in values) == (steps > 0)


def assert_same(
    outcome: tuple[dict[str, float], list[dict[str, Tensor]]],
    wanted: list[tuple[float, dict[str, Tensor]]],
    names: tuple[str, str],
    case: Case,
) -> None:
    values, steps = outcome
    loss = sum(loss for loss, _ in wanted) / len(wanted)
    assert values[names[0]] == pytest.approx(loss, rel=1e-5, abs=1e-7), case  # terms cancel
    norms = [torch.stack([g.norm() for g in grads.values()]).norm() for _, grads in wanted]
    assert values[names[1]] == pytest.approx(torch.stack(norms).mean().item(), rel=1e-5), case
    for step, (_, grads) in zip(steps, wanted, strict=True):
        for name, gradient in step.items():
            error = (gradient - grads[name]).abs().max() / grads[name].abs().max()
            assert error <= 1e-5, (case, name, error)


@pytest.mark.distributed
def test_losses_and_gradients_are_those_of_a_loop_over_tokens_in_every_layout(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    paths = save_model(tmp_path / "actor", "qwen2"), tmp_path / "critic"
    # smaller, with a head of its own and more ids than are compared
    ref_path = save_model(tmp_path / "ref", "llama", hidden_size=24, vocab_size=101)
    config = AutoConfig.from_pretrained(paths[0], num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(paths[1])
    kinds = AutoModelForCausalLM, AutoModelForSequenceClassification
    actor, critic = (
        kind.from_pretrained(path, attn_implementation="eager").double()
        for kind, path in zip(kinds, paths, strict=True)
    )
    ref = AutoModelForCausalLM.from_pretrained(ref_path, attn_implementation="eager").double()
    batch = plain.with_scores(plain.make_data(), actor, critic)
    results = run_distributed(update_all, 4, *paths, batch)[0]

    seen: set[str] = set()
    wanted: Any = cache(
        lambda model, mode, regularised, loss_mode="vanilla", rejecting=False, kl=None: [
            plain.reference(
                *(model, batch, part, mode, regularised, seen, loss_mode, rejecting, (kl, ref))
            )
            for part in plain.MINI_BATCHES
        ]
    )
    for case, (of_actor, of_critic) in zip(CASES, results, strict=True):
        names = "actor/pg_loss", "actor/grad_norm"
        expected = wanted(
            *(actor, case.mode, case.regularised, case.loss_mode, case.rejecting, case.kl),
        )
        assert_same(of_actor, expected, names, case)
        assert_same(
            of_critic,
            wanted(critic, case.mode, False, "vanilla", case.rejecting and not case.bypasses),
            ("critic/vf_loss", "critic/grad_norm"),
            case,
        )
        if case.rejecting and not case.bypasses:
            assert_says_what_is_rejected(of_actor[0], batch)
    assert seen == {"free", "clipped", "dual"}


def assert_says_what_is_rejected(values: dict[str, float], batch: RolloutBatch) -> None:
    """Shares of tokens and sequences, of which there are several of each kind."""
    kept = plain.kept_tokens(batch)
    lengths = [0 if i in plain.FAILED else n for i, n in enumerate(plain.RESPONSES)]
    touched = [len(k) < n for k, n in zip(kept, lengths, strict=True) if n]
    tokens = 1 - sum(map(len, kept)) / sum(lengths)
    assert values["rollout_corr/rs_masked_fraction"] == pytest.approx(tokens)
    assert values["rollout_corr/rs_seq_masked_fraction"] == pytest.approx(
        sum(touched) / len(touched)
    )
    assert values["rollout_corr/veto_fraction"] > 0
    whole = sum(not k for k, n in zip(kept, lengths, strict=True) if n)
    assert 0 < whole < sum(touched) < len(touched)


def test_an_update_without_old_log_probs_measures_the_kl_to_the_reference_itself(tmp_path):
    """Over one mini-batch, before its step: what the old log-probs would have shown."""
    from transformers import AutoModelForCausalLM

    path, data = save_model(tmp_path / "actor", "qwen2"), plain.make_data()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    with torch.no_grad():
        ids, logprobs = plain.padded_forward(model, data, list(range(len(plain.RESPONSES))))
    terms = []
    for i, first in enumerate(data.prompt_lengths.tolist()):
        for t in data.response_mask[i].nonzero()[:, 0].tolist():
            assert data.ref_logprobs is not None
            now = logprobs[i, first + t - 1, ids[i, first + t]]
            data.ref_logprobs[i, t] += now  # near it
            x = data.ref_logprobs[i, t].double() - now
            terms.append(x.exp() - x - 1)
    case = Case(MODES[0], 1, True, 1, False, regularised=True)
    config = config_of(case)
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=20))
    metrics, batch = Metrics(), replace(data, old_logprobs=None, loss_weights=None)
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        module = module_of(build_causal_lm, path, mesh, case.packed, case.checkpointing)
        learner = Learner(
            name="actor",
            module=module,
            device=mesh.device,
            optimizer=Recorder(module),
            optim=config.actor.optim,
            grad_clip=1e9,
            total_steps=1,
        )
        update_actor(learner, batch, config, batcher_of(case, mesh), metrics, 1, Guard())
    wanted = torch.stack(terms).mean().item()
    assert metrics.reduce()["actor/ref_kl"] == pytest.approx(wanted, rel=1e-5)


class WaitingGuard(Guard):
    """Only its verdict, which reads the norm of the gradient, may wait for the device."""

    def judge(self, *args: Any) -> Verdict:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        verdict = super().judge(*args)
        torch.cuda.set_sync_debug_mode(mode)
        return verdict


@pytest.mark.gpu
@pytest.mark.parametrize("old_logprobs", ["given", "none", "the engine's"])
def test_a_micro_batch_never_makes_the_host_wait_for_the_gpu(tmp_path, old_logprobs):
    path, device = save_model(tmp_path / "model", "qwen2"), torch.device("cuda", 0)
    case, batch = Case(MODES[0], 1, True, 1, True, regularised=True), plain.make_data()
    if old_logprobs == "none":  # entropy, and the mismatch with the engine
        batch = replace(batch, old_logprobs=None)
    elif old_logprobs != "given":  # weights and rejections of the update's own log-probs
        case = replace(case, loss_mode="gpg", rejecting=True)
        batch = replace(batch, old_logprobs=batch.rollout_logprobs, bypasses_old=True)
    config = config_of(case)
    fsdp = replace(config.actor.fsdp, mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))
    with init_distributed(device):
        mesh = build_mesh(config.dims(1, 1), device)
        for update, kind in ((update_actor, build_causal_lm), (update_critic, build_value_model)):
            module = kind(
                path,
                mesh,
                model_config=config.model,
                fsdp_config=fsdp,
                checkpointing=True,
                forward_only=False,
                dtype=torch.float32,
            )
            learner = Learner(
                name="model",
                module=module,
                device=device,
                optimizer=make_optimizer(module, config.actor.optim, device),
                optim=config.actor.optim,
                grad_clip=1.0,
                total_steps=2,
            )
            metrics, batcher = Metrics(device), batcher_of(case, mesh)
            guard = WaitingGuard(config.guards.all_rules(), groups=mesh.device_groups)
            update(learner, batch, config, batcher, metrics, 1, guard)  # first uses may wait
            torch.cuda.set_sync_debug_mode("error")
            try:
                update(learner, batch, config, batcher, Metrics(device), 2, guard)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert metrics.reduce()["model/grad_norm"] > 0
