"""Threads of episodes, in a process of their own: its limit of memory is changed."""

import subprocess
import sys

CODE = """
import asyncio, resource, threading
from ppo.episodes.threads import EpisodeThread, Hung

NUMBER = 40
used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData"))
room = 64 << 20
_, most = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + room, most))
together = threading.Barrier(NUMBER)

async def main():
    threads = [EpisodeThread(Hung()) for _ in range(NUMBER)]
    await asyncio.gather(*(thread.run(lambda: together.wait(20), 30) for thread in threads))
    try:
        bytearray(room + (32 << 20))
    except MemoryError:
        print("all at once, within the limit")

asyncio.run(main())
"""


def test_stacks_of_threads_take_no_memory_of_the_users_code() -> None:
    """40 of 8 MiB where there is room for 64 MiB; what is allocated has that limit as before."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "all at once, within the limit\n", done.stderr[-2000:]
