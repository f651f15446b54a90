"""The process groups and device meshes of a run.

Owns their construction from `ParallelDims`. Must not know models or what is sent over the groups.
"""

from sharding.dims import ParallelDims

__all__ = ["ParallelDims"]
