"""The reward model against transformers' sequence classifiers, on any mesh, and in a whole run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.batch.samples import Samples
from ppo.check.rules import check_config
from ppo.config import ConfigError, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Completions
from ppo.errors import InputError
from ppo.metrics import Metrics
from ppo.models.tiny import build_tiny_model, build_tiny_tokenizer
from ppo.rollout.reward_model import build_reward_model, until_scored
from ppo.rollout.scoring import Scorer
from ppo.run.run import Run
from sharding.mesh import build_mesh
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import SHAPE
from tests.test_train import rows_of, train_here

TEMPLATE = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}."
RESPONSES = ["", "x", "a longer answer " * 5, "no", "yes, é", "z" * 40, "last"]
MESHES: dict[str, tuple[str, ...]] = {
    "full": (),
    "hybrid": ("actor.fsdp.fsdp_size=2",),
    "padded": (
        "model.use_remove_padding=false",
        "actor.use_dynamic_bsz=false",
        "actor.ppo_micro_batch_size_per_gpu=2",
    ),
    "sp 2": ("actor.ulysses_sequence_parallel_size=2",),
    "sp 4, kv heads repeated": (
        "actor.ulysses_sequence_parallel_size=4",
        "reward.model.max_token_len_per_gpu=8",
    ),
}


def save_classifier(
    folder: Path, model_type: str = "llama", num_labels: int = 1, **extra: Any
) -> Path:
    """A random float32 sequence classifier that reads the bytes of a conversation."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shape = SHAPE | {
        "vocab_size": 512,
        "initializer_range": 0.15,
        "num_labels": num_labels,
        **extra,
    }
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **shape)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_prompts() -> list[Prompt]:
    """Plain text, one message and several."""
    several = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ]
    kinds: list[Any] = ["plain", [{"role": "user", "content": "one"}], several]
    return [Prompt(i, [7], "any", None, {}, kinds[i % 3]) for i in range(len(RESPONSES))]


def expected_text(prompt: Prompt, response: str) -> str:
    plain = ["[u]plain", "[u]one", "[s]be kind[u]hi[a]hello[u]and?"][prompt.uid % 3]
    return f"{plain}[a]{response}."


def expected_scores(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.stack(
            [
                model(torch.tensor([list(expected_text(p, r).encode())])).logits[0, 0]
                for p, r in zip(make_prompts(), RESPONSES, strict=True)
            ]
        )


def samples_of(texts: Sequence[str], numbers: Sequence[int]) -> Samples:
    """Of these texts, one a prompt, those with these numbers."""
    chosen = [texts[i] for i in numbers]
    return Samples(
        prompts=make_prompts()[: len(texts)],
        n=1,
        numbers=list(numbers),
        completions=Completions.of([Completion(list(x.encode()), [], "stop") for x in chosen]),
        texts=chosen,
    )


def load(folder: Path, *overrides: str):
    return load_config(
        "ppo_tiny.yaml",
        [
            "reward.model.enable=true",
            f"reward.model.path={folder}",
            f"reward.model.chat_template={TEMPLATE!r}",
            *overrides,
        ],
    )


def score_on_every_mesh(
    rank: int, world_size: int, model: Path, out: Path, names: Sequence[str] = tuple(MESHES)
) -> list[tuple[list[int], torch.Tensor]]:
    """Numbers and scores of what this rank is given, on each mesh."""
    found = []
    for name in names:
        overrides = MESHES[name]
        config = load(model, f"trainer.default_local_dir={out / name}", *overrides)
        mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
        with Run(config, mesh, command=["test"]) as run:
            reward_model = build_reward_model(config, run)
            assert reward_model is not None
            numbers = list(range(rank, len(RESPONSES), world_size))
            samples = samples_of(RESPONSES, numbers)
            found.append((numbers, reward_model.score(samples, run)))
    return found


@pytest.mark.distributed
def test_scores_are_those_of_transformers_on_every_mesh(tmp_path):
    folder = save_classifier(tmp_path / "model")
    want = expected_scores(folder)
    assert want.std() > 0.1
    for scores in run_distributed(score_on_every_mesh, 4, folder, tmp_path / "runs"):
        for name, (numbers, got) in zip(MESHES, scores, strict=True):
            torch.testing.assert_close(got, want[numbers], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.distributed
def test_a_mixture_of_experts_whose_names_are_converted_scores_as_transformers(tmp_path):
    folder = save_classifier(tmp_path / "model", "mixtral")
    want = expected_scores(folder)
    for [(numbers, scores)] in run_distributed(
        score_on_every_mesh, 2, folder, tmp_path / "runs", ["full"]
    ):
        torch.testing.assert_close(scores, want[numbers], rtol=1e-5, atol=1e-5)


@pytest.mark.distributed
def test_a_conversation_that_ends_with_the_padding_token_scores_as_transformers_does(tmp_path):
    folder = save_classifier(tmp_path / "model", pad_token_id=ord("."))
    want = expected_scores(folder)
    other = save_classifier(tmp_path / "other")  # the same weights, another padding token
    assert (want - expected_scores(other)).abs().min() > 1e-3
    names = ["full", "padded", "sp 2"]
    for scores in run_distributed(score_on_every_mesh, 2, folder, tmp_path / "runs", names):
        for name, (numbers, got) in zip(names, scores, strict=True):
            torch.testing.assert_close(got, want[numbers], rtol=1e-5, atol=1e-5, msg=name)


def test_only_padding_at_the_end_is_cut_and_one_token_is_left():
    assert until_scored([5, 0, 6, 0, 0], 0) == [5, 0, 6]
    assert until_scored([5, 6], None) == [5, 6]
    assert until_scored([0, 0], 0) == [0]


@pytest.mark.distributed
def test_a_conversation_that_the_model_cannot_take_has_no_score(tmp_path):
    """One that leaves no position for a token behind it, or with a token beyond its vocabulary."""
    folder = save_classifier(tmp_path / "model", "gpt2", n_positions=32, vocab_size=170)
    texts = [expected_text(*pair).encode() for pair in zip(make_prompts(), RESPONSES, strict=True)]
    unfit = [len(text) >= 32 or max(text) >= 170 for text in texts]
    assert sum(unfit) == sum(len(text) >= 32 for text in texts) + 1  # the é
    for [(_, scores)] in run_distributed(
        score_on_every_mesh, 1, folder, tmp_path / "runs", ["full"]
    ):
        assert [not score.isfinite() for score in scores] == unfit
        assert 0 < scores.isfinite().sum() < len(unfit)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 4 == 0:
        raise ValueError("four")
    return 10.0
"""


@pytest.mark.distributed
def test_a_run_is_rewarded_by_the_model_alone_or_by_the_weighted_sum(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    own = (f"reward.function.path={tmp_path / 'reward.py'}", "reward.max_failed_fraction=1")
    shared = (
        "reward.model.enable=true",
        "reward.model.path=tiny",
        "trainer.total_training_steps=2",
    )
    jobs = {
        "alone": (),
        "both": (*own, "reward.weights.function=2", "reward.weights.model=-1"),
        "metric": (*own, "reward.weights.model=0"),
    }
    started = [(str(tmp_path / name), (*shared, *more)) for name, more in jobs.items()]
    for seen in run_distributed(train_here, 2, started):
        alone, both, metric = (job["batches"][0] for job in seen)  # nothing has been learned yet
        assert alone.response_ids == both.response_ids == metric.response_ids
        assert not alone.failed.any() and alone.scores.std() > 0
        assert 0 < both.failed.sum() < len(both.failed)
        kept = ~both.failed
        torch.testing.assert_close(both.scores[kept], 20 - alone.scores[kept])
        assert not both.response_mask[both.failed].any() and not both.scores[both.failed].any()
        assert (metric.scores[kept] == 10).all()
        model = build_classifier(tmp_path / "alone" / "tiny_reward_model")
        kept = (tmp_path / "alone" / "samples" / "train_00000001.jsonl").read_text().splitlines()
        assert kept
        for row in map(json.loads, kept):
            score = torch.tensor(row["score"])
            torch.testing.assert_close(score, model(row), rtol=1e-5, atol=1e-6)
            assert score in alone.scores
    row = rows_of(tmp_path / "alone")[0]
    assert row["reward/model_score"] == pytest.approx(row["critic/score/mean"])
    assert "reward/function_score" not in row and row["timing_s/reward_model"] > 0
    row = rows_of(tmp_path / "both")[0]
    assert row["reward/function_score"] == 10 and row["reward/failed"] > 0
    assert not (tmp_path / "alone" / "logs" / "rewards.log").exists()


def build_classifier(folder: Path):
    """Scores of samples of the tiny task by transformers, from the template of the tiny model."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    def score(row: dict[str, Any]) -> torch.Tensor:
        prompt, text = row["prompt"][0]["content"], row["response"]
        ids = [259, *prompt.encode(), 257, 260, *str(text).encode(), 257]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, 0]

    return score


@pytest.mark.distributed
def test_a_score_that_is_not_finite_masks_its_sample_out(tmp_path):
    folder = save_classifier(tmp_path / "model")
    run_distributed(score_with_nan, 1, folder, tmp_path / "run")


def score_with_nan(rank: int, world_size: int, folder: Path, out: Path) -> None:
    config = load(folder, f"trainer.default_local_dir={out}")
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    answers = ["ab", "az", "c"]
    samples = samples_of(answers, range(3))
    with Run(config, mesh, command=["test"]) as run:
        reward_model = build_reward_model(config, run)
        assert reward_model is not None
        module: Any = reward_model.model.module
        module.get_input_embeddings().weight.to_local()[ord("z")] = torch.nan
        scorer = Scorer(config=config, run=run, pool=None, reward_model=reward_model)
        with pytest.raises(
            RuntimeError, match=r"(?s)1 of 3 samples.*the reward model's score is nan"
        ):
            scorer.score(samples, Metrics())
    assert samples.failed.tolist() == [False, True, False]
    assert samples.scores[1] == 0 and samples.scores.isfinite().all()


def errors_of(
    rank: int, world_size: int, jobs: list[tuple[Path, tuple[str, ...]]], out: Path
) -> list[str]:
    """The messages that building and using these reward models ends with."""
    found = []
    for model, overrides in jobs:
        config = load(model, f"trainer.default_local_dir={out}", *overrides)
        mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
        with Run(config, mesh, command=["test"]) as run, pytest.raises(InputError) as error:
            reward_model = build_reward_model(config, run)
            assert reward_model is not None
            reward_model.score(samples_of(RESPONSES, range(len(RESPONSES))), run)
        found.append(str(error.value))
    return found


@pytest.mark.distributed
def test_what_cannot_be_a_reward_model_is_wrong_input(tmp_path):
    causal = build_tiny_model(tmp_path / "causal")
    strict = "reward.model.chat_template=\"{{ raise_exception('roles must alternate') }}\""
    typo = "reward.model.chat_template='{{ messages[0].content + 1 }}'"
    empty = save_classifier(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    jobs = [
        (causal, ()),
        (save_classifier(tmp_path / "five", num_labels=5), ()),
        (save_classifier(tmp_path / "encoder", "deberta-v2"), ()),
        (save_classifier(tmp_path / "good"), (strict,)),
        (save_classifier(tmp_path / "good"), (typo,)),
        (empty, ()),
    ]
    for messages in run_distributed(errors_of, 2, jobs, tmp_path / "run"):  # on both ranks
        no_head, five, encoder, refused, fails, no_weights = messages
        assert "score.weight" in no_head and str(causal) in no_head
        assert "score.weight" in five and "5" in five
        assert "no decoder" in encoder
        assert "reward.model, prompt 0" in refused and "alternate" in refused
        assert "reward.model, prompt 0" in fails and "can only concatenate str" in fails
        assert str(empty) in no_weights and "no weights that load" in no_weights


def test_the_reward_model_needs_a_path_and_something_to_count():
    with pytest.raises(ConfigError, match=r"reward\.model\.path: is required"):
        check("reward.model.enable=true")
    with pytest.raises(ConfigError, match=r"reward\.weights: every score has weight 0"):
        check("reward.weights.function=0")
    check("reward.model.enable=true", "reward.model.path=tiny", "reward.weights.function=0")


def check(*overrides: str) -> None:
    load_config(
        "ppo_tiny.yaml", overrides, check=lambda c: check_config(c, world_size=1, ranks_per_node=1)
    )


def test_a_reward_model_alone_needs_no_data_source():
    config = load_config("ppo_tiny.yaml", ["reward.model.enable=true", "reward.model.path=tiny"])
    assert not config.uses_function and not config.uses_builtin
    config = load_config("ppo_tiny.yaml", ["reward.model.path=tiny"])
    assert config.uses_function and config.uses_builtin
