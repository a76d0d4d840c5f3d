"""Triton kernels and attention backends against float64 on the same device."""

import pytest
import torch
from torch.nn import functional as F

from meshtron.head_loss import linear_cross_entropy
from meshtron.kernels import reference
from meshtron.kernels.adamw import FusedAdamW, add_into, sum_of_squares
from meshtron.models.attention import attention_backend, causal_attention

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("vocabulary", [128_256, 5_003])
def test_cross_entropy_rows_equal_plain_torch_whole_and_in_two_shards(dtype, tolerance, vocabulary):
    from meshtron.kernels import cross_entropy

    logits = (4 * torch.randn(33, vocabulary, device="cuda")).to(dtype)
    labels = torch.randint(0, vocabulary, (33,), device="cuda")
    labels[3] = -100
    scale = torch.tensor(0.25, device="cuda")
    expected, statistics = logits.double(), torch.empty(3, 33, dtype=torch.float64, device="cuda")
    reference.cross_entropy_in_place(expected, labels, statistics, scale.double())

    found, own = logits.clone(), torch.full((3, 33), torch.nan, device="cuda")
    cross_entropy.cross_entropy_in_place(found, labels, own, scale)
    assert relative(found, expected) < tolerance
    assert relative(own[0] + own[1].log() - own[2], statistics[0] + statistics[1].log() - statistics[2]) < 1e-6

    cut = vocabulary // 3
    shards = [(logits[:, :cut].clone(), 0), (logits[:, cut:].clone(), cut)]
    parts = [torch.full((3, 33), torch.nan, device="cuda") for _ in shards]
    for (shard, first), part in zip(shards, parts, strict=True):
        cross_entropy.row_statistics(shard, labels, part, first)
    largest = torch.maximum(parts[0][0], parts[1][0])
    sums = sum(part[1] * (part[0] - largest).exp() for part in parts)
    whole = torch.stack([largest, sums, parts[0][2] + parts[1][2]])
    for shard, first in shards:
        cross_entropy.logits_to_gradient(shard, labels, whole, scale, first)
    assert relative(torch.cat([shard for shard, _ in shards], dim=1), expected) < tolerance


def test_head_loss_equals_plain_cross_entropy_and_never_holds_all_logits():
    tokens, hidden_size, vocabulary = 8192, 256, 128_256
    hidden = torch.randn(tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(vocabulary, hidden_size, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, torch.tensor(tokens), chunk_tokens=1024)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 2 / 3
    exact, exact_weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected = F.cross_entropy(exact @ exact_weight.t(), labels)
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-4
    assert relative(hidden.grad, exact.grad) < 1e-2
    assert relative(weight.grad, exact_weight.grad) < 1e-2


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_equals_torch_in_float64(grad_dtype):
    sizes = [(1000, 77), (5,), (300, 1024), (1,)]
    ours = [torch.randn(size, device="cuda").requires_grad_() for size in sizes]
    exact = [p.detach().double().requires_grad_() for p in ours]
    fused, plain = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(exact, **OPTIONS)
    copies = {p: torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in ours}
    fused.write_copies(copies)
    for p in ours:
        p.grad_dtype = None
    for _ in range(4):
        for mine, other in zip(ours, exact, strict=True):
            mine.grad = torch.randn_like(mine).to(grad_dtype)
            other.grad = mine.grad.double() * 0.5
        fused.gradient_factor = torch.tensor(0.5, device="cuda")
        fused.step()
        plain.step()
    for mine, other in zip(ours, exact, strict=True):
        assert relative(mine.detach(), other.detach()) < 1e-6
        assert torch.equal(copies[mine], mine.bfloat16())
    kept = [p.detach().clone() for p in ours]
    fused.only_if = torch.tensor(False, device="cuda")
    fused.step()
    assert all(torch.equal(p, before) for p, before in zip(ours, kept, strict=True))
    fused.make_state()
    assert {int(fused.state[p]["step"]) for p in ours} == {4}


def test_fused_adamw_with_bf16_moments_follows_torch_on_rounded_state():
    ours = torch.randn(300, 1025, device="cuda").requires_grad_()
    theirs = ours.detach().cpu().requires_grad_()
    on_gpu = FusedAdamW([ours], moment_dtype=torch.bfloat16, **OPTIONS)
    on_cpu = FusedAdamW([theirs], moment_dtype=torch.bfloat16, **OPTIONS)
    for _ in range(4):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.cpu()
        on_gpu.step()
        on_cpu.step()
    assert on_gpu.state[ours]["exp_avg_sq"].dtype == torch.bfloat16
    assert relative(ours.detach().cpu(), theirs.detach()) < 1e-4


def test_gradients_are_added_to_wider_rows_as_torch_does():
    buffer = torch.randn(3, 5000, device="cuda")
    total, added = buffer[:, 100:4133], torch.randn(3, 4033, device="cuda").bfloat16()
    before, expected = buffer.clone(), total + added
    add_into(total, added)
    assert torch.equal(total, expected)
    assert torch.equal(buffer[:, :100], before[:, :100])
    assert torch.equal(buffer[:, 4133:], before[:, 4133:])


def test_sum_of_squares_of_mixed_dtypes():
    tensors = [torch.randn(100_001, device="cuda"), torch.randn(77, 333, device="cuda").bfloat16()]
    expected = sum(tensor.double().square().sum() for tensor in tensors)
    torch.testing.assert_close(sum_of_squares(tensors), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", ["auto", "sdpa", "flash_attn", "flex"])
def test_attention_backends_agree_with_float64(name, window, head_dim):
    from importlib.util import find_spec

    if name == "flash_attn" and find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    q, k, v = (
        torch.randn(2, 512, heads, head_dim, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
        for heads in (8, 2, 2)
    )
    grad = torch.randn_like(q)
    out = attention_backend(name)(q, k, v, window=window)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = causal_attention(*exact, window=window)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    for found, reference_value in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert relative(found, reference_value) < 1e-2
