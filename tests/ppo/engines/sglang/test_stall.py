"""The thread that ends a rank whose engine does not go on."""

import threading
import time
from pathlib import Path

from ppo.engines.sglang.stall import StallWatch


def test_an_engine_without_a_beat_is_given_up_with_its_stacks(tmp_path: Path):
    said, ended = list[str](), threading.Event()

    def give_up(text: str) -> None:
        said.append(text)
        ended.set()

    log = tmp_path / "engine.log"
    watch = StallWatch(rank=3, log=log, give_up=give_up)
    with watch.over("generate", 0.2):
        for _ in range(10):
            time.sleep(0.05)
            watch.beat()
    time.sleep(0.4)  # nobody is inside: it may take as long as it likes
    assert not said
    with watch.over("release", 0.2):
        assert ended.wait(5)
    assert said[0].startswith("rank 3: the SGLang engine made no progress for 0.2 s in release")
    assert "test_an_engine_without_a_beat" in log.read_text()
    watch.close()
