"""How many steps of an engine in this process make a slice of time.

Owns their number, which is the same on every rank of a rollout group: ranks that gave control back
by their own clocks would do so at different steps. Must not know any engine.
"""

import torch
import torch.distributed as dist

from sharding.mesh import Mesh


class StepCount:
    """The steps of the next slice; one at first, and at most twice as many as in the last one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.steps = mesh, 1

    def learn(self, elapsed_s: float, wanted_s: float) -> None:
        """A slice of all its steps took so long. Collective over the rollout group."""
        wanted = int(self.steps * wanted_s / max(elapsed_s, 1e-6))
        steps = torch.tensor(min(max(wanted, 1), 2 * self.steps))
        if self._mesh.dims.rollout_tp > 1:
            dist.broadcast(steps, group=self._mesh.rollout_host_group, group_src=0)
        self.steps = int(steps)
