"""A path, a hub name or `tiny` as a folder of this machine, and the small files in it.

Owns which files of a hub repository a model needs, and generation_config.json. Must not know
weights.
"""

import json
import logging
from pathlib import Path
from typing import Any

from ppo.config import ConfigError, Problem
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_model
from sharding.agree import raise_everywhere
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# Configuration and tokenizer, whatever their kind (merges.txt, tokenizer.model.v3, ...), and code
# that comes with a model, which model.trust_remote_code runs.
SMALL_FILES = ("*.json", "*.txt", "*.model*", "*.spm", "*.tiktoken", "*.jinja", "*.py")
WEIGHTS = "*.safetensors"
OLD_WEIGHTS = "pytorch_model*.bin"
"""fetched where a repository has no safetensors"""
# Copies of the weights for other programs: original/ of Llama, onnx/, ...
IGNORED = ("*/*.safetensors", "*/*.bin")


def model_folder(path: str, mesh: Mesh, run_dir: Path, *, classifier: bool = False) -> Path:
    """The folder of a model: as given, from the hub, or `tiny` built into the run folder.

    Collective. Raises ConfigError on all ranks when there is no such model, or when its
    generation_config.json cannot be read.
    """
    if path == "tiny":
        name = "tiny_reward_model" if classifier else "tiny_model"
        return build_tiny_model(run_dir / name, classifier=classifier)
    folder, error = Path(path), None
    is_hub_name = not folder.is_dir()
    try:
        if is_hub_name:
            logger.info("%s: no such folder here; from the hub, or its cache", path)
        if is_hub_name and mesh.local_rank == 0:  # one download per node, then the others find it
            _fetch(path)
    except (OSError, ValueError) as problem:
        error = f"model {path}: no such folder here, and the hub says: {problem}"
    raise_everywhere(error, mesh.host_group, _config_error, name_ranks=False)
    if is_hub_name:
        folder = _fetch(path, local_files_only=True)
    try:
        read_generation_config(folder)
    except InputError as problem:
        error = str(problem)
    raise_everywhere(error, mesh.host_group, _config_error, name_ranks=False)
    return folder


def _fetch(name: str, *, local_files_only: bool = False) -> Path:
    """The files of a hub repository that a model needs, as a folder of the hub's cache."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(patterns),
                ignore_patterns=list(IGNORED),
                local_files_only=local_files_only,
            )
        )

    folder = fetch(*SMALL_FILES, WEIGHTS)
    if not any(folder.glob(WEIGHTS)):
        folder = fetch(*SMALL_FILES, OLD_WEIGHTS)
    return folder


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a model's folder; empty where there is none.

    Raises InputError for a file that is no JSON object.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # no UTF-8, no JSON
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is no JSON object, but {type(content).__name__}")
    return content


def files_to_keep(folder: Path) -> list[Path]:
    """Files of a model's folder that a checkpoint of it keeps as they are: which tokens end a
    response is known nowhere else."""
    path = folder / GENERATION_CONFIG
    return [path] if path.is_file() else []


def _config_error(text: str) -> ConfigError:
    return ConfigError([Problem("", None, text)])
