"""Cross-entropy over a sharded vocabulary against torch's on the whole one."""

import pytest
import torch
from torch.nn import functional as F

from meshtron.loss import IGNORE, CausalLMLoss
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.placement import shard_range
from meshtron.testing import run_ranks


def logits_and_labels(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(2, 6, vocab_size, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocab_size, (2, 6), generator=generator)
    labels[0, 3:] = IGNORE
    labels[1, 0], labels[1, 1] = 0, vocab_size - 1
    return logits, labels


def sharded_loss(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss on this rank's columns, and its gradient there."""
    mesh = build_mesh(Layout(tp=torch.distributed.get_world_size()), "cpu")
    logits, labels = logits_and_labels(vocab_size, dtype)
    columns = shard_range(vocab_size, mesh["tp"].size(), mesh.get_local_rank("tp"))
    shard = logits[..., columns.start : columns.stop].clone().requires_grad_()
    loss_fn = CausalLMLoss(vocab_size, mesh["tp"])
    loss_fn.denominator = (labels != IGNORE).sum()
    loss = loss_fn(shard, labels)
    loss.backward()
    return loss.detach(), shard.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-3)], ids=str)
@pytest.mark.parametrize("vocab_size", [16, 101])
def test_sharded_vocabulary_equals_torch(tp, dtype, tolerance, vocab_size):
    logits, labels = logits_and_labels(vocab_size, dtype)
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    expected.backward()
    ranks = run_ranks(sharded_loss, tp, vocab_size, dtype)
    for loss, _ in ranks:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    gradient = torch.cat([grad for _, grad in ranks], dim=-1)
    torch.testing.assert_close(gradient.double(), whole.grad, rtol=0, atol=tolerance)


def test_every_negative_label_has_no_loss():
    logits, labels = logits_and_labels(16, torch.float64)
    expected = CausalLMLoss(16)(logits, labels)
    others = labels.where(labels >= 0, torch.tensor(-1))
    assert (others == -1).any()
    assert CausalLMLoss(16)(logits, others) == expected
    for loss in run_ranks(sharded_loss_of, 2, others):
        torch.testing.assert_close(loss, expected)


def sharded_loss_of(labels: torch.Tensor) -> torch.Tensor:
    mesh = build_mesh(Layout(tp=2), "cpu")
    logits, _ = logits_and_labels(16, torch.float64)
    return CausalLMLoss(16, mesh["tp"])(logits.chunk(2, dim=-1)[mesh.get_local_rank("tp")], labels)
