"""How long the parts of a start take, up to the first iteration.

Owns the names and seconds that status.json has of them. Must not know what the parts do.
"""

import os
import time


class StartClock:
    """Seconds between the marks of one process, in order."""

    def __init__(self, age_s: float = 0.0) -> None:
        """age_s: how long the process has been there already."""
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - age_s

    def mark(self, part: str) -> None:
        """A part has ended that began with the mark before; only the first time of each counts."""
        now = time.monotonic()
        if part not in self.seconds:
            self.seconds[part] = round(now - self._last, 3)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        return f"started in {sum(self.seconds.values()):.1f} s: {parts}"


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # a name may hold spaces
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): field 22, since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0
