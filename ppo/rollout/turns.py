"""Episodes over all engines: each turn that one asks for is a request to the engine of its leader.

Owns what goes between the pools of episodes, which the leaders hold, and the engines. Must not know
what episodes do, or what becomes of them.

An engine that answers the same requests with the same bits gets them in rounds, when every episode
that runs has asked, but for those that wait for a process: which turns share a step does not depend
on how fast tools are then, and an episode can be repeated. Another one gets each turn as it comes.
"""

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ppo.engines.contract import SLICE_S, Completion, Engine, Generation, Request, SamplingParams
from ppo.episodes.contract import EpisodeResult, EpisodeSpec, TurnReply, TurnRequest
from ppo.episodes.pool import EpisodePool
from ppo.rollout.generate import Queues
from sharding.agree import together
from sharding.mesh import Mesh
from sharding.progress import PROGRESS

PATIENCE_S = 0.05
"""that an engine, or a pool, is waited for while the other may have something to do"""
GIVEN_UP_S = 15.0
"""after its time limit, in which an episode that takes longer is given up at the latest"""


class Limits(NamedTuple):
    """How many episodes an engine has at once, and how long one may take."""

    most: int
    timeout_s: float


def run_episodes(
    engine: Engine,
    pool: EpisodePool | None,
    specs: Sequence[EpisodeSpec],
    params: SamplingParams,
    *,
    shares: Sequence[Sequence[int]],
    limits: Limits,
    max_model_len: int,
    mesh: Mesh,
    listener: "Listener",
) -> Generator[float, None, tuple[dict[int, EpisodeResult], dict[str, float]]]:
    """Work for `Run.drive`: results by number of the episodes that this rank's engine has had, on
    its leader, and the engine's metrics. Every rank takes the same steps.

    Args:
        pool: on leaders of engines, None elsewhere.
        specs: of all episodes, by number.
        shares: numbers for each engine.
    """
    leads = mesh.rollout_tp_rank == 0
    generation = engine.begin(
        params, longest_prompt=max_model_len - 1, most=min(limits.most, max(map(len, shares)))
    )
    replica = Replica(generation, engine, pool, params, limits, mesh)
    queues = Queues(shares, steals=not engine.repeats)
    try:
        yield 0.0
        while True:
            # exchanges first: a rank that fails after them still comes to the poll that follows
            told = torch.zeros(mesh.dims.rollout_dp, 3, dtype=torch.long)
            if leads:
                told[mesh.rollout_dp_rank] = torch.tensor(
                    [replica.room, len(replica.live), len(replica.results)]
                )
            dist.all_reduce(told, group=mesh.host_group)
            listener.exchange()
            given = queues.hand_out(told[:, 0].tolist())
            if not any(given) and not told[:, 1].any():
                return replica.results, generation.metrics()
            replica.begin([specs[number] for number in given[mesh.rollout_dp_rank]])
            listener.ended(replica.step())
            yield int(told[:, 2].sum()) / len(specs)
    finally:
        generation.close()
        if pool is not None:
            pool.abort()


class Listener(Protocol):
    """Hears of episodes while others run."""

    def ended(self, results: Sequence[EpisodeResult]) -> None:
        """Episodes of this rank's engine that have ended."""
        ...

    def exchange(self) -> None:
        """Collective: called by all ranks about every half second, and at last when all have
        ended."""
        ...


class Replica:
    """The episodes of one engine, as each rank of its group sees them; the leader alone has any."""

    def __init__(
        self,
        generation: Generation,
        engine: Engine,
        pool: EpisodePool | None,
        params: SamplingParams,
        limits: Limits,
        mesh: Mesh,
    ) -> None:
        self._generation, self._pool, self._params, self._limits = generation, pool, params, limits
        self._group = mesh.rollout_host_group if engine.generates_together else None
        self._in_rounds = engine.repeats
        self._waits: list[TurnRequest] = []  # for its round
        self._asked: dict[int, TurnRequest] = {}  # of the engine, by uid
        self._are_new = False  # some have begun since all that run had asked
        self._heard = time.monotonic()
        self.live: set[int] = set()
        self.results: dict[int, EpisodeResult] = {}

    @property
    def room(self) -> int:
        """Episodes that may begin now."""
        return max(0, self._limits.most - len(self.live))

    def begin(self, specs: Sequence[EpisodeSpec]) -> None:
        """Start episodes; on other ranks than the leader nothing."""
        if self._pool is not None and specs:
            self._pool.begin(specs)
            self.live.update(spec.number for spec in specs)
            self._are_new, self._heard = True, time.monotonic()

    def step(self) -> list[EpisodeResult]:
        """Work, or wait, for about half a second; the episodes that have ended meanwhile."""
        deadline, ended, is_over = time.monotonic() + SLICE_S, list[EpisodeResult](), False
        while not is_over:
            if self._group is not None:
                told = together(lambda: self._next(deadline, ended), self._group)
                requests, is_over = told[0]
            elif self._pool is not None:
                requests, is_over = self._next(deadline, ended)
            else:
                break
            self._generation.submit(requests)
            finished = self._generation.advance(SLICE_S if self._in_rounds else PATIENCE_S)
            if self._pool is not None:
                self._answer([(one.uid, one.completion) for one in finished])
        return ended

    def _next(self, deadline: float, ended: list[EpisodeResult]) -> tuple[list[Request], bool]:
        """What the engine gets, and whether the step is over then. `ended`: results are added."""
        if self._pool is None:
            return [], False
        idle = not self._asked
        left = max(0.0, deadline - time.monotonic())
        asked, results = self._pool.poll(min(left, PATIENCE_S) if idle and self.live else 0.0)
        for result in results:
            self.live.discard(result.number)
            self.results[result.number] = result
        ended += results
        self._waits += [request for request in asked if request.episode in self.live]
        self._waits = [request for request in self._waits if request.episode in self.live]
        if asked or results:
            self._heard = time.monotonic()
        if time.monotonic() - self._heard < self._limits.timeout_s + GIVEN_UP_S:
            PROGRESS.tick()  # a tool takes its time
        is_over = not self.live or time.monotonic() >= deadline
        if self._in_rounds:
            asking = len(self.live) - self._pool.held
            if not idle or len({request.episode for request in self._waits}) < asking:
                return [], is_over
            if self._are_new:  # as many as there is room for now begin first
                self._are_new = False
                return [], True
        # an episode that has begun again may ask for what the engine is at already
        starting = [request for request in self._waits if request.uid not in self._asked]
        self._waits = [request for request in self._waits if request.uid in self._asked]
        starting.sort(key=lambda one: (one.episode, one.segment))
        self._asked |= {request.uid: request for request in starting}
        return [_request(one, self._params) for one in starting], is_over

    def _answer(self, finished: Sequence[tuple[int, Completion]]) -> None:
        """Tell the pool what the engine has sampled for episodes that still run."""
        assert self._pool is not None
        replies = []
        for uid, completion in finished:
            turn = self._asked.pop(uid)
            again = next((request for request in self._waits if request.uid == uid), turn)
            if turn.episode in self.live and again == turn:
                replies.append(_reply(turn, completion, self._params))
                self._waits = [request for request in self._waits if request.uid != uid]
        if replies:
            self._heard = time.monotonic()
            self._pool.answer(replies)


def _request(turn: TurnRequest, params: SamplingParams) -> Request:
    return Request(
        uid=turn.uid,
        prompt_ids=turn.prompt_ids,
        max_new_tokens=turn.max_tokens,
        stop=tuple(dict.fromkeys((*params.stop, *turn.stop))),
        sampled_before=turn.sampled_before,
    )


def _reply(turn: TurnRequest, completion: Completion, params: SamplingParams) -> TurnReply:
    ids, logprobs, reason = completion
    ends = len(ids) > 0 and ids[-1] in params.stop_token_ids
    return TurnReply(
        episode=turn.episode,
        segment=turn.segment,
        turn=turn.turn,
        ids=torch.as_tensor(ids, dtype=torch.int32).numpy(),
        logprobs=torch.as_tensor(logprobs, dtype=torch.float32).numpy(),
        finish="length" if reason == "length" else "stop" if ends else "stop_text",
    )
