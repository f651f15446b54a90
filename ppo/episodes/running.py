"""An episode that has not ended, as its pool sees it: over all its beginnings, and its turns that
are on their way.

Owns what it is told again when it begins again: the turns that it had. Must not know processes.
"""

from collections.abc import Iterator

from ppo.episodes.contract import EpisodeSpec, Limits, TurnReply, TurnRequest
from ppo.episodes.transcript import Transcript, replay


class Running:
    """One episode; its code runs in a process, or its tape is fed."""

    def __init__(self, spec: EpisodeSpec, limits: Limits) -> None:
        self.spec = spec
        self.transcript = Transcript(spec, limits)
        self.tape: Iterator[list[TurnRequest]] | None = None
        if spec.tape is not None:
            self.tape = replay(self.transcript, spec.tape)
        self.beginnings = 0
        """times that it was begun again, because of others"""
        self.alone = False
        """it gets a process to itself"""
        self.deadline = float("inf")
        self._limits = limits
        self._earlier: Transcript | None = None
        self._flying: dict[int, TurnRequest] = {}  # what the engine owes, by segment
        self._held: dict[int, TurnRequest] = {}  # asked for while it is still at another request

    def ask(self, request: TurnRequest) -> TurnReply | TurnRequest | None:
        """What becomes of a turn that its code asks for: the reply that it had when it asked this
        before, a request to the engine, or nothing, as the engine is at it already."""
        known = self._earlier.recall(request) if self._earlier is not None else None
        if known is not None:
            return known
        flying = self._flying.setdefault(request.segment, request)
        if flying is request:
            return request
        if flying != request:
            self._held[request.segment] = request
        return None

    def answer(self, reply: TurnReply) -> TurnReply | TurnRequest | None:
        """What becomes of an answer of the engine: a reply to what its code has asked for, a
        request that had to wait for it, or nothing now."""
        asked = self._flying.pop(reply.segment, None)
        if asked is None:
            return None
        if reply.segment in self._held:
            return self.ask(self._held.pop(reply.segment))
        if self.transcript.asks(asked):
            return reply
        if self._earlier is not None and self._earlier.asks(asked):
            self._earlier.answer(reply)  # it will ask again
        return None

    def begin_again(self, *, alone: bool) -> None:
        """Forget what its code has done, but not the turns that it had."""
        known = [t for t in (self._earlier, self.transcript) if t is not None]
        self._earlier = max(known, key=lambda transcript: transcript.counts["turns"])
        self.transcript = Transcript(self.spec, self._limits)
        self._held.clear()
        self.beginnings += 1
        self.alone = alone
