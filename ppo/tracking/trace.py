"""What a trace of torch's profiler says: where time went, and how much of it was communication.

Owns how events are read and summed up. Must not know who has made the trace, or torch: a trace is a
file of events (the Trace Event Format, which Perfetto opens) with times in microseconds.

On CUDA work is what runs on the device: kernels, NCCL's among them. On a CPU it is operations of
torch, and gloo's own record of its collectives.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]
"""start and end, microseconds"""
US = 1e-6
SYNCS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
)
"""calls in which the host waits for the device (cudaMemcpyAsync does not, by itself)"""


class Work(NamedTuple):
    """All events of one name."""

    name: str
    count: int
    seconds: float


class Summary(NamedTuple):
    """A trace in numbers, seconds of one rank."""

    window_s: float
    compute_s: float
    """in which something was computed"""
    comm_s: float
    """in which a collective ran"""
    exposed_s: float
    """of these, in which nothing was computed"""
    all_gather_s: float
    reduce_scatter_s: float
    idle_s: float
    """in which neither ran"""
    syncs: Work
    """of the host with the device"""
    top: list[Work]
    """what took longest, communication apart"""

    @property
    def hidden_s(self) -> float:
        """Communication while something was computed."""
        return self.comm_s - self.exposed_s

    def metrics(self) -> dict[str, float]:
        """By the names of metrics.jsonl."""
        return {
            "timing_share/comm": self.exposed_s / self.window_s if self.window_s > 0 else 0.0,
            "profile/window_s": self.window_s,
            "profile/compute_s": self.compute_s,
            "profile/idle_s": self.idle_s,
            "profile/comm_exposed_s": self.exposed_s,
            "profile/comm_hidden_s": self.hidden_s,
            "profile/all_gather_s": self.all_gather_s,
            "profile/reduce_scatter_s": self.reduce_scatter_s,
            "profile/host_syncs": float(self.syncs.count),
        }

    def table(self) -> str:
        """Markdown: shares of the window, then what took longest."""
        rows = [
            ("window", self.window_s),
            ("computing", self.compute_s),
            ("communication, hidden behind computing", self.hidden_s),
            ("communication, exposed", self.exposed_s),
            ("all-gather", self.all_gather_s),
            ("reduce-scatter", self.reduce_scatter_s),
            ("neither", self.idle_s),
            (f"host waits for the device ({self.syncs.count} times)", self.syncs.seconds),
        ]
        lines = ["| what | ms | share |", "| --- | --: | --: |"]
        whole = self.window_s or 1.0
        lines += [f"| {name} | {1e3 * s:.2f} | {100 * s / whole:.1f} % |" for name, s in rows]
        lines += ["", "| what took longest | calls | ms | share |", "| --- | --: | --: | --: |"]
        for work in self.top:
            name = work.name.replace("|", "/")[:100]
            share = 100 * work.seconds / whole
            lines.append(f"| `{name}` | {work.count} | {1e3 * work.seconds:.2f} | {share:.1f} % |")
        return "\n".join(lines) + "\n"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events with a duration, of a chrome trace, gzipped or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def summarise(events: Sequence[dict[str, Any]], *, top: int = 15) -> Summary:
    """All of one rank's trace. Overlapping work counts once in times, in `top` as often as it is.

    The window is from the first event to the last end.
    """
    on_device = any(event.get("cat") == "kernel" for event in events)
    comm: dict[str, list[Interval]] = defaultdict(list)
    compute: list[Interval] = []
    names: dict[str, list[float]] = defaultdict(list)
    ends: dict[Any, float] = {}
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    for event in ordered:
        span = (event["ts"], event["ts"] + event["dur"])
        if (kind := _collective(event, on_device)) is not None:
            comm[kind].append(span)
        elif _computes(event, on_device):
            compute.append(span)
            thread = (event.get("pid"), event.get("tid"))
            if on_device or span[0] >= ends.get(thread, -1.0):  # not inside another operation
                ends[thread] = span[1]
                names[event["name"]].append(event["dur"])
    computed, communicated = union(compute), union(span for c in comm.values() for span in c)
    worked, both = length(union([*computed, *communicated])), length(communicated)
    exposed = worked - length(computed)
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    window = max((end for _, end in spans), default=0.0) - min((s for s, _ in spans), default=0.0)
    waits = [event["dur"] for event in events if event["name"] in SYNCS]
    found = [Work(name, len(times), US * sum(times)) for name, times in names.items()]
    return Summary(
        window_s=US * window,
        compute_s=US * length(computed),
        comm_s=US * both,
        exposed_s=US * exposed,
        all_gather_s=US * length(union(comm["all_gather"])),
        reduce_scatter_s=US * length(union(comm["reduce_scatter"])),
        idle_s=US * (window - worked),
        syncs=Work("host syncs", len(waits), US * sum(waits)),
        top=sorted(found, key=lambda work: -work.seconds)[:top],
    )


def _collective(event: dict[str, Any], on_device: bool) -> str | None:
    """all_gather, reduce_scatter or other; None for what is no collective."""
    name = event["name"].lower()
    is_comm = (
        event.get("cat") == "kernel" and "nccl" in name if on_device else name.startswith("gloo:")
    )
    if not is_comm:
        return None
    plain = name.replace("_", "")
    if "allgather" in plain:
        return "all_gather"
    return "reduce_scatter" if "reducescatter" in plain else "other"


def _computes(event: dict[str, Any], on_device: bool) -> bool:
    if on_device:
        return event.get("cat") == "kernel"
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same points of time, as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Interval]) -> float:
    """Of intervals that do not touch."""
    return sum(end - start for start, end in spans)
