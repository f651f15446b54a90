"""Ends a run that has failed on another rank, or that stands still, on every rank and with a cause.

Owns two daemon threads of each rank, and the end of a process that cannot end by itself. One thread
says over the store of the process group that this rank lives and how far it has come
(sharding/progress.py), and hears the others; no device, collective or file system is needed for
that. The other one acts on what was heard: a store whose machine has frozen never answers, and then
nothing new is heard. Must not know what the phases do, nor what is written of a failure.

Rank 0 listens to all ranks, the others to rank 0, so that the traffic grows with the ranks only.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any, NamedTuple, TypeVar

from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from ppo.run.judge import Judge, Sign
from ppo.run.signals import kill_descendants
from ppo.run.stacks import STACKS_SIGNAL, kill_stopped
from sharding.progress import PROGRESS, in_debugger

logger = logging.getLogger(__name__)

T = TypeVar("T")
LONGEST_INTERVAL_S = 2.0
"""between two signs of life"""
SIGNS_PER_LIMIT = 8
PAUSE_SHARE = 0.1
"""of the interval, that lies between two signs at least: a phase that begins is said at once"""
MISSING_SIGNS = 3
"""after which a rank is a suspect, where something has gone wrong already"""
GRACE_S = 5.0
"""for a rank to end by itself once another has failed: most fail of the same"""
LEAVE_S = 15.0
"""in which a rank that has failed must close what it owns, unless something moves: a checkpoint in
flight is finished"""
STORE_S = 3.0
LAST_WORDS_S = 10
"""what the end may take, on a file system that hangs"""


class _News(NamedTuple):
    """What the last exchange has brought."""

    failure: dict[str, Any] | None = None
    """rank and text of what struck first"""
    lost: str | None = None
    """who is silent, in words, as rank 0 hears it"""
    end: dict[str, Any] | None = None
    """all ranks are to end: text, and the processes that cannot by themselves"""


class Watchdog:
    """Context manager around everything that may hang. Every rank opens one, of the same name."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        local_rank: int,
        world_size: int,
        hang_timeout_s: float,
        silence_s: float,
        limit_of_phase: Mapping[str, float],
        log: IO[str],
        last_words: Callable[[str, bool, bool], None],
    ) -> None:
        """
        Args:
            name: of this run among all that use the store.
            hang_timeout_s: 0 = only what another rank says ends this one.
            silence_s, limit_of_phase: see `Judge`.
            log: where stacks go; a real file.
            last_words: called before the process is ended with the reason, and whether it is for
                this rank to write it down, and to tell it to the launcher.
        """
        self._store = PrefixStore(name, store.clone())
        self._rank, self._local_rank = rank, local_rank
        self._log, self._last_words = log, last_words
        self._heeded = range(world_size) if rank == 0 else (0, rank)
        limit = hang_timeout_s or silence_s
        self._interval = min(LONGEST_INTERVAL_S, limit / SIGNS_PER_LIMIT)
        self._judges = hang_timeout_s > 0
        self._judge = Judge(
            limit_s=hang_timeout_s,
            silence_s=silence_s,
            suspect_s=MISSING_SIGNS * self._interval,
            limit_of_phase=limit_of_phase,
        )
        self._lock = threading.Lock()  # of the judge
        self._news = _News()
        self._met = self._begun = False
        self._failing: tuple[float, str] | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> Watchdog:
        for key in _News._fields:
            self._store.compare_set(key, "", "null")
        faulthandler.register(STACKS_SIGNAL, file=self._log, all_threads=True)
        for work in (self._exchange, self._watch):
            threading.Thread(target=work, daemon=True, name=f"watchdog{work.__name__}").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        faulthandler.unregister(STACKS_SIGNAL)

    def begin(self) -> None:
        """From now on it matters whether anything moves; what comes before has its own limits."""
        with self._lock:
            self._judge.forgive(time.monotonic())
        self._begun = True

    def claim(self, text: str) -> bool:
        """This rank fails. Whether it is the first, whose reason is the run's."""
        self._failing = self._failing or (time.monotonic(), text)
        mine = json.dumps({"rank": self._rank, "text": text})
        store = self._store
        found = _within(STORE_S, lambda: store.clone().compare_set("failure", "null", mine))
        return found is None or found == mine.encode()

    def tell_others(self, text: str, silent: Mapping[int, Sign] | None = None) -> None:
        """All ranks are to end; `silent` are processes that cannot by themselves."""
        stopped = [[sign.host, sign.pid] for sign in (silent or {}).values()]
        end = {"text": text, "stopped": stopped, "hung": silent is not None}
        end = json.dumps(end | {"host": socket.gethostname()})
        _within(STORE_S, lambda: self._store.clone().compare_set("end", "null", end))

    def explained(self, error: str) -> str:
        """The text of an error of communication, behind who has caused it.

        Waits a few signs long for it. Unchanged where nobody is missing, or where another rank has
        failed and says so itself.
        """
        patience = self._interval * (2 * MISSING_SIGNS + 1)
        started = time.monotonic()
        while not self._stopped.wait(self._interval / 4):
            news, now = self._news, time.monotonic()
            if news.failure is not None or now - started > patience:
                break
            with self._lock:
                lost = self._judge.suspects(now) or news.lost
            if lost is not None:
                return f"{lost} ({error})"
        return error

    def give_up(self, text: str) -> None:
        """This rank cannot go on, whatever its main thread is in: end it, and the others."""
        first = self.claim(text)
        self.tell_others(text)
        self._end(text, [], writes=first, tells=first)

    # From here on: the thread that talks.

    def _exchange(self) -> None:
        number, pause = 0, PAUSE_SHARE * self._interval
        while not self._stopped.wait(pause if number else 0):
            number += 1
            PROGRESS.entered.clear()
            with suppress(RuntimeError):  # of the store: what is not heard is missed by the other
                self._exchange_once(number)
            PROGRESS.entered.wait(self._interval - pause)

    def _exchange_once(self, number: int) -> None:
        if in_debugger():
            PROGRESS.tick()
        progress = PROGRESS.done, PROGRESS.place, PROGRESS.phase
        mine = Sign(number, *progress, os.getpid(), socket.gethostname())
        self._store.set(f"sign/{self._rank}", json.dumps(mine))
        keys = [*_News._fields, *(f"sign/{rank}" for rank in self._heeded)]
        if not self._met:  # who has not come must not keep this rank from giving signs
            self._store.wait(keys, timedelta(seconds=STORE_S))
            self._met = True
        failure, lost, end, *signs = map(json.loads, self._store.multi_get(keys))
        self._news = _News(failure, lost, end)
        with self._lock:
            now = time.monotonic()
            heard = {r: Sign(*sign) for r, sign in zip(self._heeded, signs, strict=True)}
            self._judge.hear(now, heard)
            text = self._judge.suspects(now)
        if self._rank == 0 and text != lost:
            self._store.set("lost", json.dumps(text))

    # From here on: the thread that acts.

    def _watch(self) -> None:
        last = time.monotonic()
        told_at: float | None = None
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if now - last > MISSING_SIGNS * self._interval:  # this process was stopped, or all
                with self._lock:
                    self._judge.forgive(now)
            last, end = now, self._news.end
            if self._failing is not None:
                self._hurry(now, *self._failing)
            elif end is not None:
                told_at = told_at or now
                if end["hung"] or now - told_at > GRACE_S:
                    is_other_node = end["host"] != socket.gethostname()
                    tells = is_other_node and self._local_rank == 0
                    self._end(end["text"], end["stopped"], tells=tells)
            elif self._judges:
                self._look(now)

    def _look(self, now: float) -> None:
        with self._lock:
            verdict = self._judge.verdict(now, moving=self._begun and self._rank == 0)
            signs = dict(self._judge.signs)
        if verdict is None:
            return
        text = verdict.text
        if self._rank in verdict.silent:  # it hears not even itself
            text, verdict = "the store of the process group does not answer", None
        first = self.claim(text)
        silent = {rank: signs[rank] for rank in verdict.silent} if verdict else {}
        self.tell_others(text, silent)
        stopped = [[sign.host, sign.pid] for sign in silent.values()]
        self._end(text, stopped, writes=first, tells=first)

    def _hurry(self, now: float, failed_at: float, text: str) -> None:
        """End a rank that has failed and does not come to its end."""
        with self._lock:
            since = max(failed_at, self._judge.moved_at.get(self._rank, 0.0))
        if now - since > LEAVE_S:
            self.tell_others(text)
            self._end(text, [], tells=True)

    def _end(
        self, text: str, stopped: list[list[Any]], *, writes: bool = False, tells: bool
    ) -> None:
        """End this process, all that it has started, and its siblings that are stopped."""
        if self._stopped.is_set():
            return
        signal.alarm(LAST_WORDS_S)  # the kernel's word
        _within(1.0, lambda: faulthandler.dump_traceback(self._log, all_threads=True))
        _within(STORE_S, lambda: self._last_words(text, writes, tells))
        kill_stopped([pid for host, pid in stopped if host == socket.gethostname()])
        kill_descendants()
        os._exit(1)


def is_of_communication(exception: BaseException) -> bool:
    """Whether it says no more than that another rank is gone or does not come."""
    is_gloos = type(exception) is RuntimeError and "gloo" in str(exception)
    return is_gloos or isinstance(exception, DistError)


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """What the action returns; None where it fails, or takes longer."""
    result: list[T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            result.append(action())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
