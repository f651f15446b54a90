"""Attention over packed documents against one dense masked softmax in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo.logprobs.blocks import product
from ppo.models.packed.attention import Documents, make_documents, packed_attention
from ppo.models.packed.kernels import (
    QUERY_BLOCK,
    choose_kernel,
    sdpa_kernel,
    varlen_kernel,
    varlen_pair,
)
from ppo.models.packed.sinks import FlashKernel, attend_with_sinks
from tests.peak_memory import PeakTracker

CPU = torch.device("cpu")


def random_qkv(tokens: int, *, heads=4, kv_heads=2, dim=6, value_dim=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, d, dtype=dtype, generator=g, requires_grad=True)
        for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    ]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    scale: float,
    window: Any,
    softcap: Any,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, h, e]: every pair of tokens scored, then all but the visible ones masked. A sink is one
    more key, seen by all, whose value is 0."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))
    visible = (document[:, None] == document) & (j <= i) & (i - j < (window or len(q)))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hij,jhe->ihe", scores.softmax(-1), v)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("lengths", [[5, 1, 17, 3], [8, 8], [QUERY_BLOCK + 3, 2]])
def test_each_document_is_attended_alone(lengths, window, softcap):
    q, k, v = random_qkv(sum(lengths))
    documents = make_documents(bounds(lengths), CPU, sdpa_kernel)
    got = sdpa_kernel(q, k, v, documents, scale=0.3, window=window, softcap=softcap)
    assert_equal_with_gradients(got, dense(q, k, v, lengths, 0.3, window, softcap), (q, k, v))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (4, 2.0)])
def test_a_sink_takes_its_share_of_each_document_and_has_its_gradient(window, softcap):
    lengths = [5, 1, 17, 3, 5]
    q, k, v = random_qkv(sum(lengths))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    documents = make_documents(bounds(lengths), CPU, sdpa_kernel)
    got = sdpa_kernel(q, k, v, documents, scale=0.3, window=window, softcap=softcap, sinks=sinks)
    want = dense(q, k, v, lengths, 0.3, window, softcap, sinks)
    assert_equal_with_gradients(got, want, (q, k, v, sinks))


def test_a_flash_kernel_that_knows_no_sinks_gives_their_output_and_gradients():
    q, k, v = random_qkv(9, kv_heads=4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    aten = torch.ops.aten
    causal, rows = (0.0, True), lambda t: t.transpose(0, 1)[None]  # [1, h, N, d]

    def forward(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(rows, qkv), *causal, scale=0.3
        )
        return output[0].transpose(0, 1), logsumexp[0]

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        *parts, logsumexp = tensors
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(rows, parts), logsumexp[None], *causal, scale=0.3
        )
        return tuple(grad[0].transpose(0, 1) for grad in grads)

    got = attend_with_sinks(q, k, v, sinks, FlashKernel(forward, backward))
    want = dense(q, k, v, [9], 0.3, None, None, sinks)
    assert_equal_with_gradients(got, want, (q, k, v, sinks))


def assert_equal_with_gradients(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    up = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(got, inputs, up)
    for a, b in zip(found, torch.autograd.grad(want, inputs, up), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_heads_of_values_may_have_another_size_and_empty_documents_are_dropped():
    q, k, v = random_qkv(9, value_dim=3)
    documents = make_documents(torch.tensor([0, 4, 4, 9]), CPU, sdpa_kernel)
    assert documents.lengths == (4, 5) and documents.bounds.tolist() == [0, 4, 9]
    got = sdpa_kernel(q, k, v, documents, scale=1.0, window=None, softcap=None)
    torch.testing.assert_close(got, dense(q, k, v, [4, 5], 1.0, None, None), rtol=1e-6, atol=1e-6)


def test_padding_after_a_sequence_changes_nothing_for_its_tokens():
    q, k, v = random_qkv(12)
    rows = [t.detach().clone().unflatten(0, (2, 6)).transpose(1, 2) for t in (q, k, v)]
    rows[1][0, :, 4:] = rows[2][0, :, 4:] = 1e6  # what lies at padded places is not seen
    documents = make_documents(torch.tensor([0, 6, 12]), CPU, sdpa_kernel)
    attend: Any = packed_attention
    got, _ = attend(torch.nn.Module(), *rows, None, documents=documents, scaling=0.5)
    want = dense(q[:4], k[:4], v[:4], [4], 0.5, None, None)
    torch.testing.assert_close(got[0, :4], want, rtol=1e-6, atol=1e-6)


def test_a_window_needs_no_memory_of_the_size_of_a_mask():
    length = 4096
    q, k, v = random_qkv(length, heads=1, kv_heads=1, dtype=torch.float32)
    documents = make_documents(bounds([length]), CPU, sdpa_kernel)
    with PeakTracker(CPU) as tracker:
        output = sdpa_kernel(q, k, v, documents, scale=1.0, window=64, softcap=None)
        output.sum().backward()
    assert tracker.peak_bytes < length * length / 4


def test_the_kernel_follows_the_configured_name():
    assert choose_kernel("auto", CPU) is sdpa_kernel
    assert choose_kernel("auto", torch.device("cuda")) is varlen_kernel
    assert choose_kernel("sdpa", torch.device("cuda")) is sdpa_kernel
    assert choose_kernel("eager", CPU) is None
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401  # pyright: ignore
    except ImportError:
        with pytest.raises(ValueError, match=r"flash-attn is not installed; use auto"):
            choose_kernel("flash_attention_2", CPU)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch for CPUs alone")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_kernel_of_a_gpu_is_called_as_this_torch_takes_it(kv_heads, window):
    """On tensors without memory, which need no GPU: nothing is computed, arguments are checked."""
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(20, heads, 64, dtype=torch.bfloat16, device=device)
            for heads in (4, kv_heads, kv_heads)
        )
        documents = Documents((8, 12), torch.empty(3, dtype=torch.int32), varlen_kernel)
        options: dict[str, Any] = {"scale": 0.125, "window": window, "softcap": None}
        got = varlen_kernel(q, k, v, documents, **options)
        assert got.shape == q.shape and got.dtype == q.dtype
        got = varlen_kernel(q, k, v, documents, **options, sinks=torch.empty_like(q[0, :, 0]))
        assert got.shape == q.shape and got.dtype == q.dtype
        pair = varlen_pair(documents, scale=0.125, window=window, gqa=kv_heads != 4)
        grads = pair.backward(got, q, k, v, *pair.forward(q, k, v))
        assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (q, k, v)]
        assert product(q[:, 0], q[:, 0].t()).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "value_dim", "window", "softcap", "dtype"),
    [
        (64, 64, None, None, torch.bfloat16),
        (64, 64, 4, None, torch.bfloat16),
        (128, 128, 1000, None, torch.float16),
        (256, 256, None, None, torch.bfloat16),
        # what the kernel of varlen cannot take: each document alone
        (20, 20, None, None, torch.bfloat16),
        (64, 32, None, None, torch.bfloat16),
        (64, 64, None, 2.0, torch.bfloat16),
        (64, 64, 4, 2.0, torch.float32),
        (320, 320, None, None, torch.bfloat16),
        (64, 64, None, None, torch.float32),
    ],
)
def test_packed_attention_on_a_gpu_equals_a_dense_softmax(dim, value_dim, window, softcap, dtype):
    lengths, device = [5, 1, 300, 17], torch.device("cuda", 0)
    documents = make_documents(bounds(lengths), device, varlen_kernel)
    inputs = random_qkv(sum(lengths), dim=dim, value_dim=value_dim)
    rounded = [t.detach().to(dtype) for t in inputs]
    q, k, v = (t.to(device).requires_grad_() for t in rounded)
    exact = [t.double().requires_grad_() for t in rounded]
    scale = dim**-0.5
    got = varlen_kernel(q, k, v, documents, scale=scale, window=window, softcap=softcap)
    want = dense(exact[0], exact[1], exact[2], lengths, scale, window, softcap)
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad(got, (q, k, v), up.to(device, dtype))
    want_grads = torch.autograd.grad(want, exact, up)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        assert a.dtype == dtype
        assert (a.double().cpu() - b).norm() <= limit * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
def test_sinks_on_a_gpu_equal_one_more_key_in_a_dense_softmax(window):
    lengths, device = [5, 1, 300, 17], torch.device("cuda", 0)
    documents = make_documents(bounds(lengths), device, varlen_kernel)
    values = [*random_qkv(sum(lengths), dim=64, value_dim=64), torch.tensor([0.5, -1.0, 2.0, 0.0])]
    rounded = [t.detach().to(torch.bfloat16) for t in values]
    q, k, v, sinks = (t.to(device).requires_grad_() for t in rounded)
    exact = [t.double().requires_grad_() for t in rounded]
    got = varlen_kernel(q, k, v, documents, scale=0.125, window=window, softcap=None, sinks=sinks)
    want = dense(exact[0], exact[1], exact[2], lengths, 0.125, window, None, exact[3])
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad(got, (q, k, v, sinks), up.to(device, torch.bfloat16))
    for a, b in zip((got, *grads), (want, *torch.autograd.grad(want, exact, up)), strict=True):
        assert (a.double().cpu() - b).norm() <= 3e-2 * b.norm()


@pytest.mark.gpu
def test_a_row_of_one_token_has_gradients_on_a_gpu():
    device = torch.device("cuda", 0)
    inputs = random_qkv(1, dim=64, value_dim=64)
    q, k, v = (t.detach().to(device, torch.bfloat16).requires_grad_() for t in inputs)
    documents = make_documents(bounds([1]), device, varlen_kernel)
    output = varlen_kernel(q, k, v, documents, scale=0.125, window=None, softcap=None)
    output.sum().backward()
    assert torch.equal(output, v.repeat_interleave(2, 1))
    assert v.grad is not None and torch.equal(v.grad, torch.full_like(v, 2.0))
