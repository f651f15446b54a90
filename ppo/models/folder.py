"""A path, a hub name or `tiny` as a folder of this machine."""

from pathlib import Path

from ppo.models.tiny import build_tiny_model
from ppo.run.run import Run


def model_folder(path: str, run: Run, *, classifier: bool = False) -> Path:
    """The folder of a model: as given, from the hub, or `tiny` built into the run folder."""
    if path == "tiny" and classifier:
        return build_tiny_model(run.dir / "tiny_reward_model", classifier=True)
    if path == "tiny":
        return build_tiny_model(run.dir / "tiny_model")
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    files, error = ["*.json", "*.safetensors", "*.jinja", "*.model"], None
    if run.mesh.local_rank == 0:  # one download per node, then the others find it
        try:
            snapshot_download(path, allow_patterns=files)
        except (OSError, ValueError) as problem:
            error = ValueError(f"model {path}: no such folder here, and the hub says: {problem}")
    run.agree(error)
    return Path(snapshot_download(path, allow_patterns=files, local_files_only=True))
