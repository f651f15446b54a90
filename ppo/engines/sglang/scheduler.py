"""SGLang's scheduler, TP worker and model runner in this process, advanced step by step.

Owns what is needed of its private parts: the loop that gives control back, requests and results
without sockets, a fresh start after an error. Must not know weights, ranks or the trainer.

The loops are SGLang's own. `ingest_requests`, which they call once in each step, counts the steps
and ends the loop when there were enough; the next call enters it again where it was left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ppo.engines.contract import Completion, Finished
from ppo.engines.sglang.executor import Described

MOST_STEPS_TO_IDLE = 100


class Outbox:
    """In the place of the sockets to SGLang's other processes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.socket = None
        self.told: Callable[[Any], None] = self.messages.append

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Called by the scheduler with all that it has to say."""
        self.told(output)


def start_scheduler(arguments: dict[str, Any], *, tp_rank: int, gpu_id: int) -> Any:
    """A scheduler of `arguments` (sglang.ServerArgs), with its model and its caches.

    Collective over the ranks of its default process group, which are those of one engine. The
    process has to be lent to SGLang (ppo/engines/sglang/own_state.py), now and in every call.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    class Scheduler(module.Scheduler):
        """It hears nobody, tells the outbox, and gives control back after so many steps."""

        outbox = Outbox()
        steps_left = 0
        goes_on = False
        """a loop that is entered finds the results that the last one has left"""
        beat: Callable[[], None] = staticmethod(lambda: None)
        """called before a step, when the one before has computed something"""
        _forwards = 0

        def init_ipc_channels(self, port_args: Any) -> None:
            channels: dict[str, Any] = dict.fromkeys(SchedulerIpcChannels.__dataclass_fields__)
            channels |= {"send_to_tokenizer": self.outbox, "send_to_detokenizer": self.outbox}
            self.ipc_channels = SchedulerIpcChannels(**channels)
            self.load_snapshot_writer = self.recv_from_tokenizer = None

        def init_idle_sleeper(self) -> None:
            self.idle_sleeper = None

        def init_soft_watchdog(self) -> None:
            """Its watchdogs would send SIGQUIT to the parent, which is torchrun."""

        def init_watch_dog_memory_saver_input_blocker(self) -> None:
            create = module.create_scheduler_watchdog
            module.create_scheduler_watchdog = lambda *_, **__: None
            try:
                super().init_watch_dog_memory_saver_input_blocker()
            finally:
                module.create_scheduler_watchdog = create

        def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
            if self.forward_ct != self._forwards:
                self._forwards = self.forward_ct
                self.beat()
            self.steps_left -= 1
            self.gracefully_exit = self.steps_left <= 0
            return []

        @property
        def result_queue(self) -> Any:
            return self._results

        @result_queue.setter
        def result_queue(self, queue: Any) -> None:
            if not self.goes_on:
                self._results = queue

    load_plugins()
    server_args = ServerArgs(**arguments)
    # read once from the environment, by the first engine of this process
    sampler.SYNC_TOKEN_IDS_ACROSS_TP = arguments["tp_size"] > 1
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=gpu_id))
    ports: dict[str, Any] = dict.fromkeys(PortArgs.__dataclass_fields__, "")
    ports |= {"nccl_port": 0, "tokenizer_worker_ipc_name": None, "decoupled_spec_ipc_config": None}
    return Scheduler(server_args, PortArgs(**ports))


class Steps:
    """Drives a scheduler: requests in, completions out, so many steps at a time."""

    def __init__(self, scheduler: Any, beat: Callable[[], None]) -> None:
        """beat: called before a step, when the one before has computed something."""
        self.scheduler = scheduler
        self._ids: dict[str, list[np.ndarray]] = {}
        self._logprobs: dict[str, list[np.ndarray]] = {}
        self._ended: list[Finished] = []
        self._wanted = 0
        self.prompt_tokens = self.cached_tokens = 0
        scheduler.outbox.told, scheduler.beat = self._hear, beat

    def submit(self, requests: Sequence[Described]) -> None:
        """Add requests."""
        self.scheduler.process_input_requests([self._tokenized(*request) for request in requests])

    def _tokenized(self, uid: int, input_ids: list[int], sampling: dict[str, Any]) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(**sampling)
        params.normalize(self.scheduler.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        request: Any = TokenizedGenerateReqInput(
            rid=str(uid),
            input_text=None,
            input_ids=array("q", input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        mode = self.scheduler.disaggregation_mode
        request.time_stats = APIServerReqTimeStats(disagg_mode=mode)
        return request

    def run(self, most: int, unfinished: int) -> list[Finished]:
        """So many steps, or until so many requests have ended: what has ended."""
        scheduler = self.scheduler
        self._wanted = unfinished
        scheduler.steps_left, scheduler.gracefully_exit, scheduler.goes_on = most, False, True
        scheduler.run_event_loop()
        scheduler.goes_on = False
        ended, self._ended = self._ended, []
        return ended

    def _hear(self, message: Any) -> None:
        for i, rid in enumerate(message.rids):
            self._ids.setdefault(rid, []).append(np.asarray(message.output_ids[i], np.int32))
            logprobs = np.asarray(message.output_token_logprobs_val[i], np.float32)
            self._logprobs.setdefault(rid, []).append(logprobs)
            if (reason := message.finished_reasons[i]) is not None:
                self._end(rid, reason)
                self.prompt_tokens += message.prompt_tokens[i]
                self.cached_tokens += message.cached_tokens[i]

    def _end(self, rid: str, reason: dict[str, Any]) -> None:
        if reason["type"] == "abort":
            raise RuntimeError(f"SGLang gave up request {rid}: {reason}")
        ids, logprobs = (np.concatenate(parts.pop(rid)) for parts in (self._ids, self._logprobs))
        self._ended.append(Finished(int(rid), Completion(ids, logprobs, reason["type"])))
        if len(self._ended) == self._wanted:
            self.scheduler.steps_left = 0
            self.scheduler.gracefully_exit = True

    def load(self) -> tuple[int, float]:
        """(running requests, share of the KV cache in use)."""
        loads = self.scheduler.load_inquirer.get_loads()
        return loads.num_running_reqs, loads.token_usage

    def settle(self) -> None:
        """When all has ended: until SGLang is idle, where it checks its pools for leaks."""
        for _ in range(MOST_STEPS_TO_IDLE):
            if self.scheduler.last_batch is None and self.scheduler.is_fully_idle():
                break
            self.run(1, 0)
        self._check_empty()

    def reset(self) -> None:
        """Forget all requests and prefixes, also those of a step that an exception has left.

        Nothing is exchanged: the other ranks may be elsewhere. Raises AssertionError where slots of
        the KV cache are lost.
        """
        scheduler = self.scheduler
        if scheduler.device == "cuda":
            torch.cuda.synchronize()  # kernels in flight write into the slots
        scheduler.goes_on = False
        scheduler.init_running_status()
        scheduler.init_chunked_prefill()
        self._ids, self._logprobs, self._ended = {}, {}, []
        self.flush()
        self._check_empty()

    def flush(self) -> None:
        """Forget all prefixes."""
        # its empty_cache is a collection of all garbage of the trainer on a CPU
        assert self.scheduler.flush_cache(empty_cache=False), "the engine is not idle"

    def _check_empty(self) -> None:
        self.scheduler.on_idle()  # SGLang's own check
        requests = self.scheduler.req_to_token_pool
        assert requests.available_size() == requests.size, "requests that have left hold rows"
