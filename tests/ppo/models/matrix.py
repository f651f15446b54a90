"""Every causal LM family of transformers through trainer and embedded engine: works, or refused.

    python -m tests.ppo.models.matrix [--table] [FAMILY ...]

A small random checkpoint of each family (ppo/models/small_copy.py, saved by transformers) is loaded
as a run loads it. Trainer: log-probs, with the gradients of a backward pass, of documents in one
row, or padded, against `model(input_ids).logits` of transformers, one sequence at a time, in
float32; a critic's values. Engine: sampled tokens' log-probs against the same, over several prompts
with several rows. What is further than 1e-6 from that has to be as close to transformers' forward
in float64. SGLang is not started: the column says how weights would reach it and what is known
against it on a CPU. Anything that is neither right nor an InputError is printed as `wrong`.
--table: as ppo/models/families.md has it. Half an hour on a core for all.
"""

import argparse
import functools
import importlib.util
import logging
import re
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo.config import FsdpConfig, MixedPrecisionConfig, ModelConfig, RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.embedded.engine import TorchEngine
from ppo.engines.embedded.model import split_problem
from ppo.engines.embedded.verify import choose_cache
from ppo.errors import InputError
from ppo.model_shapes import sglang_problem
from ppo.models.build import build_causal_lm, build_value_model, is_packable
from ppo.models.forward import sp_problem
from ppo.models.small_copy import NoSmallCopy, build_small_copy
from sharding.layout import FAMILIES
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.ppo.engines.drive import drive, generate
from tests.ppo.models.families import EXTRA, families
from tests.ppo.models.hf_models import packed_inputs, padded_inputs

CPU = torch.device("cpu")
FLOAT32 = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
LENGTHS = (5, 1, 14, 9, 5)
PROMPTS = (3, 7, 3)
RESPONSE = 9
LONGEST = 4096
"""tokens of a sequence that SGLang is asked for"""
MOST = 1e-6
"""largest difference of probabilities, trainer or engine against transformers, in float32"""
SPARE = 2
"""times transformers' own distance from float64 that ours may have, where both are above MOST"""
AMPLIFY = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), 1e-4),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), 1e-3),
    "gemma3n_text": 2e-5,
}
"""most of families that amplify rounding: the linear attention of Qwen computes in float32 whatever
the model does, and in chunks and token by token transformers alone is 2e-5 from float64; Gemma 3n
keeps the largest activations of a layer and mixes four streams (AltUp)"""


class Scored(NamedTuple):
    """Log-probs of ids[start:] by trainer or engine."""

    ids: Tensor
    start: int
    logprobs: Tensor


class Row(NamedTuple):
    """What a run with a family does."""

    family: str
    trainer: str
    """packed | padded | refused | wrong | not built (by transformers, from these values)"""
    sp: str
    """yes | no"""
    engine: str
    """own cache | transformers' cache | no cache | refused | wrong | -"""
    split: str
    """whether T = 2: yes | no"""
    sglang: str
    """layout | generic (how weights reach it) | refused (on a CPU) | no class (of its own) | -
    (SGLang is not installed)"""
    difference: float
    """largest, of probabilities"""
    reason: str
    seconds: float


def rows(names: Iterable[str]) -> Iterator[Row]:
    """One family after the other, in this process."""
    with init_distributed(CPU):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), CPU)
        for name in names:
            started = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                found = _try(name, Path(folder), mesh)
            yield found._replace(seconds=time.process_time() - started)


def _try(name: str, folder: Path, mesh: Mesh) -> Row:
    from transformers import AutoConfig

    row = Row(name, "not built", "no", "-", "no", "-", 0.0, "", 0.0)
    try:
        small = build_small_copy(AutoConfig.for_model(name, **EXTRA.get(name, {})))
        small.save_pretrained(folder)
        del small
        plain = _plain(folder)
    except NoSmallCopy as error:
        return row._replace(reason=str(error))
    except Exception as error:  # whatever the code of a family raises
        return row._replace(reason=f"{type(error).__name__}: {error}")
    try:
        module = _build(build_causal_lm, folder, mesh)
        packs = is_packable(module)
        row = row._replace(trainer="packed" if packs else "padded")
        scored = _train(module)
        _criticize(_build(build_value_model, folder, mesh), packs)
    except InputError as error:
        return row._replace(trainer="refused", reason=str(error))
    except Exception as error:
        return row._replace(trainer="wrong", reason=_where(error))
    config: Any = module.config
    row = row._replace(
        sp="no" if not packs or sp_problem(module, None, 2) else "yes",
        split="no" if split_problem(config, 2) else "yes",
        sglang=_sglang(config, type(plain).__name__),
    )
    try:
        kind = choose_cache(config, compare=True)
        scored += _generate(module, mesh, kind)
        engines = {"own": "own cache", "transformers": "transformers' cache", "none": "no cache"}
        row = row._replace(engine=engines[kind], split=row.split if kind == "own" else "no")
    except InputError as error:
        row = row._replace(engine="refused", split="no", reason=str(error))
    except Exception as error:
        return row._replace(engine="wrong", reason=_where(error))
    return _judged(row, folder, scored, plain)


def _judged(row: Row, folder: Path, scored: list[Scored], plain: Any) -> Row:
    """The row with its difference, `wrong` where that is too large."""
    difference = _largest(scored, plain)
    if difference <= MOST:
        return row._replace(difference=difference)
    exact = _plain(folder, torch.float64)
    exact.set_experts_implementation("eager")  # the grouped product knows no float64
    own = [s._replace(logprobs=_scores(plain, s.ids, s.start)) for s in scored]
    limit = max(MOST, SPARE * _largest(own, exact), AMPLIFY.get(row.family, 0))
    row = row._replace(difference=_largest(scored, exact))
    return row if row.difference <= limit else row._replace(trainer="wrong", reason="differs")


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"


def _plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    return plain.eval().requires_grad_(False)


def _sglang(config: Any, name: str) -> str:
    if importlib.util.find_spec("sglang") is None:
        return "-"
    name = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}.get(name, name)  # as SGLang has it
    if name not in _sglang_classes():
        return "no class"
    if sglang_problem(config.to_dict(), LONGEST, on_cpu=True):
        return "refused"
    return "layout" if config.model_type in FAMILIES else "generic"


@functools.cache
def _sglang_classes() -> set[str]:
    """Of its models, read from its files: it is not imported."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    files = (Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py")
    entries = [re.findall(r"^EntryClass\s*=\s*(\[[^]]*\]|\w+)", f.read_text(), re.M) for f in files]
    return set(re.findall(r"\w+", " ".join(entry for found in entries for entry in found)))


def _build(build: Any, folder: Path, mesh: Mesh) -> nn.Module:
    return build(
        folder,
        mesh,
        model_config=ModelConfig(path=str(folder), tokenizer_path=str(folder)),
        fsdp_config=FLOAT32,
        checkpointing=True,
        forward_only=False,
        dtype=torch.float32,
    )


def _ids(module: Any, lengths: Iterable[int]) -> list[Tensor]:
    # The last ids of a small copy stand for images and the like.
    most, generator = module.get_input_embeddings().weight.shape[0] - 8, torch.Generator()
    generator.manual_seed(2)
    return [torch.randint(most, (n,), generator=generator) for n in lengths]


def _train(module: Any) -> list[Scored]:
    """Documents as the trainer scores them; gradients have to be finite."""
    documents = _ids(module, LENGTHS)
    inputs = packed_inputs(documents) if is_packable(module) else padded_inputs(documents)
    got = module(**inputs).logprobs
    (-got.mean()).backward()
    broken = [n for n, p in module.named_parameters() if p.grad is not None and not _finite(p.grad)]
    assert not broken, f"gradients that are not finite: {broken[:3]}"
    module.zero_grad(set_to_none=True)
    parts = got.detach().split([len(ids) - 1 for ids in documents])
    return [Scored(ids, 1, part) for ids, part in zip(documents, parts, strict=True)]


def _finite(tensor: Any) -> bool:
    return bool(getattr(tensor, "to_local", lambda: tensor)().isfinite().all())


def _criticize(critic: Any, packs: bool) -> None:
    documents = _ids(critic, LENGTHS)
    inputs = packed_inputs(documents) if packs else padded_inputs(documents)
    del inputs["labels"]
    values = critic(**inputs)
    values.sum().backward()
    assert not values.any(), "a new critic's values are zero"


@torch.no_grad()
def _scores(plain: Any, ids: Tensor, start: int) -> Tensor:
    """Log-probs of ids[start:] by transformers."""
    logits = plain(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]


def _largest(scored: list[Scored], plain: Any) -> float:
    """The largest difference of probabilities."""
    return max(
        float((s.logprobs.exp() - _scores(plain, s.ids, s.start).exp()).abs().max())
        for s in scored
        if len(s.ids) > s.start
    )


def _generate(module: Any, mesh: Mesh, kind: Any) -> list[Scored]:
    """Answers with the log-probs that the engine gives them."""
    rollout = RolloutConfig(
        dtype="float32", max_model_len=32, max_num_seqs=4, max_num_batched_tokens=64
    )
    engine = TorchEngine(module, mesh, None, rollout, cache=kind)
    drive(engine.wake())
    prompts = [ids.tolist() for ids in _ids(module, PROMPTS)]
    requests = [
        Request(10 * i + s, ids, max_new_tokens=RESPONSE - 2 * s)
        for i, ids in enumerate(prompts)
        for s in range(2)
    ]
    params = SamplingParams(
        max_new_tokens=RESPONSE, temperature=1.0, ignore_eos=True, seed=3, step=1
    )
    done = drive(generate(engine, requests, params)).completions
    engine.close()
    return [
        Scored(
            torch.tensor(request.prompt_ids + completion.response_ids),
            len(request.prompt_ids),
            torch.tensor(completion.logprobs),
        )
        for request, completion in zip(requests, done, strict=True)
    ]


def markdown(row: Row) -> str:
    """A row of the table in ppo/models/families.md."""
    difference = "" if row.engine in ("-", "refused") else f"{row.difference:.0e}"
    cells = (row.family, row.trainer, row.sp, row.engine, row.split, row.sglang, difference)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all by default")
    parser.add_argument("--table", action="store_true", help="as ppo/models/families.md has it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for row in rows(options.families or families()):
        reason = " ".join(row.reason.split())[:300]
        more = "" if options.table else f" {row.seconds:.1f} s {reason}"
        print(f"{markdown(row)}{more}", flush=True)


if __name__ == "__main__":
    main()
