"""The prompts of a run are read once on every node, and what is wrong is said on every rank."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_model
from ppo.rollout.prompts import load_prompts
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed


def load(
    folder: Path, *overrides: str, ranks: tuple[int, int] = (1, 1), vocabulary: int | None = 512
) -> PromptSets:
    """Load in the running world. ranks: of the world, and of a node of it."""
    where = f"trainer.default_local_dir={folder / 'run'}"
    config = load_config("ppo_tiny.yaml", [where, "trainer.device=cpu", *overrides])
    mesh = build_mesh(config.dims(*ranks), torch.device("cpu"))
    with Run(config, mesh, command=[]) as run:
        prompts = load_prompts(config, run, folder / "model", vocabulary=vocabulary)
    return prompts


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
    build_tiny_model(tmp_path / "model")
    with init_distributed(torch.device("cpu")):
        prompts = load(tmp_path, vocabulary=vocabulary)
    assert prompts.num_ids == num_ids
    assert said in caplog.text and bool(said) == ("ids up to" in caplog.text)


def refused(folder: Path, *overrides: str, ranks: tuple[int, int]) -> str:
    with pytest.raises(InputError) as error:
        load(folder, *overrides, ranks=ranks)
    return str(error.value)


def loads(rank: int, world: int, folder: Path) -> tuple[list[Prompt], list[str], set[str]]:
    """Prompts of a node of two ranks, refusals, and names of temporary files."""
    tempfile.tempdir = str(folder / "tmp")
    own = f"data.train_files=[{folder}/{'gone' if rank else 'a'}.jsonl]"
    prompts = load(folder, own, ranks=(2, 2))  # rank 1 does not look for its file
    found = list(prompts.all())[: len(prompts.train)]
    names = {path.name for path in Path(tempfile.tempdir).iterdir()}
    build = f"data.custom_cls.path={folder}/mine.py"
    said = [
        refused(folder, own, ranks=(2, 1)),  # now it is a node of its own
        refused(folder, own.replace("gone", "other"), ranks=(2, 1)),
        refused(folder, own.replace("/a.", "/bad."), ranks=(2, 2)),
        refused(folder, build, f"data.custom_cls.name=Of{rank}", ranks=(2, 2)),
    ]
    return found, said, names


@pytest.mark.distributed
def test_one_rank_of_a_node_reads_for_all_and_what_any_rank_finds_is_raised_on_all(tmp_path):
    build_tiny_model(tmp_path / "model")
    (tmp_path / "tmp").mkdir()
    row = {"data_source": "tiny", "ground_truth": "a", "extra": [1, 2.5, None, {"b": "\u00e9"}]}
    for name, texts in {"a": "xyz" * 8, "other": "uvw" * 8, "bad": [3]}.items():
        lines = (json.dumps(row | {"prompt": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "mine.py").write_text(
        "from ppo.data.dataset import Prompt, PromptDataset\n"
        "class Of0(PromptDataset): pass\n"
        "class Of1(PromptDataset):\n"
        "    def __len__(self): return 0\n"
    )
    (first, said, names), (second, also, _) = run_distributed(loads, 2, tmp_path)
    assert len(first) == 24 and first == second and names == set()
    assert first[1].extra_info == {"extra": [1, 2.5, None, {"b": "\u00e9"}]}
    assert said == also
    missing, different, bad, empty = said
    assert missing == f"{tmp_path}/gone.jsonl: no such file"
    assert "train_files: the nodes have different prompts under these names (24, 24)" in different
    assert bad.startswith(f"{tmp_path}/bad.jsonl, row 0 (line 1), column 'prompt': must be text")
    assert "Of1 of " in empty and "holds no prompt" in empty
