"""What is no model, or not all of one, is told from names and heads of files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ppo.check.model_folder import model_problems

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def whole(folder: Path, name: str = "model.safetensors") -> Path:
    """A folder with a config.json and a file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(0, np.float32)}, folder / name)
    return folder


def said(path: Path) -> str:
    return " | ".join(f"{found.rule}; {found.fix}" for found in model_problems(path))


def test_a_folder_with_all_its_files_is_fine(tmp_path: Path) -> None:
    assert said(whole(tmp_path / "one")) == ""
    two = whole(tmp_path / "two", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    assert said(two) == ""
    old = whole(tmp_path / "old")
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    assert said(old) == ""


def cut(number: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:number])

    return change


def with_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(-1), ("model.safetensors: has", "whole it has", "copy or download it again")),
        (cut(40), ("model.safetensors: is no safetensors file, or cut",)),
        (cut(4), ("no safetensors file, or cut",)),
        (cut(0), ("no safetensors file, or cut",)),
        (lambda f: (f / "model.safetensors").write_bytes(POINTER), ("Git LFS", "git lfs pull")),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"),
            ("model.safetensors: is no safetensors file",),
        ),
        (lambda f: (f / "model.safetensors").unlink(), ("no weights (*.safetensors)",)),
        (with_index, ("2 of the 3 files", "b.safetensors, c.safetensors", "missing")),
        (lambda f: (f / "config.json").unlink(), ("no config.json",)),
    ],
)
def test_weights_that_are_missing_or_cut_are_named(
    tmp_path: Path, change: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    folder = whole(tmp_path / "model")
    change(folder)
    for word in words:
        assert word in said(folder)


def test_what_stands_in_the_place_of_a_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    whole(tmp_path / "models" / "inner")
    assert said(tmp_path / "models").endswith(f"{tmp_path}/models/inner has one")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert f"python -m sharding.checkpoint export {tmp_path}/run FOLDER" in said(tmp_path / "run")
    (tmp_path / "adapters").mkdir()
    keys = {"base_model_name_or_path": "Qwen/Qwen3-8B"}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(keys))
    assert "it holds adapters" in said(tmp_path / "adapters")
    assert "(Qwen/Qwen3-8B)" in said(tmp_path / "adapters")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a file" in said(tmp_path / "model.gguf")
    assert "GGUF" in said(tmp_path / "model.gguf")
