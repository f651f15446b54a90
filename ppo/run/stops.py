"""Requests to stop: what may ask this rank, and what all ranks have agreed on.

Owns the kinds of requests, their order, and what a run that is stopped by one has come to. Must not
know how ranks agree, or what stopping means.
"""

import logging
import os
import time
from pathlib import Path

from ppo.run.folder import Outcome
from ppo.run.signals import CTRL_C, SignalWatch

logger = logging.getLogger(__name__)

# What a run that is stopped by it has come to. Place = code that is all-reduced by maximum, so that
# what a person asks for counts more than what a scheduler does; 0: go on.
STOPS: dict[str, Outcome] = {
    "": "finished",
    "SIGTERM": "preempted",
    "SIGUSR1": "preempted",
    "PREEMPT file": "preempted",
    "trainer.max_wall_time": "preempted",
    "STOP file": "stopped",
    CTRL_C: "interrupted",
}
_REASONS = tuple(STOPS)
STOP_FILES = ("STOP", "PREEMPT")


def remove_old_files(folder: Path, earlier: Outcome | None) -> None:
    """Remove what has asked an earlier start to stop.

    Each start does so: a STOP that is there was touched since the last one began. Where that was
    preempted or killed it has not been obeyed, and the job starts again by itself: it stays.

    Args:
        earlier: the state that the last start has left; None = there is none to go on with.
    """
    for name in STOP_FILES:
        file = folder / name
        if name == "STOP" and earlier in ("running", "preempted") and file.exists():
            logger.warning("%s has not stopped the start before this one: it stops this one", file)
        else:
            file.unlink(missing_ok=True)


class StopRequests:
    """`code` is what the ranks agree on, 0 while nothing is asked for."""

    def __init__(
        self,
        signals: SignalWatch,
        *,
        folder: Path | None,
        max_wall_time: float | None,
        saves: bool = True,
    ) -> None:
        """
        Args:
            saves: whether a run that is stopped can go on; one that would begin anew every time
                that it is preempted is stopped for good.
            folder: where STOP and PREEMPT are looked for; None where another rank does.
            max_wall_time: seconds from now; None = for ever.
        """
        self.code = 0
        self._signals, self._folder, self._saves = signals, folder, saves
        self._max_wall_time, self._started = max_wall_time, time.monotonic()

    @property
    def reason(self) -> str:
        """What has asked for it; empty while nothing has."""
        reason = _REASONS[self.code]
        return f"{reason}, nothing is saved" if self._is_final else reason

    @property
    def outcome(self) -> Outcome:
        """What the run has come to when it ends well."""
        return "stopped" if self._is_final else STOPS[_REASONS[self.code]]

    @property
    def _is_final(self) -> bool:
        return STOPS[_REASONS[self.code]] == "preempted" and not self._saves

    def own(self) -> int:
        """The code of what this rank is asked for at the moment."""
        if self._signals.stop_signal is not None:
            return _REASONS.index(self._signals.stop_signal)
        if self._folder is not None:
            for name in STOP_FILES:
                if os.path.exists(self._folder / name):
                    return _REASONS.index(f"{name} file")
        limit = self._max_wall_time
        if limit is not None and time.monotonic() - self._started >= limit:
            return _REASONS.index("trainer.max_wall_time")
        return 0

    def note(self, code: int) -> None:
        """Take in the largest code of all ranks."""
        if code and not self.code:
            logger.info("stop requested by %s", _REASONS[code])
        self.code = max(code, self.code)
