"""status.json as one start writes it: what it has come to, and what it has failed of.

Owns who may write it: nobody before the start is accepted, rank 0 while all is well, the rank that
has failed first when something is not. Must not know what the ranks do, or how they hear of it.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from ppo.run.folder import Outcome, read_status, write_status
from sharding.progress import PROGRESS

logger = logging.getLogger(__name__)


class Status:
    """What this rank knows and writes of the outcome."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.step = 0
        """iterations done"""
        self.alarms: dict[str, str] = {}
        """what is the matter at the moment, by metric"""
        self.startup_s: dict[str, float] = {}
        """of the parts of this start"""
        self.is_ours = False
        """whether this start may write: before, the outcome of an earlier one stays"""
        self.is_cause = False
        """this rank's failure is the run's"""
        self.failure = ""
        """what this rank has failed of, with rank and phase"""
        self._rank = rank

    def note(self, state: Outcome, reason: str = "") -> None:
        """Write it on rank 0. A failure stays until the next start."""
        if self._rank == 0 and self.is_ours and not self._has_failed():
            self.write(state, reason)

    def write(self, state: Outcome, reason: str) -> None:
        """A run must not fail, and a failure not be hidden, because it cannot be written down."""
        try:
            write_status(
                self.folder,
                state,
                step=self.step,
                reason=reason,
                alarms=self.alarms,
                startup_s=self.startup_s,
            )
        except OSError as error:
            logger.error("status.json does not say %s: %s", state, error)

    def fail(self, reason: str, claim: Callable[[str], bool], *, level: int) -> None:
        """Write the failure of this rank, if `claim` says that it is the first.

        On a busy machine the store may not answer in time, and the claim then counts as the first:
        one that is written down was before it.
        """
        where = f" in {PROGRESS.left_in}" if PROGRESS.left_in else ""
        self.failure = f"rank {self._rank}{where}: {reason}"
        if claim(self.failure) and not (self.is_ours and self._has_failed()):
            self.is_cause = True
            self.write_failure(self.failure, level=level)
        else:
            logger.debug("failed too: %s", self.failure)

    def write_failure(self, reason: str, *, level: int = logging.ERROR) -> None:
        """Write and say why the run has failed; what struck first stays."""
        if not self.is_ours:
            logger.log(level, "this start failed: %s", reason)
        elif not self._has_failed():
            self.write("failed", reason)
            logger.log(level, "failed at step %d: %s", self.step, reason)

    def _has_failed(self) -> bool:
        status = read_status(self.folder)
        return status is not None and status["state"] == "failed"
