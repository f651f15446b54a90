"""The embedded engine against transformers' own forward and generate, and against itself."""

import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ppo.config import RolloutConfig
from ppo.engines.contract import Engine, Request, SamplingParams
from ppo.engines.embedded.engine import TorchEngine
from ppo.engines.embedded.generation import Generation
from ppo.engines.embedded.kv_cache import KVCache
from ppo.engines.embedded.sampling import sample, uniforms
from ppo.engines.embedded.stop_text import StopText
from ppo.engines.slices import StepCount
from ppo.models.tiny import build_tiny_tokenizer
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.ppo.engines.drive import Listed, drive, generate, listed

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
UNEVEN: dict[str, Any] = SIZES | {"vocab_size": 509}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, uneven vocabulary": LlamaConfig(**UNEVEN),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, one sliding layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral, sliding": MistralConfig(**SIZES, sliding_window=5),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=6),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6),
}


SHARDED = ("qwen2, tied", "gemma3", "llama, uneven vocabulary")


def make_model(config: PretrainedConfig) -> Any:
    """Random weights large enough that the next token is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def make_requests(number: int, *, samples: int = 1) -> list[Request]:
    """Prompts of 1 to 20 tokens, sample-major, as rollout.py submits them."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 21, (number,), generator=generator).tolist()
    prompts = [torch.randint(0, 500, (n,), generator=generator).tolist() for n in lengths]
    return [Request(1000 * i + s, ids) for s in range(samples) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with init_distributed(torch.device("cpu")):
        yield build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))


def make_engine(mesh: Mesh, model: Any, **options) -> TorchEngine:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "reshard_bucket_mib": 1,
        "gpu_memory_utilization": 0.6,
        "verify_weights": "never",
    }
    return TorchEngine(model, mesh, build_tiny_tokenizer(), RolloutConfig(**(defaults | options)))


def run(engine: Engine, requests: list[Request], params: SamplingParams) -> list[Listed]:
    return drive(generate(engine, requests, params)).completions


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_model(CONFIGS["qwen2, tied"])


@pytest.fixture
def engine(mesh: Mesh, reference: nn.Module) -> Iterator[TorchEngine]:
    engine = make_engine(mesh, reference)
    drive(engine.wake())
    yield engine
    engine.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_and_logprobs_equal_transformers(mesh, name):
    model, requests = make_model(CONFIGS[name]), make_requests(5)
    engine = make_engine(mesh, model, max_num_seqs=3)
    drive(engine.wake())
    params = SamplingParams(temperature=0, max_new_tokens=14, stop_token_ids=tuple(range(9)))
    for request, completion in zip(requests, run(engine, requests, params), strict=True):
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=list(range(9)),
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        assert completion.response_ids == expected
        logits = model(torch.tensor([request.prompt_ids + expected])).logits[0]
        expected_logprobs = logits[ids.shape[1] - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            expected_logprobs[range(len(expected)), expected],
            rtol=0,
            atol=2e-5,
        )
    engine.close()


def test_samples_are_those_of_the_noise_and_a_plain_forward(engine, reference):
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=6, seed=5, step=3)
    requests = make_requests(4)
    for request, completion in zip(requests, run(engine, requests, params), strict=True):
        ids = list(request.prompt_ids)
        for position, token in enumerate(completion.response_ids):
            logits = reference(torch.tensor([ids])).logits[:, -1]
            noise = uniforms(torch.tensor([request.uid]), torch.tensor(position), seed=5, step=3)
            expected = sample(logits, noise, temperature=0.7, top_p=0.9, top_k=40)
            assert token == expected.tokens.item()
            logprob = (logits / 0.7).log_softmax(-1)[0, token]
            assert completion.logprobs[position] == pytest.approx(logprob.item(), abs=2e-5)
            ids.append(token)


def test_samples_do_not_depend_on_the_batch_they_are_made_in(mesh, reference):
    params = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(20)), seed=1)
    requests = make_requests(6, samples=3)
    results = []
    for rows, order in ((64, 1), (1, 1), (5, 1), (5, -1)):
        engine = make_engine(mesh, reference, max_num_seqs=rows)
        drive(engine.wake())
        completions = run(engine, requests[::order], params)
        results.append([completion.response_ids for completion in completions[::order]])
        engine.close()
    lengths = {len(ids) for ids in results[0]}
    assert min(lengths) < max(lengths) == 20
    assert len({tuple(ids) for ids in results[0]}) == len(requests)
    assert all(result == results[0] for result in results)


def test_samples_of_a_prompt_share_one_prefill_though_they_are_submitted_apart(engine):
    params = SamplingParams(max_new_tokens=6, seed=1)
    requests = make_requests(6, samples=4)  # 24 requests, 8 rows: two prompts at a time
    shared = drive(generate(engine, requests, params))
    assert shared.metrics["rollout/cache_hit"] == pytest.approx(3 / 4)
    alone = drive(generate(engine, requests[:6], params))
    assert alone.metrics["rollout/cache_hit"] == 0


@pytest.mark.parametrize("at_once", [1, 5])
def test_requests_that_come_while_others_run_get_the_same_tokens(engine, at_once):
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(40)), seed=3)
    requests = make_requests(7, samples=2)  # 14 requests, 8 rows
    together = drive(generate(engine, requests, params)).completions
    apart = drive(generate(engine, requests, params, at_once=at_once)).completions
    assert [c.response_ids for c in apart] == [c.response_ids for c in together]
    for one, other in zip(apart, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_what_the_only_engine_computes_together_does_not_depend_on_the_clock(engine, monkeypatch):
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(40)), seed=3)
    found = []
    for num_steps in (1, 5):  # that a slice has time for
        monkeypatch.setattr(
            StepCount, "learn", lambda self, *_, n=num_steps: setattr(self, "steps", n)
        )
        generation = engine.begin(params, longest_prompt=20, most=40)
        waiting, ended = make_requests(40), {}
        while len(ended) < 40:
            room = generation.room
            generation.submit(waiting[:room])
            waiting = waiting[room:]
            ended |= dict(generation.advance())
        rows = generation.metrics()["rollout/num_running_mean"]
        found.append((rows, {uid: tuple(c.logprobs.tolist()) for uid, c in ended.items()}))
        generation.close()
    assert found[0] == found[1]


def test_an_engine_among_several_has_room_for_its_rows_and_a_quarter_more(engine, monkeypatch):
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    generation = engine.begin(params, longest_prompt=20, most=100)
    dims = ParallelDims(world_size=2, ranks_per_node=2)
    monkeypatch.setattr(generation, "_mesh", SimpleNamespace(dims=dims))
    assert generation.room == 10
    generation.submit(make_requests(9))
    assert generation.room == 1 and generation.advance() == []
    while len(generation.advance()) == 0:
        assert generation.room >= 1
    generation.close()


def test_reading_tokens_one_step_late_changes_nothing(engine):
    params = SamplingParams(max_new_tokens=15, stop_token_ids=tuple(range(40)), seed=2)
    requests = make_requests(9)
    results = []
    for lag in (0, 1):
        generation = Generation(
            engine._model,
            params,
            longest_prompt=20,
            max_rows=4,
            max_model_len=30,
            max_prefill_tokens=64,
            stop_text=StopText(None),
            lag=lag,
        )
        generation.submit(requests)
        while not generation.done:
            generation.step()
        ended = {uid: listed(completion) for uid, completion in generation.take_finished()}
        results.append([(ended[r.uid].response_ids, ended[r.uid].finish_reason) for r in requests])
    assert results[0] == results[1]
    assert {reason for _, reason in results[0]} == {"stop", "length"}


def test_a_row_leaves_the_batch_when_it_ends(engine):
    stops = tuple(range(40))
    params = SamplingParams(max_new_tokens=30, stop_token_ids=stops, seed=2)
    completions, metrics = drive(generate(engine, make_requests(8), params))
    decoded = sum(len(completion.response_ids) - 1 for completion in completions)
    steps = max(len(completion.response_ids) - 1 for completion in completions)
    assert metrics["rollout/num_running_mean"] == pytest.approx(decoded / steps)
    assert decoded < 8 * steps
    assert metrics["rollout/tokens_per_s"] > 0
    assert 0 < metrics["rollout/kv_util"] <= 1


def test_the_stop_token_ends_a_completion_and_belongs_to_it(engine):
    params = SamplingParams(max_new_tokens=40, seed=2)
    free = run(engine, make_requests(3), params)
    stops = tuple({free[0].response_ids[4], free[1].response_ids[7]})
    stopping = SamplingParams(max_new_tokens=40, seed=2, stop_token_ids=stops)
    for whole, cut in zip(free, run(engine, make_requests(3), stopping), strict=True):
        end = next((i for i, token in enumerate(whole.response_ids) if token in stops), None)
        length = 40 if end is None else end + 1
        assert cut.response_ids == whole.response_ids[:length]
        assert cut.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert cut.finish_reason == ("length" if end is None else "stop")
    ignoring = SamplingParams(max_new_tokens=40, seed=2, stop_token_ids=stops, ignore_eos=True)
    ignored = run(engine, make_requests(3), ignoring)
    assert [c.response_ids for c in ignored] == [c.response_ids for c in free]


def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(engine):
    tokenizer = build_tiny_tokenizer()
    params = SamplingParams(max_new_tokens=40, seed=2)
    free = run(engine, make_requests(4), params)
    texts = [str(tokenizer.decode(completion.response_ids[10:12])) for completion in free[:2]]
    stopping = SamplingParams(max_new_tokens=40, seed=2, stop=tuple(texts))
    stopped = run(engine, make_requests(4), stopping)
    for whole, cut in zip(free, stopped, strict=True):
        length = next(
            (n for n in range(41) if contains(tokenizer, whole.response_ids[:n], texts)), 40
        )
        assert cut.response_ids == whole.response_ids[:length]
    assert any(len(c.response_ids) < 40 for c in stopped)


def test_a_conversation_that_goes_on_draws_the_noise_that_comes_next(engine):
    params = SamplingParams(max_new_tokens=24, seed=2)
    requests = make_requests(3)
    whole = run(engine, requests, params)
    begun = [r._replace(max_new_tokens=7 + i) for i, r in enumerate(requests)]
    parts = run(engine, begun, params)
    assert [len(part.response_ids) for part in parts] == [7, 8, 9]
    rest = [
        request._replace(
            prompt_ids=request.prompt_ids + list(part.response_ids),
            sampled_before=len(part.response_ids),
            max_new_tokens=24 - len(part.response_ids),
        )
        for request, part in zip(requests, parts, strict=True)
    ]
    for one, begin, end in zip(whole, parts, run(engine, rest, params), strict=True):
        assert [*begin.response_ids, *end.response_ids] == one.response_ids
        assert [*begin.logprobs, *end.logprobs] == pytest.approx(one.logprobs, abs=1e-4)


def test_each_request_may_have_stop_texts_of_its_own(engine):
    tokenizer = build_tiny_tokenizer()
    params = SamplingParams(max_new_tokens=40, seed=2)
    requests = make_requests(3)
    free = run(engine, requests, params)
    text = str(tokenizer.decode(free[0].response_ids[10:12]))
    stopped = run(engine, [requests[0]._replace(stop=(text,)), *requests[1:]], params)
    assert len(stopped[0].response_ids) <= 12
    assert text in tokenizer.decode(stopped[0].response_ids)
    assert [c.response_ids for c in stopped[1:]] == [c.response_ids for c in free[1:]]


def test_a_request_for_no_token_is_refused(engine):
    with pytest.raises(ValueError, match=r"uid 5.: max_new_tokens = 0 is not positive"):
        run(engine, [Request(5, [1], max_new_tokens=0)], SamplingParams(max_new_tokens=4))


def contains(tokenizer, ids: list[int], texts: list[str]) -> bool:
    return any(text in tokenizer.decode(ids) for text in texts)


def test_max_model_len_cuts_a_long_row_alone(engine):
    requests = [Request(1, [7] * 120), Request(2, [7] * 3)]
    completions = run(engine, requests, SamplingParams(max_new_tokens=20))
    assert [len(completion.response_ids) for completion in completions] == [8, 20]
    assert [completion.finish_reason for completion in completions] == ["length", "length"]


def test_bfloat16_logprobs_stay_close_to_float32(mesh, reference):
    engine = make_engine(mesh, reference, dtype="bfloat16")
    drive(engine.wake())
    requests = make_requests(4)
    completions = run(engine, requests, SamplingParams(max_new_tokens=8, seed=6))
    for request, completion in zip(requests, completions, strict=True):
        ids = request.prompt_ids + completion.response_ids
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[len(request.prompt_ids) - 1 : -1][range(8), completion.response_ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=0.15)
    engine.close()


def test_no_requests_give_no_completions(engine):
    assert run(engine, [], SamplingParams(max_new_tokens=4)) == []


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], r"request 1 \(uid 7\): the prompt is empty"),
        ([1] * 128, r"request 1 \(uid 7\): the prompt has 128 tokens.* max_model_len = 128"),
        ([511, 512], r"request 1 \(uid 7\): token ids from 511 to 512 .* vocabulary of 512"),
    ],
)
def test_a_bad_prompt_is_named(engine, prompt_ids, message):
    requests = [Request(0, [1]), Request(7, prompt_ids)]
    with pytest.raises(ValueError, match=message):
        drive(generate(engine, requests, SamplingParams(max_new_tokens=4)))


def test_sampling_options_out_of_range_are_all_named():
    with pytest.raises(ValueError, match=r"temperature = -1.*top_p = 0.*top_k = 0.*max_new_tok"):
        SamplingParams(temperature=-1, top_p=0, top_k=0, max_new_tokens=0)


@pytest.mark.parametrize("kind", ["transformers", "none"])
def test_transformers_caches_and_none_give_the_samples_of_the_own_one(
    mesh, reference, engine, kind
):
    rollout = RolloutConfig(
        dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64
    )
    other = TorchEngine(reference, mesh, build_tiny_tokenizer(), rollout, cache=kind)
    drive(other.wake())
    # Prompts of one length, several rows of a prompt, rows that end early and others that wait.
    requests = [
        Request(10 * i + s, list(range(i, i + n)), max_new_tokens=2 + (i + 3 * s) % 6)
        for s in range(3)
        for i, n in enumerate((4, 9, 4, 1))
    ]
    params = SamplingParams(max_new_tokens=8, seed=5)
    for got, want in zip(run(other, requests, params), run(engine, requests, params), strict=True):
        assert (got.response_ids, got.finish_reason) == (want.response_ids, want.finish_reason)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
    other.close()


def test_weights_and_cache_are_given_back(mesh, reference):
    engine = make_engine(mesh, reference)
    drive(engine.wake())
    weight = weakref.ref(engine._model.module.get_parameter("model.embed_tokens.weight"))
    work = generate(engine, make_requests(4), SamplingParams(max_new_tokens=50))
    next(work)
    assert engine._generation is not None
    cache = engine._generation.cache
    assert isinstance(cache, KVCache)
    assert cache.num_bytes == 2 * 2 * 4 * 4 * 128 * 8 * 4  # k and v, layers, rows, heads, ...
    engine.release()
    assert cache.num_bytes == 0 and weight() is None
    assert all(parameter.is_meta for parameter in engine._model.module.parameters())
    drive(engine.wake())
    again = run(engine, make_requests(2), SamplingParams(max_new_tokens=5, temperature=0))
    assert [len(completion.response_ids) for completion in again] == [5, 5]
    engine.close()


def test_new_weights_of_the_trainer_arrive_at_the_next_wake(mesh):
    model = make_model(CONFIGS["llama"])
    engine = make_engine(mesh, model)
    params = SamplingParams(temperature=0, max_new_tokens=8)
    for _ in range(2):
        drive(engine.wake())
        completion = run(engine, [Request(0, [1, 2, 3])], params)[0]
        expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
        assert completion.response_ids == expected[0, 3:].tolist()
        engine.release()
        for parameter in model.parameters():
            parameter.add_(0.1)


def test_a_weight_that_arrives_wrong_is_found_with_both_values(mesh):
    model = make_model(CONFIGS["llama"])
    engine = make_engine(mesh, model, verify_weights=2)
    work = engine.wake()
    next(work)
    engine._model.parameters()["model.norm.weight"][3] = 7.0
    right = model.get_parameter("model.norm.weight")[3].item()
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight\[3, 0\]: engine 7, trainer ") as e:
        drive(work)
    assert f"trainer {right:g}" in str(e.value)
    engine.release()
    drive(engine.wake())  # verified again: the first has not ended
    engine.release()
    unverified = engine.wake()
    next(unverified)
    engine._model.parameters()["model.norm.weight"][3] = 7.0
    drive(unverified)
    engine.close()


def samples_of_this_rank(
    rank: int, world_size: int, name: str, tp: int
) -> tuple[list[list[int]], list[float], int]:
    """Tokens and log-probs of this rank's share, from weights sharded over all ranks."""
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=tp)
    mesh = build_mesh(dims, torch.device("cpu"))
    model = make_model(CONFIGS[name])
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp)
    engine = make_engine(mesh, model, max_num_seqs=3)
    drive(engine.wake())
    params = SamplingParams(max_new_tokens=12, seed=4, stop_token_ids=tuple(range(20)))
    completions = run(engine, make_requests(8)[mesh.rollout_dp_rank :: dims.rollout_dp], params)
    local = engine._model.module.get_parameter("model.layers.0.self_attn.q_proj.weight")
    local = local.to_local() if isinstance(local, DTensor) else local
    engine.close()
    tokens = [completion.response_ids for completion in completions]
    logprobs = itertools.chain.from_iterable(c.logprobs for c in completions)
    return tokens, list(logprobs), local.numel()


def samples_for_every_tp(rank: int, world_size: int) -> dict:
    return {
        (name, tp): samples_of_this_rank(rank, world_size, name, tp)
        for name in SHARDED
        for tp in (1, 2, 4)
    }


@pytest.mark.gpu
def test_a_cuda_device_samples_what_the_cpu_samples_and_gets_its_memory_back():
    model, requests = make_model(CONFIGS["qwen2, tied"]), make_requests(6, samples=3)
    params = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(20)), top_k=50, seed=1)
    results, dims = [], ParallelDims(world_size=1, ranks_per_node=1)
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        with init_distributed(device):
            model = model.to(device)
            engine = make_engine(build_mesh(dims, device), model)
            before = torch.cuda.memory_allocated()
            drive(engine.wake())
            results.append([c.response_ids for c in run(engine, requests, params)])
            engine.close()
            torch._C._cuda_clearCublasWorkspaces()  # of the first products; the allocator's too
            assert torch.cuda.memory_allocated() == before
    assert results[0] == results[1]


@pytest.mark.distributed
def test_four_ranks_sample_the_same_tokens_for_every_tensor_parallel_size(mesh):
    ranks = run_distributed(samples_for_every_tp, 4)
    for name in SHARDED:
        engine = make_engine(mesh, make_model(CONFIGS[name]))
        drive(engine.wake())
        params = SamplingParams(max_new_tokens=12, seed=4, stop_token_ids=tuple(range(20)))
        expected = run(engine, make_requests(8), params)
        engine.close()
        for tp in (1, 2, 4):
            for rank, result in enumerate(ranks):
                tokens, logprobs, local_size = result[name, tp]
                mine = expected[rank // tp :: 4 // tp]
                assert tokens == [completion.response_ids for completion in mine]
                flat = itertools.chain.from_iterable(completion.logprobs for completion in mine)
                assert logprobs == pytest.approx(list(flat), abs=2e-5)
                assert local_size == 64 * (128 if name == "gemma3" else 64) // tp
