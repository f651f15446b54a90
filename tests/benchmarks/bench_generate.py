"""Tokens per second of the embedded engine against transformers' generate, on one rank.

    python -m tests.benchmarks.bench_generate [--model HF_FOLDER] [--batch 32] [--max_new_tokens 96]

Both sample the same number of tokens from the same ragged prompts: the engine's responses end at
stop tokens, and transformers is told to end each row at the same length (its batch stays whole
until the longest row has ended). Without --model: random weights in the shape of SmolLM2-135M.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, StoppingCriteria

from ppo.config import RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.embedded.engine import TorchEngine
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.ppo.engines.drive import drive, generate

CPU = torch.device("cpu")
TARGET = 1.2


class EndRowsAt(StoppingCriteria):
    """Ends row i when it has lengths[i] tokens beyond the prompt."""

    def __init__(self, prompt_columns: int, lengths: Tensor):
        self.ends = prompt_columns + lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self.ends


def smollm2_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def make_requests(batch: int, vocab_size: int) -> list[Request]:
    """Different prompts of 8 to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (batch,), generator=generator).tolist()
    return [
        Request(i, torch.randint(0, vocab_size, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def engine_generate(engine: TorchEngine, requests: list[Request], params: SamplingParams) -> Tensor:
    """Lengths of the responses."""
    completions = drive(generate(engine, requests, params)).completions
    return torch.tensor([len(completion.response_ids) for completion in completions])


def transformers_generate(model: Any, requests: list[Request], lengths: Tensor) -> None:
    """The same number of tokens of each row, on the model's device."""
    columns = max(len(request.prompt_ids) for request in requests)
    input_ids = torch.zeros(len(requests), columns, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, columns - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, columns - len(request.prompt_ids) :] = 1
    device = model.device
    model.generate(
        input_ids.to(device),
        attention_mask=mask.to(device),
        do_sample=True,
        top_k=0,
        max_new_tokens=int(lengths.max()),
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[EndRowsAt(columns, lengths.to(device))],
    )


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Comparison(NamedTuple):
    """Tokens per second of both, and the lengths that both made."""

    engine: float
    transformers: float
    mean_length: float
    longest: int

    @property
    def ratio(self) -> float:
        return self.engine / self.transformers


def compare_engines(
    model: Any, *, device: torch.device, dtype: str, batch: int, max_new_tokens: int, repeats: int
) -> Comparison:
    """Both on the same ragged prompts, after one call each; needs a process group of one rank."""
    vocab_size = model.config.vocab_size
    requests = make_requests(batch, vocab_size)
    # One token of 40 ends a response: geometric lengths with a mean near 40.
    stops = tuple(range(0, vocab_size, 40))
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=stops)
    engine = TorchEngine(
        model,
        build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device),
        None,
        RolloutConfig(
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=64 + max_new_tokens,
            max_num_seqs=batch,
            reshard_bucket_mib=64,
        ),
    )
    drive(engine.wake())
    lengths = engine_generate(engine, requests, params)
    transformers_generate(model, requests, lengths.clamp(max=4))
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(timed(lambda: engine_generate(engine, requests, params), device))
        theirs.append(timed(lambda: transformers_generate(model, requests, lengths), device))
    engine.close()
    tokens = int(lengths.sum())
    rate, other = (tokens / statistics.median(seconds) for seconds in (ours, theirs))
    return Comparison(rate, other, float(lengths.float().mean()), int(lengths.max()))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    config = AutoConfig.from_pretrained(args.model) if args.model else smollm2_config()
    torch.manual_seed(0)
    model: Any = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        if args.model
        else AutoModelForCausalLM.from_config(config, dtype=dtype)
    ).eval()
    with init_distributed(CPU):
        found = compare_engines(
            model,
            device=CPU,
            dtype=args.dtype,
            batch=args.batch,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
        )
    sys.stdout.write(
        f"{args.batch} rows, response lengths mean {found.mean_length:.1f} max {found.longest}, "
        f"{args.dtype}, "
        f"{torch.get_num_threads()} threads\n"
        f"embedded engine       {found.engine:8.1f} tokens/s\n"
        f"transformers generate {found.transformers:8.1f} tokens/s\n"
        f"ratio {found.ratio:.2f} (target {TARGET})\n"
    )


if __name__ == "__main__":
    main()
