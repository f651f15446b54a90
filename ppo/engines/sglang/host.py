"""The host process of one SGLang engine, started by the leader of a rollout group:

    python -P sglang_host.py DESCRIPTOR PARENT_PID

Owns `sglang.Engine` and everything that it does to the process which creates it: environment,
signal handlers, loggers, event loop policy, start method, the killing of all children at the end.
Messages on the pipe are (call, verb, arguments) in, ("done" | "progress", call, value) out. Nothing
is caught: an exception ends the process, its traceback is the end of the engine's log, and the
leader sees the pipe close.

Must not know: training, meshes, what a weight payload contains.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[3]
POLL_S = 0.1
PROGRESS_S = 0.5
ASIDES = ("more", "abort")
"""what is said to a call while it runs"""
RENDEZVOUS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    "TORCH_GLOO_LAZY_INIT",
)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it ends.

    Ends at once when that is no longer ``parent``; without it, when this process is an orphan.
    ppo/rewards/confine.py and ppo/run/signals.py ask the kernel the same for themselves: this file
    runs before anything of ours can be imported, and neither of them may import an engine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, signal.SIGKILL) != 0:  # PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    now = os.getppid()
    if now == 1 if parent is None else now != parent:
        os._exit(1)


# SGLang's workers import this module before anything else. Their own call for this comes seconds
# later; a host that ends in between would leave them behind.
if __name__ == "__mp_main__":
    die_with_parent()


def prepare_environment(variables: dict[str, str], first_on_path: list[str]) -> None:
    """Hide how our ranks find each other, put `first_on_path` first, set `variables`."""
    for name in list(os.environ):
        if name in RENDEZVOUS or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # torch_memory_saver refuses expandable segments, and they cannot be shared over CUDA IPC.
        options = [o for o in os.environ.pop(name, "").split(",") if o]
        kept = [option for option in options if not option.startswith("expandable_segments")]
        if kept:
            os.environ[name] = ",".join(kept)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*first_on_path, *inherited])
    sys.path[:0] = first_on_path
    os.environ.update(variables)


def expose_cuda_runtime() -> None:
    """Let child processes find the CUDA runtime that this process has loaded.

    torch_memory_saver is preloaded into SGLang's workers, links to the runtime and knows no folder
    to look in; a worker whose loader does not find it ends at once with exit code 127.
    """
    folders = {
        path.parent for path in _mapped_files(os.getpid()) if path.name.startswith("libcudart.so")
    }
    inherited = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*inherited, *sorted(map(str, folders))])


def reserve_port() -> tuple[socket.socket, int]:
    """A free TCP port, held while the socket lives: the kernel gives it to nobody else.

    The engine can still bind it, because it sets SO_REUSEADDR too and this socket never listens.
    """
    holder = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]


class EngineHost:
    """Serves the leader's calls, one at a time, and watches the engine's processes meanwhile."""

    def __init__(self, connection: Connection, engine: Any, loader: str) -> None:
        self.connection = connection
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.loader = loader
        self.children = {
            process: _title(process.pid) for process in multiprocessing.active_children()
        }
        self.messages: asyncio.Queue = asyncio.Queue()
        self.asides: asyncio.Queue = asyncio.Queue()
        self.requests: asyncio.Queue = asyncio.Queue()
        """of the generation that runs; None = no more will come"""
        self.news: dict[str, Any] = {}
        """what is told with the next progress"""
        self.aborting = False

    def describe(self) -> dict[str, Any]:
        """What the leader learns when the engine is up."""
        info = self.engine.get_server_info()
        return {
            "kv_tokens": info["max_total_num_tokens"],
            "version": info["version"],
            "shared_files": _shared_files([os.getpid(), *(child.pid for child in self.children)]),
        }

    async def serve(self, described: dict[str, Any]) -> NoReturn:
        """Answer calls until the leader asks for "close" or something ends."""
        self._take_signals()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        self.connection.send(("done", 0, described))
        while True:
            call, verb, arguments = await self._next_message()
            if verb == "close":
                self._end(0)
            self.connection.send(("done", call, await self._run(call, verb, arguments)))

    def _take_signals(self) -> None:
        """Undo what the tokenizer manager does to the signals of its process."""
        self.manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGQUIT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGQUIT, self._told_of_failure)
        self.manager._subprocess_watchdog.stop()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read in a thread: the event loop would make the pipe non-blocking for large messages."""
        while True:
            try:
                message = self.connection.recv()
            except EOFError:
                self._fail("the trainer has closed the pipe")
            queue = self.asides if message[1] in ASIDES else self.messages
            loop.call_soon_threadsafe(queue.put_nowait, message)

    async def _next_message(self) -> tuple[int, str, dict]:
        while True:
            self._check_children()
            try:
                return await asyncio.wait_for(self.messages.get(), PROGRESS_S)
            except TimeoutError:
                continue

    async def _run(self, call: int, verb: str, arguments: dict[str, Any]) -> Any:
        """The result of one call; progress is reported meanwhile, "abort" and "more" obeyed."""
        self.aborting, self.news, told = False, {}, time.monotonic()
        self.requests = asyncio.Queue()  # what an abandoned generation has left is gone
        task = asyncio.create_task(getattr(self, f"call_{verb}")(**arguments))
        while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
            self._check_children()
            for message in [self.asides.get_nowait() for _ in range(self.asides.qsize())]:
                _, aside, said = message
                if said["call"] > call:
                    self.asides.put_nowait(message)  # of the call behind this one
                elif said["call"] == call:  # else of one that has ended meanwhile
                    self.aborting |= aside == "abort"
                    self.requests.put_nowait(said.get("requests"))
            if self.news or time.monotonic() - told >= PROGRESS_S:
                news, self.news, told = self.news, {}, time.monotonic()
                self.connection.send(("progress", call, (self.manager.last_receive_tstamp, news)))
                if self.aborting:
                    self.manager.abort_request(abort_all=True)
        return task.result()

    def _check_children(self) -> None:
        for child, title in self.children.items():
            if not child.is_alive():
                self._fail(f"engine process {title} ended with exit code {child.exitcode}")

    def _told_of_failure(self) -> None:
        """SIGQUIT from an engine process; what it suffers from may be the end of another one."""
        self._check_children()
        self._fail("an engine process reported an error")

    def _fail(self, reason: str) -> NoReturn:
        sys.stderr.write(f"engine host: {reason}\n")
        self._end(1)

    def _end(self, code: int) -> NoReturn:
        """End the engine's processes and this one, as Engine.shutdown does but without waiting."""
        sys.stderr.flush()
        for child in self.children:
            child.kill()
        for child in self.children:
            child.join()
        os._exit(code)

    async def call_begin_update(self) -> None:
        """Open a weight-update session."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check(await self.manager.begin_weight_update(BeginWeightUpdateReqInput()))

    async def call_update(self, payloads: list[bytes]) -> None:
        """Hand payload r to tensor-parallel rank r; answered behind a barrier of all of them."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=self.loader, flush_cache=False
        )
        _check(await self.manager.update_weights_from_tensor(request))

    async def call_end_update(self) -> None:
        """Close the weight-update session."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check(await self.manager.end_weight_update(EndWeightUpdateReqInput()))

    async def call_release(self, tags: list[str]) -> None:
        """Give memory back; answered when every rank of the engine has done so."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.call_flush()  # waits until the scheduler is idle: it dies if released when busy
        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        # Only rank 0 answers the release. An rpc ends in a barrier of all ranks; it blocks.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.engine.collective_rpc, "get_init_info")

    async def call_resume(self, tags: list[str]) -> None:
        """Map released memory again; its content is garbage."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    async def call_flush(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs, and empty the prefix cache."""
        result = await self.manager.flush_cache(timeout_s=timeout_s)
        if not result.success:
            raise RuntimeError(f"the engine did not become idle in {timeout_s:g} s: {result}")

    async def call_generate(self) -> dict[str, Any]:
        """Serve requests that come with "more" until an empty lot comes, or "abort".

        What has ended is news: finished, a list of (uid, token ids, log-probs, finish reason).
        Returns the last news, the sums prompt_tokens and cached_tokens, and loads, a list of
        (running requests, share of the KV cache in use).
        """
        running: set[asyncio.Task] = set()
        sums, loads, more = {"prompt_tokens": 0, "cached_tokens": 0}, [], True
        while True:
            while more and not (running and self.requests.empty()):
                requests = await self.requests.get()
                more = bool(requests)
                running |= {asyncio.create_task(self._serve_one(*one)) for one in requests or []}
            if not running:
                break  # no more will come
            ended, running = await asyncio.wait(running, timeout=POLL_S)
            for task in ended:
                if task.result() is None:
                    continue
                finished, counts = task.result()
                self.news.setdefault("finished", []).append(finished)
                for name, count in counts.items():
                    sums[name] += count
            if running:
                loads += [
                    (n.num_running_reqs, n.token_usage) for n in await self.manager.get_loads()
                ]
        news, self.news = self.news, {}
        return {**news, **sums, "loads": loads}

    async def _serve_one(
        self, uid: int, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[tuple[int, Any, Any, str], dict[str, int]] | None:
        """One request to its end; None when it was aborted."""
        import numpy as np
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=input_ids, sampling_params=sampling_params, return_logprob=True
        )
        output = await anext(self.manager.generate_request(request, None))
        info = output["meta_info"]
        reason = info["finish_reason"]
        if reason["type"] == "abort":
            if not self.aborting:
                raise RuntimeError(f"SGLang gave up request {uid}: {reason}")
            return None
        logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
        finished = (
            *(uid, np.array(output["output_ids"], np.int32), np.array(logprobs, np.float32)),
            reason["type"],
        )
        return finished, {name: info[name] for name in ("prompt_tokens", "cached_tokens")}


def _shared_files(pids: list[int | None]) -> list[str]:
    """Files in /dev/shm that SGLang's processes hold and that outlive them when killed."""
    paths = {str(path) for pid in pids for path in _mapped_files(pid)}
    return sorted(path for path in paths if path.startswith("/dev/shm/sgl"))


def _mapped_files(pid: int | None) -> set[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[-1]) for line in lines}


def _title(pid: int | None) -> str:
    """The name that an engine process has given itself, such as sglang::scheduler_TP0."""
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")


def _check(answer: tuple[bool, str]) -> None:
    succeeded, message = answer
    if not succeeded:
        raise RuntimeError(f"SGLang refused a weight update: {message}")


def main() -> None:
    """Start the engine that the first message describes, then serve."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the trainer decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    _, _, settings = connection.recv()
    prepare_environment(settings["environment"], [*settings["first_on_path"], str(REPOSITORY)])

    import sglang

    if settings["engine"].get("enable_memory_saver"):
        expose_cuda_runtime()
    port_holder, port = reserve_port()
    with port_holder:
        engine = sglang.Engine(nccl_port=port, **settings["engine"])
    host = EngineHost(connection, engine, settings["engine"]["custom_weight_loader"][0])
    engine.loop.run_until_complete(host.serve(host.describe()))


if __name__ == "__main__":
    main()
