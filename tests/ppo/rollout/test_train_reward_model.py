"""A reward model from preference pairs: its loss and gradient, and what transformers loads."""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from ppo.check.rules import check_config
from ppo.config import load_config
from ppo.data.tiny import tiny_pairs
from ppo.errors import InputError
from ppo.metrics import Metrics
from ppo.models.build import build_value_model
from ppo.models.learner import Learner
from ppo.models.tiny import build_tiny_model, build_tiny_tokenizer
from ppo.rollout import train_reward_model
from ppo.rollout.train_reward_model import (
    Layout,
    Pair,
    fitting,
    learn,
    load_training,
    parse_options,
    read_pairs,
)
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed

PAIRS = [
    Pair([5] * a + [7, 9], [6] * b) for a, b in [(30, 2), (1, 1), (4, 40), (12, 3), (2, 9), (7, 7)]
]


def gradients(rank: int, world_size: int, folder: Path, packed: bool) -> Any:
    """(loss, gradient of each parameter) of a step, in micro-batches of one or two pairs."""
    budget = "actor.ppo_max_token_len_per_gpu=48"
    config = load_config("ppo_tiny.yaml", [f"model.path={folder}", budget, "actor.grad_clip=1e9"])
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    module = build_value_model(
        folder,
        mesh,
        model_config=config.model,
        fsdp_config=config.actor.fsdp,
        checkpointing=True,
        forward_only=False,
        dtype=torch.float32,
        needs_head=True,
    )

    class Recorder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for name, parameter in module.named_parameters():
                found[name] = parameter.grad.full_tensor().clone()  # pyright: ignore

    found: dict[str, Any] = {}
    learner = Learner(
        name="reward_model",
        module=module,
        optimizer=Recorder(module.parameters(), lr=0.0),  # pyright: ignore
        optim=config.actor.optim,
        grad_clip=1e9,
        total_steps=1,
        device=mesh.device,
    )
    metrics = Metrics()
    learn(learner, PAIRS, Layout(config, mesh, packed), metrics)
    return metrics.reduce(mesh.host_group)["loss"], found


def assert_as_transformers(folder: Path, results: list[Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).double()
    scores = [[model(torch.tensor([ids])).logits[0, 0] for ids in pair] for pair in PAIRS]
    margins = torch.stack([chosen - rejected for chosen, rejected in scores])
    loss = (1 + (-margins).exp()).log().mean()  # -log sigmoid
    loss.backward()
    want = dict(model.named_parameters())
    for value, found in results:
        assert value == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in found.items():
            expected = want[name].grad
            torch.testing.assert_close(
                gradient.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
            )


def test_loss_and_gradient_are_those_of_transformers(tmp_path):
    folder = build_tiny_model(tmp_path / "model", classifier=True)
    with init_distributed(torch.device("cpu")):
        assert_as_transformers(
            folder, [gradients(0, 1, folder, packed) for packed in (True, False)]
        )


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_they_are_the_same_on_several_ranks(tmp_path, world_size):
    folder = build_tiny_model(tmp_path / "model", classifier=True)
    assert_as_transformers(folder, run_distributed(gradients, world_size, folder, True))


def test_pairs_come_from_prepared_rows_and_from_raw_ones_and_bad_ones_are_named(tmp_path):
    tokenizer = build_tiny_tokenizer()
    message = [{"role": "user", "content": "hi"}]
    prepared = {"prompt": message, "extra_info": {"chosen": "yes", "rejected": "no"}}
    raw = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, [prepared, raw])))
    first, second = read_pairs(str(path), tokenizer, 256, "train")
    assert first == second
    assert tokenizer.decode(first.chosen) == "<|user|>hi<|im_end|><|assistant|>yes<|im_end|>"
    path.write_text(json.dumps(raw | {"chosen": 3}))
    with pytest.raises(InputError, match=r"row 0 .*'chosen'.*must be text"):
        list(read_pairs(str(path), tokenizer, 256, "train"))
    assert all(pair["chosen"] != pair["rejected"] for pair in tiny_pairs("val", 0))


def test_pairs_that_leave_the_model_no_position_are_left_out_and_told(caplog):
    from transformers import LlamaConfig

    limits = LlamaConfig(max_position_embeddings=32, vocab_size=10)
    assert fitting(PAIRS, limits, "f") == [p for p in PAIRS if p not in (PAIRS[0], PAIRS[2])]
    assert "f: 2 of 6 pairs are left out: a conversation of 32 tokens or more" in caplog.text
    limits.vocab_size = 9
    with pytest.raises(InputError, match=r"f: its tokens have ids up to 9, and the model has 9 of"):
        fitting(PAIRS, limits, "f")


@pytest.mark.parametrize("preset", ["dapo_tiny.yaml", "ppo_qwen2.5_7b_rlhf.yaml"])
def test_what_a_run_does_with_its_model_does_not_keep_it_from_being_a_reward_model(
    tmp_path, preset
):
    options = parse_options(
        [
            *(f"--config={preset}", "--data=tiny", f"--out={tmp_path / 'out'}"),
            *("trainer.early_stop.metric=val-core/x", "trainer.keep_best=val-core/x"),
            *("trainer.val_only=true", "rollout.tensor_model_parallel_size=2"),
            "reward.weights.function=0",
        ]
    )
    load_training(options, partial(check_config, world_size=1, ranks_per_node=1))


def test_a_reward_model_learns_pairs_and_is_what_transformers_loads(tmp_path, capsys):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / "reward"
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, islice(tiny_pairs("train", 0), 512))))
    arguments = f"--config tiny/reward_model.yaml --data {path} --out {out} actor.optim.lr=3e-3"
    assert train_reward_model.main(arguments.split()) == 0
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    pairs = train_reward_model.read_pairs("tiny", tokenizer, model.config.pad_token_id, "val")
    held_out = list(pairs)[:64]
    right = [_score(model, pair.chosen) > _score(model, pair.rejected) for pair in held_out]
    assert fmean(right) > 0.85
    assert train_reward_model.main(arguments.split()) == 2
    assert "--out" in capsys.readouterr().err


def _score(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()
