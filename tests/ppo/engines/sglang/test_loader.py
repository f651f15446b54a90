"""The weight loader of SGLang's workers, on plain modules: no engine is needed to call it."""

import json

import torch
from torch import Tensor, nn

from ppo.engines.sglang.host_executor import RESULT_BYTES
from ppo.engines.sglang.loader import load
from sharding.reshard import checksums
from sharding.reshard.checksums import checksum
from tests.peak_memory import PeakTracker


class GemmaNorm(nn.Module):
    """As SGLang's GemmaRMSNorm: a buffer that its own weight loader would refresh."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.gemma_weight = nn.Buffer(torch.ones(4))

    def refresh_gemma_weight(self):
        self.gemma_weight.copy_(self.weight.data).add_(1.0)


class Worker(nn.Module):
    """Two fused parameters as a tensor-parallel worker holds them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.qkv = nn.Linear(4, 6, bias=False, dtype=dtype)
        self.embed = nn.Embedding(8, 4, dtype=dtype)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in dict(self.named_parameters()):  # unknown names are passed over, as in SGLang
                self.get_parameter(name).data.copy_(tensor)


EMPTY = torch.zeros(1)
# 5 of the 8 rows of the embedding are tokens, the rest is padding
ENTRIES = [
    ["qkv.weight", 0, 0, 4, 4, 0],
    ["qkv.weight", 4, 0, 2, 4, 16],
    ["embed.weight", 0, 0, 5, 4, 24],
]
ZEROS = [["embed.weight", 5, 0, 3, 4]]


def tell(model: nn.Module, stage: str, flat: Tensor = EMPTY, **changes) -> dict:
    instruction = {"action": "load", "stage": stage, "style": "slices", "entries": [], "zeros": []}
    instruction |= {"checksums": {}, **changes}
    result = torch.full((RESULT_BYTES,), 7, dtype=torch.uint8)
    load(model, [(json.dumps(instruction), flat), ("result", result)])
    return json.loads(bytes(result.tolist()).rstrip(b"\0"))


def test_slices_and_zero_padding_land_where_the_table_says():
    model, flat = Worker(), torch.arange(44.0)
    tell(model, "begin")
    assert tell(model, "bucket", flat, entries=ENTRIES, zeros=ZEROS)["error"] == ""
    sums = {name: checksum(p).item() for name, p in model.named_parameters()}
    assert tell(model, "end", checksums=sums) == {"error": "", "differing": []}
    torch.testing.assert_close(model.qkv.weight.data, torch.arange(24.0).view(6, 4))
    expected = torch.cat([torch.arange(24.0, 44.0).view(5, 4), torch.zeros(3, 4)])
    torch.testing.assert_close(model.embed.weight.data, expected)


def test_a_parameter_that_was_not_written_wholly_is_an_error_with_its_count():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, flat = Worker(dtype), torch.arange(44, dtype=dtype)
        tell(model, "begin")
        tell(model, "bucket", flat, entries=[*ENTRIES[:1], *ENTRIES[2:]])
        error = tell(model, "end")["error"]
        assert "never written" in error
        assert "qkv.weight (8 of 24 elements)" in error
        assert "embed.weight (12 of 32 elements)" in error


def test_nan_weights_of_a_diverged_trainer_count_as_written():
    model = Worker()
    tell(model, "begin")
    tell(model, "bucket", torch.full((44,), torch.nan), entries=ENTRIES, zeros=ZEROS)
    assert tell(model, "end")["error"] == ""


def test_a_buffer_of_the_checkpoint_that_was_not_written_is_an_error_too():
    """SGLang fills it with random numbers, as all that a checkpoint holds."""
    model = Worker()
    model.register_buffer("correction", torch.zeros(3))
    model.register_buffer("table", torch.zeros(3), persistent=False)
    named = [("qkv.weight", torch.ones(6, 4)), ("embed.weight", torch.ones(8, 4))]
    flat = torch.cat([tensor.flatten() for _, tensor in named])
    entries = [["qkv.weight", [6, 4], 0], ["embed.weight", [8, 4], 24]]
    tell(model, "begin")
    assert tell(model, "bucket", flat, style="full", entries=entries)["error"] == ""
    error = tell(model, "end", style="full")["error"]
    assert error == "never written in the engine: correction (3 of 3 elements)"
    assert model.get_buffer("table").tolist() == [0, 0, 0]


def test_layers_in_half_precision_of_a_float32_engine_hold_what_is_sent():
    for dtype, kept in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = Worker(dtype)
        model.alpha = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
        model.beta = nn.Buffer(torch.tensor(0.5, dtype=torch.bfloat16))
        tell(model, "begin")
        assert model.alpha.dtype == model.beta.dtype == kept
        named = [(name, p.shape) for name, p in model.named_parameters()]
        flat = torch.full((sum(shape.numel() for _, shape in named),), 1.001, dtype=dtype)
        entries, offset = [], 0
        for name, shape in named:
            entries.append([name, list(shape), offset])
            offset += shape.numel()
        tell(model, "bucket", flat, style="full", entries=entries)
        assert torch.equal(model.alpha, flat[:1])
        assert "never written in the engine: beta" in tell(model, "end")["error"]


def test_what_does_not_fit_is_answered_and_never_raised():
    model, flat = Worker(), torch.arange(44.0)
    for entry, text in (
        (["lm_head.weight", 0, 0, 1, 4, 0], "no parameter lm_head.weight"),
        (["qkv.weight", 4, 0, 3, 4, 0], "rows 4..7"),
        (["qkv.weight", 0, 2, 1, 3, 0], "columns 2..5"),
        (["qkv.weight", 0, 0, 6, 4, 40], "shape"),
    ):
        assert text in tell(model, "bucket", flat, entries=[entry])["error"]
    assert "bfloat16" in tell(model, "bucket", flat.bfloat16(), entries=ENTRIES)["error"]
    result = torch.zeros(RESULT_BYTES, dtype=torch.uint8)
    load(model, [("no json", flat), ("result", result)])
    assert b"JSONDecodeError" in bytes(result.tolist())


def test_an_answer_that_is_too_long_is_cut_and_stays_readable():
    model = Worker()
    answer = tell(model, "end", checksums={f"parameter{i}" * 50: i for i in range(100)})
    assert 0 < len(answer["differing"]) < 100
    assert "error" in tell(model, "bucket", entries=[["x" * 9000, 0, 0, 1, 1, 0]])


def test_verification_names_the_parameter_and_both_values():
    model, flat = Worker(), torch.arange(44.0)
    tell(model, "bucket", flat, entries=ENTRIES, zeros=ZEROS)
    sums = {name: checksum(p).item() for name, p in model.named_parameters()}
    model.qkv.weight.data[5, 2] = 100.5
    model.embed.weight.data[7, 1] = 3.0
    assert set(tell(model, "end", checksums=sums)["differing"]) == {"qkv.weight", "embed.weight"}
    tell(model, "begin", action="verify")
    error = tell(model, "bucket", flat, action="verify", entries=ENTRIES, zeros=ZEROS)["error"]
    assert "qkv.weight from [4, 0] at [1, 2]: engine 100.5, trainer 22" in error
    assert "padding of embed.weight from [5, 0] at [2, 1]: engine 3, trainer 0" in error
    assert model.qkv.weight[5, 2] == 100.5  # compared, not repaired


def test_verification_by_the_models_own_loader_names_the_parameter():
    model = Worker()
    tensors = torch.arange(56.0)
    entries = [["qkv.weight", [6, 4], 0], ["embed.weight", [8, 4], 24], ["unknown", [1], 0]]
    for stage in ("begin", "bucket", "end"):
        assert tell(model, stage, tensors, style="full", entries=entries)["error"] == ""
    model.qkv.weight.data[0, 3] = -1.0
    answers = [
        tell(model, stage, tensors, style="full", action="verify", entries=entries)["error"]
        for stage in ("begin", "bucket", "end")
    ]
    assert answers[:2] == ["", ""]
    assert answers[2] == "it held something else than the trainer in qkv.weight"


def test_verification_by_the_models_own_loader_holds_no_copy_of_the_weights(monkeypatch):
    """Nor much of one expert's, which are one row of the tensor of all."""
    monkeypatch.setattr(checksums, "_CUT", 1 << 12)  # as small beside these weights as beside real
    model = Worker()
    model.experts = nn.Parameter(torch.ones(2, 64, 1024), requires_grad=False)
    size = sum(parameter.nbytes for parameter in model.parameters())
    entries = [["experts", list(model.experts.shape), 0]]
    with PeakTracker(torch.device("cpu")) as peak:
        for stage in ("begin", "bucket", "end"):
            changes = {"style": "full", "action": "verify", "entries": entries}
            assert tell(model, stage, model.experts.view(-1), **changes)["error"] == ""
    assert peak.extra_bytes < 0.5 * size


def test_buffers_that_derive_from_a_weight_are_refreshed():
    norm = GemmaNorm()
    model = nn.ModuleDict({"norm": norm})
    tell(model, "begin")
    tell(model, "bucket", torch.tensor([1.0, 2, 3, 4]), entries=[["norm.weight", 0, 0, 4, 1, 0]])
    assert tell(model, "end")["error"] == ""
    assert norm.gemma_weight.tolist() == [2, 3, 4, 5]
    norm.gemma_weight[1] = 0
    error = tell(model, "end", action="verify")["error"]
    assert error == "norm.gemma_weight at [1]: engine 0, trainer 3 (1 of 4 elements differ)"
