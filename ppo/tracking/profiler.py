"""Traces of iterations that the user names: the first mini-batch of the actor's update.

Owns what is recorded and where it lies: RUN/profile/step_00000003/ has rank_0000.trace.json.gz of
each rank (Perfetto opens it), rank_0000.memory.pickle on CUDA (pytorch.org/memory_viz), and
summary.md of rank 0. Must not know what the update does: it ends with an optimizer's first step.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from ppo.tracking.trace import Summary, read_events, summarise

logger = logging.getLogger(__name__)

MOST_ALLOCATIONS = 200_000
"""entries of a memory snapshot's history"""


class Rank(Protocol):
    """What a trace has to know of the process that it is of; a mesh does."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class StepProfiler:
    """Profiles the iterations `steps` on this rank; on all others it does nothing."""

    def __init__(self, folder: Path, steps: Sequence[int], where: Rank) -> None:
        """folder: of the run."""
        self._folder, self._steps = folder / "profile", frozenset(steps)
        self._rank, self._cuda = where.rank, where.device.type == "cuda"
        self._running: profile | None = None
        self._recorded: tuple[profile, Path] | None = None

    @contextmanager
    def window(self, step: int, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Record from here to the end of the optimizer's first step, or of the block.

        An exception ends the run, and nothing is waited for: kernels may never end whose partners
        on other ranks are gone.
        """
        if step not in self._steps:
            yield
            return
        folder = self._folder / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        hook = optimizer.register_step_post_hook(lambda *_: self._stop(folder))
        self._start()
        yield
        hook.remove()
        self._stop(folder)

    def report(self) -> dict[str, float]:
        """Write down what was recorded since the last call; its metrics, of this rank.

        It takes seconds, and belongs to no phase that is timed.
        """
        if self._recorded is None:
            return {}
        (recorded, folder), self._recorded = self._recorded, None
        path = folder / f"rank_{self._rank:04d}.trace.json.gz"
        try:
            recorded.export_chrome_trace(str(path))
            found = summarise(read_events(path))
            if self._rank == 0:
                self._write_table(found, folder)
        except OSError as error:  # a full disk ends no run
            logger.warning("%s is not written: %s", path, error)
            return {}
        return found.metrics()

    def _write_table(self, found: Summary, folder: Path) -> None:
        (folder / "summary.md").write_text(found.table(), encoding="utf-8")
        logger.info("profile in %s\n%s", folder, found.table())

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._running = profile(activities=activities)
        self._running.start()

    def _stop(self, folder: Path) -> None:
        """Once a window: after the first optimizer step nothing more is recorded."""
        if self._running is None:
            return
        running, self._running = self._running, None
        if self._cuda:
            torch.cuda.synchronize()  # kernels that are under way belong to it
        running.stop()
        self._recorded = running, folder
        if self._cuda:
            path = folder / f"rank_{self._rank:04d}.memory.pickle"
            try:
                torch.cuda.memory._dump_snapshot(str(path))
            except OSError as error:
                logger.warning("%s is not written: %s", path, error)
            torch.cuda.memory._record_memory_history(enabled=None)
