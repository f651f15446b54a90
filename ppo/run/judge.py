"""What the signs of life of ranks mean: who is silent, whether anything moves, who is behind.

Owns the rules. Pure: signs and seconds in, words out. Must not know how signs travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Sign(NamedTuple):
    """What a rank says of itself, again and again."""

    number: int
    """of this sign; a process that is stopped does not count on"""
    done: int
    """`Progress.done`"""
    place: int
    """`Progress.place`"""
    phase: str
    pid: int
    host: str

    def __str__(self) -> str:
        where = f", in {self.phase}" if self.phase else ""
        return f"process {self.pid} on {self.host}{where}"


class Verdict(NamedTuple):
    """Why a run is ended, in one sentence that names the suspects, and who cannot end by itself."""

    text: str
    silent: list[int]
    """ranks whose processes are stopped or gone, as far as one can tell"""


class Judge:
    """One listener's view of some ranks. Seconds are its own clock's: those of others never
    matter."""

    def __init__(
        self,
        *,
        limit_s: float,
        silence_s: float,
        suspect_s: float,
        limit_of_phase: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            limit_s: nothing may stand still on all ranks for so long.
            silence_s: no rank may be silent for so long.
            suspect_s: who is silent for so long is the cause where something is wrong already.
            limit_of_phase: in the place of limit_s while any rank is in that phase; the shortest.
        """
        self.signs: dict[int, Sign] = {}
        self._limit_s, self._silence_s, self._suspect_s = limit_s, silence_s, suspect_s
        self._limit_of_phase = limit_of_phase or {}
        self._heard_at: dict[int, float] = {}
        self.moved_at: dict[int, float] = {}
        """when the listener last heard that a rank had done something"""

    def hear(self, now: float, signs: Mapping[int, Sign]) -> None:
        """Take in what the ranks say of themselves at the moment, by rank."""
        for rank, sign in signs.items():
            before = self.signs.get(rank)
            if before is None or sign.number != before.number:
                self._heard_at[rank] = now
            if before is None or sign.done != before.done:
                self.moved_at[rank] = now
        self.signs |= signs

    def forgive(self, now: float) -> None:
        """Begin to count anew: the listener itself was stopped, or the run begins."""
        self._heard_at = dict.fromkeys(self._heard_at, now)
        self.moved_at = dict.fromkeys(self.moved_at, now)

    def suspects(self, now: float) -> str | None:
        """Who is silent where something is wrong already, in words."""
        silent = self._silent(now, self._suspect_s)
        return self._silence(now, silent) if silent else None

    def _silent(self, now: float, for_s: float) -> list[int]:
        return [rank for rank, at in self._heard_at.items() if now - at >= for_s]

    def _silence(self, now: float, ranks: list[int]) -> str:
        most = max(now - self._heard_at[rank] for rank in ranks)
        others = {sign.phase for rank, sign in self.signs.items() if rank not in ranks} - {""}
        where = f"; the others are in {', '.join(sorted(others))}" if others else ""
        return (
            f"no sign of life for {most:.0f} s from {self._named(ranks)}: stopped, gone, or its "
            f"machine is lost{where}"
        )

    def verdict(self, now: float, *, moving: bool) -> Verdict | None:
        """What is wrong by now. `moving`: whether it also matters that nothing moves."""
        still = now - max(self.moved_at.values(), default=now)
        limit = min(map(self._limit_in, self.signs.values()), default=math.inf)
        is_still = moving and still >= limit
        if silent := self._silent(now, self._suspect_s if is_still else self._silence_s):
            return Verdict(self._silence(now, silent), silent)
        if not is_still:
            return None
        text = f"nothing has moved for {still:.0f} s: "
        last, first = (f(s.place for s in self.signs.values()) for f in (min, max))
        if last < first:
            behind = [rank for rank, sign in self.signs.items() if sign.place == last]
            return Verdict(f"{text}the others wait for {self._named(behind)}", [])
        phases = sorted({sign.phase or "no phase" for sign in self.signs.values()})
        return Verdict(f"{text}all ranks stand at the same point, in {', '.join(phases)}", [])

    def _limit_in(self, sign: Sign) -> float:
        phases = self._limit_of_phase.keys() & sign.phase.split("/")
        return min((self._limit_of_phase[phase] for phase in phases), default=self._limit_s)

    def _named(self, ranks: list[int], most: int = 8) -> str:
        named = [f"rank {rank} ({self.signs[rank]})" for rank in ranks[:most]]
        more = [f"{len(ranks) - most} more"] if len(ranks) > most else []
        return ", ".join([*named, *more])
