"""Scores of the samples that a node makes, by its pool, from the first one that ends.

Owns what goes to the rank that holds the pool, and what comes back. Must not know weights of
scores, failures that end a run, or engines.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence

from ppo.data.dataset import Prompt
from ppo.rewards.contract import RewardError, RewardResult
from ppo.rewards.job import RewardJob
from ppo.rewards.pool import RewardPool
from ppo.rollout.reward_data import reward_request
from sharding.agree import gather, gather_to_first
from sharding.mesh import Mesh
from sharding.progress import PROGRESS

GIVEN_UP_S = 15.0
"""after its time limit, in which a sample that takes longer is given up at the latest"""


class NodeScores:
    """Function scores of one rollout batch."""

    def __init__(
        self, pool: RewardPool | None, prompts: Sequence[Prompt], n: int, mesh: Mesh
    ) -> None:
        """pool: on local rank 0 of each node, None elsewhere. prompts, n: of the whole batch."""
        self._pool, self._prompts, self._n, self._mesh = pool, prompts, n, mesh
        self._jobs: list[tuple[list[int], RewardJob]] = []
        self._new: dict[int, str] = {}

    def add(self, texts: Mapping[int, str]) -> None:
        """Responses that this rank's engine has made, by number."""
        self._new.update(texts)

    def exchange(self) -> None:
        """Bring what was added to the pool. Collective over the node."""
        found = gather_to_first(self._new, self._mesh.node_group)
        self._new = {}
        if self._pool is None or found is None:
            return
        known = {number: text for part in found for number, text in part.items()}
        if known:
            numbers = sorted(known)
            requests = [
                reward_request(self._prompts[number // self._n], known[number])
                for number in numbers
            ]
            self._jobs.append((numbers, self._pool.submit(requests)))

    def wait(
        self, give_up: Callable[[int], str | None], *, timeout_s: float
    ) -> Generator[float, None, tuple[dict[int, RewardResult], str | None]]:
        """Results by number, on the rank that holds the pool; and why it was given up before all.

        Args:
            give_up: asked every half second, with the failures so far; not None ends the waiting.
            timeout_s: what one sample may take; it is no hang that long.
        """
        problem, finished, since = None, 0, time.monotonic()
        try:
            while not all(job.poll(0.5) for _, job in self._jobs):
                problem = give_up(sum(len(job.failures) for _, job in self._jobs))
                if problem is not None:
                    break  # not only when every sample has hung
                now = sum(len(job.finished) for _, job in self._jobs)
                if now > finished:
                    finished, since = now, time.monotonic()
                if time.monotonic() - since < timeout_s + GIVEN_UP_S:
                    PROGRESS.tick()
                yield finished / sum(len(job.requests) for _, job in self._jobs)
        except RewardError as error:
            problem = str(error)
        results = {
            numbers[index]: result
            for numbers, job in self._jobs
            for index, result in job.finished.items()
        }
        return results, problem

    def share(self, results: Mapping[int, RewardResult]) -> Mapping[int, RewardResult]:
        """What `wait` has given the rank with the pool, on every rank of the node. Collective."""
        return gather(results, self._mesh.node_group)[0]  # local rank 0 holds the pool
