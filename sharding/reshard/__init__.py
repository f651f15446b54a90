"""FSDP shards become the engine's tensor-parallel slices, with the fewest bytes moved."""

from sharding.reshard.full_tensors import FullTensors
from sharding.reshard.resharder import Bucket, Resharder

__all__ = ["Bucket", "FullTensors", "Resharder"]
