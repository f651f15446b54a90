"""Distributed checkpoints: `Checkpointer` saves and loads, `export_hf` writes a HF folder."""

from sharding.checkpoint.checkpointer import Checkpointer
from sharding.checkpoint.export import export_hf
from sharding.checkpoint.files import CheckpointError, DamagedCheckpoint
from sharding.checkpoint.folder import find_checkpoint

__all__ = ["CheckpointError", "Checkpointer", "DamagedCheckpoint", "export_hf", "find_checkpoint"]
