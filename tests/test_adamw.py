"""FusedAdamW where no CUDA device is, and what ZeRO hands it: torch's AdamW, bit by bit."""

import pytest
import torch
from torch import nn

from meshtron.errors import MeshtronError
from meshtron.kernels.adamw import FusedAdamW, sum_of_squares
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.testing import run_ranks

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_clip_coefficient_narrow_gradients_and_copies_are_folded_in():
    torch.manual_seed(0)
    ours = [torch.randn(7, 5).requires_grad_(), torch.randn(3).requires_grad_()]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    fused, plain = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in ours}
    fused.write_copies(copies)
    for p in ours:
        p.grad_dtype = None
    for _ in range(3):
        for mine, reference in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine).bfloat16()
            reference.grad = mine.grad.float() * 0.5
        fused.gradient_factor = torch.tensor(0.5)
        fused.step()
        plain.step()
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference)
        assert torch.equal(copies[mine], reference.bfloat16())
        for name, value in plain.state[reference].items():
            assert torch.equal(fused.state[mine][name], value), name
    kept = [mine.detach().clone() for mine in ours]
    fused.only_if = torch.tensor(False)
    fused.step()
    assert all(torch.equal(mine, before) for mine, before in zip(ours, kept, strict=True))
    assert fused.state[ours[0]]["step"] == 3


def test_bf16_moments_are_rounded_after_each_update_in_float32():
    torch.manual_seed(0)
    weight = torch.randn(7, 5).requires_grad_()
    master, average, square = weight.detach().clone(), torch.zeros(7, 5), torch.zeros(7, 5)
    fused = FusedAdamW([weight], moment_dtype=torch.bfloat16, **OPTIONS)
    for step in range(1, 4):
        grad = weight.grad = torch.randn(7, 5)
        fused.step()
        average = 0.9 * average + 0.1 * grad
        square = 0.95 * square + 0.05 * grad * grad
        update = average / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        master = master - 1e-2 * (0.1 * master + update)
        average, square = average.bfloat16().float(), square.bfloat16().float()
        torch.testing.assert_close(weight.detach(), master, rtol=0, atol=2e-5)
    state = fused.state[weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(state["exp_avg"].float(), average, rtol=1e-2, atol=1e-4)


def test_sum_of_squares_counts_every_element_in_wide_precision():
    torch.manual_seed(0)
    tensors = [torch.randn(1000).bfloat16(), torch.randn(3, 5), torch.full((100_000,), 0.01).bfloat16()]
    expected = sum(tensor.double().square().sum() for tensor in tensors)
    torch.testing.assert_close(sum_of_squares(tensors), expected, rtol=1e-5, atol=0)


def test_sum_of_squares_of_a_large_matrix_is_that_of_its_parts():
    matrix = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    expected = matrix.double().square().sum()
    for tensors in ([matrix], list(matrix.chunk(8)), [matrix[0, 0], matrix[0, 1:], matrix[1:]]):
        torch.testing.assert_close(sum_of_squares(tensors), expected, rtol=1e-8, atol=0)


class Tied(nn.Module):
    """A weight used twice, one used once, one not at all, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.once, self.unused = (nn.Parameter(torch.randn(6, 4).bfloat16()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.twice.t()) @ self.twice @ self.once.t()).square().mean()


def train(num_microbatches: int, optimizer_class: type) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = build_mesh(Layout(), "cpu")
    model = Tied()
    optimizer = ZeroOptimizer([model], mesh, optimizer=optimizer_class, num_microbatches=num_microbatches, **OPTIONS)
    norms = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for _ in range(num_microbatches):
            model(torch.randn(8, 4, generator=generator).bfloat16()).backward()
        norms.append(optimizer.clip_grad_norm(0.5).item())
        optimizer.step(only_if=torch.tensor(step != 2))
    state = optimizer.state_dict()
    weights = {name: tensor.detach().clone() for name, tensor in optimizer.masters().items()}
    weights |= {f"bf16 {name}": p.detach().clone() for name, p in model.named_parameters()}
    return norms, weights | {name: tensor.clone() for name, tensor in state.items()}


def both(num_microbatches: int):
    return train(num_microbatches, FusedAdamW), train(num_microbatches, torch.optim.AdamW)


def test_zero_gives_the_same_with_and_without_an_accumulator():
    for num_microbatches in (1, 3):
        ((norms, ours), (expected_norms, expected)) = run_ranks(both, 1, num_microbatches)[0]
        torch.testing.assert_close(norms, expected_norms, rtol=1e-6, atol=0)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
        assert ours["step.once"] == 3  # of four steps one was told to be skipped


def memory_free_of_accumulators():
    model = Tied()
    optimizer = ZeroOptimizer(
        [model], build_mesh(Layout(), "cpu"), optimizer=FusedAdamW, num_microbatches=1, **OPTIONS
    )
    model(torch.ones(8, 4).bfloat16()).backward()
    optimizer.reduce_gradients()
    gradients = [group_parameter.grad for group in optimizer.param_groups for group_parameter in group["params"]]
    return [bucket.accumulator is None for bucket in optimizer._buckets], [g.dtype for g in gradients]


def test_one_backward_pass_on_one_dp_rank_keeps_bf16_gradients_and_no_accumulator():
    without, dtypes = run_ranks(memory_free_of_accumulators, 1)[0]
    assert all(without)
    assert dtypes[:2] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_is_not_implemented_is_refused(option):
    with pytest.raises(MeshtronError, match=f"FusedAdamW has no {option}"):
        FusedAdamW([torch.zeros(2).requires_grad_()], **{option: True})
    with pytest.raises(MeshtronError, match=f"FusedAdamW has no {option}"):
        FusedAdamW([{"params": [torch.zeros(2).requires_grad_()], option: True}])


def clipped(num_microbatches: int, optimizer_class: type) -> dict[str, torch.Tensor]:
    optimizer = ZeroOptimizer(
        model := Tied(), build_mesh(Layout(), "cpu"), optimizer=optimizer_class, num_microbatches=num_microbatches
    )
    for _ in range(num_microbatches):
        model(torch.ones(8, 4).bfloat16()).backward()
    optimizer.clip_grad_norm(0.5)
    return {name: gradient.float().clone() for name, gradient in optimizer.gradients().items()}


def clipped_by_both(num_microbatches: int):
    return clipped(num_microbatches, FusedAdamW), clipped(num_microbatches, torch.optim.AdamW)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_after_clipping_are_the_clipped_ones(num_microbatches):
    ours, expected = run_ranks(clipped_by_both, 1, num_microbatches)[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-2, atol=1e-6)
    total = sum(gradient.double().square().sum() for gradient in expected.values()).sqrt()
    assert abs(total - 0.5) < 1e-3
