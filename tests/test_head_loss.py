"""The head folded into the loss: values and gradients of plain cross-entropy, whole, sharded and accumulated."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshtron.head_loss import HeadLoss, linear_cross_entropy
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.placement import shard_range
from meshtron.testing import run_ranks

VOCAB, HIDDEN, BATCH, SEQUENCE = 101, 16, 2, 12  # 101 rows do not divide by 2 or 4


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels[:, ::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden, weight, labels, denominator):
    """Loss and both gradients by torch, in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, -2)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / denominator
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_value_and_gradients_are_those_of_plain_cross_entropy(dtype, tolerance, chunk_tokens):
    hidden, weight, labels = inputs(dtype)
    denominator = torch.tensor(17)
    rows = hidden.flatten(0, 1)
    loss = linear_cross_entropy(rows, weight, labels.flatten(), denominator, chunk_tokens=chunk_tokens)
    (3 * loss).backward()
    expected, grad_hidden, grad_weight = plain(hidden, weight, labels, denominator)
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for found, reference in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        assert (found.double() - 3 * reference).norm() < tolerance * (3 * reference).norm()


def test_weight_gradient_is_added_where_it_is_told_and_a_later_factor_is_refused():
    hidden, weight, labels = inputs()
    total = torch.full((VOCAB, HIDDEN), 7.0, dtype=torch.float64)
    overwrite = [True, False]

    @contextmanager
    def sink():
        yield total, overwrite.pop(0)

    def loss():
        rows = hidden.flatten(0, 1)
        return linear_cross_entropy(
            rows, weight, labels.flatten(), torch.tensor(17), chunk_tokens=5, weight_sink=sink
        )

    loss().backward()
    loss().backward()
    _, grad_hidden, grad_weight = plain(hidden, weight, labels, 17)
    assert weight.grad is None
    torch.testing.assert_close(total, 2 * grad_weight)
    torch.testing.assert_close(hidden.grad, 2 * grad_hidden)
    overwrite.append(True)
    hidden.grad = None
    (2 * loss()).backward()
    assert hidden.grad.isnan().all()


def test_without_gradients_nothing_is_differentiated():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), torch.tensor(17), chunk_tokens=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, labels, 17)[0])


def sharded(sequence_sharded: bool):
    tp = torch.distributed.get_world_size()
    mesh = build_mesh(Layout(tp=tp), "cpu")["tp"]
    rank = mesh.get_local_rank()
    hidden, weight, labels = inputs()
    rows = shard_range(VOCAB, tp, rank)
    mine = slice(rank * SEQUENCE // tp, (rank + 1) * SEQUENCE // tp) if sequence_sharded else slice(None)
    part = hidden.detach()[:, mine].clone().requires_grad_()
    head = nn.Linear(HIDDEN, len(rows), bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight[rows.start : rows.stop])
    loss_fn = HeadLoss(head, mesh, chunk_tokens=5)
    loss_fn.vocab_start = rows.start  # a plain Linear knows only its own rows
    loss_fn.denominator = torch.tensor(17)
    loss = loss_fn(part, labels)
    loss.backward()
    expected, grad_hidden, grad_weight = plain(hidden, weight, labels, 17)
    return max(
        (loss - expected).abs().item(),
        (part.grad - grad_hidden[:, mine]).abs().max().item(),
        (head.weight.grad - grad_weight[rows.start : rows.stop]).abs().max().item(),
    )


@pytest.mark.parametrize("sequence_sharded", [True, False])
def test_a_vocabulary_sharded_unevenly_gives_the_same(sequence_sharded):
    assert max(run_ranks(sharded, 4, sequence_sharded)) < 1e-13
