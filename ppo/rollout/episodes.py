"""Samples that are episodes: from prompts and the user's code to what training and people see.

Owns the pool of a leader, how a prompt becomes an episode and an episode a sample, and the tapes of
an earlier run. Must not know rewards or how turns get to the engine (ppo/rollout/turns.py).
"""

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppo.batch.conversations import Conversation, Segment
from ppo.batch.samples import Samples
from ppo.config import Config, RolloutConfig
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.engines.contract import Completion, Completions, Engine, SamplingParams
from ppo.episodes import contract
from ppo.episodes.chat import chat_format
from ppo.episodes.contract import EpisodeProgram, EpisodeResult, EpisodeSpec, TapeEvent
from ppo.episodes.pool import EpisodePool
from ppo.errors import InputError
from ppo.metrics import Metrics
from ppo.rollout.generate import ScoresToCome, make_requests, spread
from ppo.rollout.turns import Limits, run_episodes
from ppo.run.run import Run

FINISHES = ("done", "max_turns", "length", "timeout", "error")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The user's episodes, on every rank."""

    pool: EpisodePool | None
    """on leaders of engines, None elsewhere"""
    tapes: Mapping[str, Sequence[TapeEvent]] = field(default_factory=dict)
    """of an earlier run, by key"""

    def spec(self, number: int, uid: int, prompt: Prompt, params: SamplingParams) -> EpisodeSpec:
        """An episode of a prompt, which is repeated where there is a tape of it."""
        return EpisodeSpec(
            number=number,
            uid=uid,
            row=row_of(prompt),
            messages=prompt.messages,
            prompt_ids=prompt.prompt_ids,
            tape=self.tapes.get(tape_key(uid, prompt, params)) if self.tapes else None,
        )


def sample_episodes(
    episodes: Episodes,
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    run: Run,
    metrics: Metrics,
    rollout: RolloutConfig,
    scores: ScoresToCome | None,
) -> Samples:
    """n episodes of each prompt. Collective; see `ppo.rollout.generate.generate`.

    scores: told the texts of those that have not scored themselves, when they have ended.
    """
    requests = make_requests(prompts, n)
    prompt_of = [prompts[number // n] for number in range(len(requests))]
    specs = [
        episodes.spec(number, request.uid, prompt, params)
        for number, (request, prompt) in enumerate(zip(requests, prompt_of, strict=True))
    ]
    expected = [len(prompt.prompt_ids) + params.max_new_tokens / 2 for prompt in prompts]
    most = engine.most_sequences + max(1, engine.most_sequences // 4)
    results, found = run.drive(
        run_episodes(
            *(engine, episodes.pool, specs, params),
            shares=spread(expected, n=n, replicas=run.mesh.dims.rollout_dp),
            limits=Limits(most, rollout.episode.timeout_s),
            max_model_len=rollout.max_model_len,
            mesh=run.mesh,
            listener=_Unscored(scores),
        ),
        label="generate",
        holds_collectives=engine.generates_together,
    )
    for name, value in found.items():
        metrics.add(name, value, 1)
    numbers = sorted(results)
    ended = [results[number] for number in numbers]
    log_episodes(ended, metrics)
    return Samples(
        prompts=prompts,
        n=n,
        numbers=numbers,
        completions=Completions.of([completion_of(result) for result in ended]),
        texts=[result.text for result in ended],
        conversations=[
            conversation_of(result, prompt, tape_key(result.uid, prompt, params))
            for result in ended
            for prompt in [prompt_of[result.number]]
        ],
        scores_to_come=scores,
    )


class _Unscored:
    """Tells who scores of the episodes that have not scored themselves."""

    def __init__(self, scores: ScoresToCome | None) -> None:
        self._scores = scores

    def ended(self, results: Sequence[EpisodeResult]) -> None:
        """Their texts."""
        texts = {r.number: r.text for r in results if r.score is None and r.failed is None}
        if self._scores is not None and texts:
            self._scores.add(texts)

    def exchange(self) -> None:
        """Collective."""
        if self._scores is not None:
            self._scores.exchange()


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt's row; those inside of extra_info by their own names too."""
    return {
        **prompt.extra_info,
        "prompt": prompt.messages,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


def tape_key(uid: int, prompt: Prompt, params: SamplingParams) -> str:
    """What tells the episodes of a run apart: sample, iteration, prompt, and how it is sampled."""
    ids = np.asarray(prompt.prompt_ids, np.int32).tobytes()
    return f"{params.step}-{uid}-{zlib.crc32(ids):08x}-{params.temperature:g}-{params.seed}"


def conversation_of(result: EpisodeResult, prompt: Prompt, key: str) -> Conversation:
    """An episode as a sample; one that has failed has its prompt alone."""
    segments = [
        Segment(segment.prompt_ids, np.asarray(segment.counted, bool), _rewards(segment))
        for segment in _segments(result)
    ]
    nothing = Segment(prompt.prompt_ids, np.zeros(0, bool), np.zeros(0, np.float32))
    return Conversation(
        segments=segments or [nothing],
        score=result.score,
        extra=result.extra,
        failed=result.failed,
        reason=result.reason,
        counts=result.counts,
        messages=result.messages,
        tape=result.tape,
        key=key,
    )


def completion_of(result: EpisodeResult) -> Completion:
    """The tokens of all segments of an episode, one after the other."""
    segments = _segments(result)
    ids = [np.asarray(segment.ids, np.int32) for segment in segments]
    logprobs = [
        np.where(segment.sampled, segment.logprobs, 0).astype(np.float32) for segment in segments
    ]
    return Completion(
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.concatenate([np.zeros(0, np.float32), *logprobs]),
        result.finish,
    )


def _segments(result: EpisodeResult) -> list[Any]:
    return [] if result.failed else result.segments


def _rewards(segment: Any) -> np.ndarray:
    rewards = np.zeros(len(segment.ids), np.float32)
    for position, value in segment.turn_rewards:
        rewards[position] += value
    return rewards


def log_episodes(results: Sequence[EpisodeResult], metrics: Metrics) -> None:
    """episodes/*, of those of this rank's engine."""
    number = len(results)
    for name in sorted({name for result in results for name in result.counts}):
        metrics.add(f"episodes/{name}", sum(result.counts[name] for result in results), number)
    if results:
        unbegun = sum(r.finish == "length" and not r.counts["turns"] for r in results)
        metrics.add("episodes/no_turn", unbegun, number)
    for finish in FINISHES if results else ():
        ended = sum(result.finish == finish for result in results)
        metrics.add(f"episodes/finish/{finish}", ended, number)


@contextmanager
def open_episodes(
    config: Config, run: Run, prompts: PromptSets, stop_token_ids: tuple[int, ...]
) -> Iterator[Episodes | None]:
    """Start the processes of the leaders; None without rollout.episode. Collective.

    Raises InputError on every rank for a file, a template or a tape that cannot work.
    """
    keys, mesh = config.rollout.episode, run.mesh
    if keys.path is None:
        yield None
        return
    with ExitStack() as owned:
        pool, error, tapes = None, None, {}
        try:
            tapes = {} if keys.replay is None else read_tapes(Path(keys.replay))
            if mesh.rollout_tp_rank == 0:
                workers = _workers(config, run)
                logger.info("starting %d processes that run %s", workers, keys.path)
                pool = owned.enter_context(
                    EpisodePool(
                        EpisodeProgram(keys.path, keys.name),
                        chat_format(
                            prompts.tokenizer,
                            stop_token_ids,
                            options=config.data.apply_chat_template_kwargs,
                            tool_format=keys.tool_format,
                            num_ids=prompts.num_ids,
                        ),
                        limits_of(config),
                        num_workers=workers,
                        log_path=run.dir / "logs" / f"episodes_{mesh.rank:04d}.log",
                    )
                )
        except InputError as problem:
            error = problem
        run.agree(error)
        yield Episodes(pool=pool, tapes=tapes)


def limits_of(config: Config) -> contract.Limits:
    """What bounds an episode."""
    data, keys = config.data, config.rollout.episode
    return contract.Limits(
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_turns=keys.max_turns,
        tool_timeout_s=keys.tool_timeout_s,
        timeout_s=keys.timeout_s,
        max_observation_tokens=keys.max_observation_tokens,
    )


def _workers(config: Config, run: Run) -> int:
    """Processes of a leader: reward.num_workers over the leaders of a node."""
    dims = run.mesh.dims
    return max(1, config.reward.num_workers // max(1, dims.ranks_per_node // dims.rollout_tp))


def read_tapes(path: Path) -> dict[str, Sequence[TapeEvent]]:
    """Tapes of the episodes that a run has logged, or of a file of samples, by key.

    Raises InputError.
    """
    found = {}
    for file in [path] if path.is_file() else sorted((path / "samples").glob("*.jsonl")):
        try:
            with file.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise InputError(f"rollout.episode.replay: {file}: {error}") from error
        found |= {r["episode"]["key"]: r["episode"]["tape"] for r in rows if r.get("episode")}
    if not found:
        raise InputError(f"rollout.episode.replay: {path} holds no episode")
    return found
