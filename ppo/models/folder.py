"""A path, a hub name or `tiny` as a folder of this machine."""

from pathlib import Path

from ppo.config import ConfigError, Problem
from ppo.models.tiny import build_tiny_model
from sharding.agree import raise_everywhere
from sharding.mesh import Mesh


def model_folder(path: str, mesh: Mesh, run_dir: Path, *, classifier: bool = False) -> Path:
    """The folder of a model: as given, from the hub, or `tiny` built into the run folder.

    Collective. Raises ConfigError on all ranks when there is no such model.
    """
    if path == "tiny" and classifier:
        return build_tiny_model(run_dir / "tiny_reward_model", classifier=True)
    if path == "tiny":
        return build_tiny_model(run_dir / "tiny_model")
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    files, error = ["*.json", "*.safetensors", "*.jinja", "*.model"], None
    if mesh.local_rank == 0:  # one download per node, then the others find it
        try:
            snapshot_download(path, allow_patterns=files)
        except (OSError, ValueError) as problem:
            error = f"model {path}: no such folder here, and the hub says: {problem}"
    raise_everywhere(error, mesh.host_group, _config_error, name_ranks=False)
    return Path(snapshot_download(path, allow_patterns=files, local_files_only=True))


def _config_error(text: str) -> ConfigError:
    return ConfigError([Problem("", None, text)])
