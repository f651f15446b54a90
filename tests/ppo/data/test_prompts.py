"""What tokenizer and model have in common is said before anything is generated."""

import pytest

from ppo.config import load_config
from ppo.data.prompts import load_prompts
from ppo.models.tiny import build_tiny_model


@pytest.mark.parametrize(
    ("vocabulary", "num_ids", "said"),
    [
        (None, 512, ""),
        (576, 512, ""),
        (500, 500, "the tokenizer has ids up to 511 ('<|reserved_511|>'), and the model has 500"),
    ],
)
def test_the_ids_that_are_sampled_are_those_of_tokenizer_and_model(
    tmp_path, caplog, vocabulary, num_ids, said
):
    folder = build_tiny_model(tmp_path / "model")
    prompts = load_prompts(load_config("ppo_tiny.yaml", []), folder, vocabulary=vocabulary)
    assert prompts.num_ids == num_ids
    assert said in caplog.text and bool(said) == ("ids up to" in caplog.text)
