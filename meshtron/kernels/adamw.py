"""AdamW on float32 masters that reads gradients as they are and writes low-precision weights in the same pass."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshtron.errors import MeshtronError
from meshtron.hostcopy import HostCopy


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with the steps around it folded in, in a few launches for all parameters.

    An update reads gradient, master and two moments once, and writes the last three and the low-precision weight:
    28 bytes a weight with bf16 gradients, which is all that it costs on a device with float32 masters. Where there
    is no CUDA device, torch's own AdamW does the same in several passes.

    Moments can be kept in bf16 (``moment_dtype``), 4 bytes a weight less to hold and 8 less to move. They are rounded
    to nearest after each update, so a second moment whose decay is closer to 1 than 0.998 may stop shrinking.

    ``amsgrad`` and ``maximize`` are not implemented.

    Gradients may be of lower precision than their parameter (set ``parameter.grad_dtype = None`` to allow it).
    State has torch's names; ``step`` is a CPU tensor, so nothing waits for the device.
    """

    gradient_factor: Tensor | None = None
    """Scalar on the device that the next ``step`` multiplies gradients by (the clip coefficient), or None."""

    only_if: Tensor | None = None
    """Boolean scalar on the device: where it is false the next ``step`` changes nothing. On a CUDA device nothing
    waits for it to be known. None always updates."""

    def __init__(self, params: Any, *, moment_dtype: torch.dtype | None = None, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self.moment_dtype = moment_dtype
        """Of both moments; None is that of their parameter."""
        self.copies: dict[Tensor, Tensor] = {}
        self._undecided: HostCopy | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does.

        Raises:
            MeshtronError: it asks for something that is not implemented.
        """
        for option in ("amsgrad", "maximize"):
            if param_group.get(option, self.defaults[option]):
                raise MeshtronError(f"FusedAdamW has no {option}: leave it out, or use torch.optim.AdamW")
        super().add_param_group(param_group)

    def write_copies(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Have each update written to these tensors too: parameter -> tensor of its size in another dtype."""
        self.copies = dict(copies)

    def make_state(self) -> None:
        """Give every parameter that has no state yet zero moments and a step count of 0.

        The counts of others are right from here on, also after a step that ``only_if`` kept from changing anything.
        """
        self._settle()
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter, dtype=self.moment_dtype),
                        "exp_avg_sq": torch.zeros_like(parameter, dtype=self.moment_dtype),
                    }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        self.make_state()
        decision = HostCopy(self.only_if) if self.only_if is not None else None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held and all(_takes_one_pass(parameter) for parameter in held):
                self._step_in_one_pass(group, held)
                self._undecided = decision
            elif held and (decision is None or decision.item()):
                self._step_in_several(group, held)
        self.gradient_factor = self.only_if = None
        return loss

    def _settle(self) -> None:
        """Take back the count of the last step if the device found that it was to change nothing."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and not undecided.item():
            counts = [state["step"] for parameter, state in self.state.items() if _takes_one_pass(parameter)]
            torch._foreach_sub_(counts, 1)

    def _step_in_several(self, group: dict[str, Any], held: Sequence[Tensor]) -> None:
        for parameter in held:
            parameter.grad = parameter.grad.to(parameter.dtype)  # type: ignore[union-attr]
        if self.gradient_factor is not None:
            grads = [parameter.grad for parameter in held]
            torch._foreach_mul_(grads, self.gradient_factor.to(held[0].dtype))  # type: ignore[arg-type]
        groups, self.param_groups = self.param_groups, [group]
        try:
            with self._wide_moments(held):
                super().step()
        finally:
            self.param_groups = groups
        written = [parameter for parameter in held if parameter in self.copies]
        if written:
            torch._foreach_copy_([self.copies[parameter] for parameter in written], written)

    @contextmanager
    def _wide_moments(self, held: Sequence[Tensor]) -> Iterator[None]:
        """Moments in their parameter's precision, for torch's AdamW; narrowed again afterwards."""
        if self.moment_dtype is None:
            yield
            return
        states = [self.state[parameter] for parameter in held]
        narrow = [(state, key, state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        for state, parameter in zip(states, held, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(parameter.dtype)
        try:
            yield
        finally:
            for state, key, kept in narrow:
                state[key] = kept.copy_(state[key])

    def _step_in_one_pass(self, group: dict[str, Any], held: Sequence[Tensor]) -> None:
        from meshtron.kernels import multi_tensor

        torch._foreach_add_([self.state[parameter]["step"] for parameter in held], 1)
        device = held[0].device
        factor = self.gradient_factor
        if factor is None:
            factor = torch.ones((), device=device)
        if self.only_if is not None:
            factor = torch.where(self.only_if, factor, torch.nan)
        alike = defaultdict(list)
        for parameter in held:
            copy = self.copies.get(parameter)
            kinds = (parameter.grad.dtype, copy.dtype if copy is not None else None)  # type: ignore[union-attr]
            alike[(*kinds, int(self.state[parameter]["step"]))].append(parameter)
        for (_, copied, step), parameters in alike.items():
            states = [self.state[parameter] for parameter in parameters]
            columns = [
                [parameter.grad for parameter in parameters],
                parameters,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
            ]
            if copied is not None:
                columns.append([self.copies[parameter] for parameter in parameters])
            multi_tensor.adamw(
                columns,  # type: ignore[arg-type]
                factor.to(torch.float32),
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
            )


def _takes_one_pass(parameter: Tensor) -> bool:
    return parameter.is_cuda and parameter.dtype == torch.float32


def add_into(total: Tensor, added: Tensor) -> None:
    """``total += added``, of the same two-dimensional shape; ``added`` may be of lower precision."""
    narrow = added.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32
    if total.is_cuda and narrow and added.is_contiguous() and total.stride(1) == 1:
        from meshtron.kernels.narrow_add import narrow_add

        narrow_add(total, added)
    else:
        total.add_(added)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements as a float64 scalar on the tensors' device, in one pass for each dtype.

    Raises:
        ValueError: there are no tensors.
    """
    if not tensors:
        raise ValueError("sum_of_squares of nothing: the device is unknown")
    device = tensors[0].device
    if device.type != "cuda" or any(tensor.dtype == torch.float64 for tensor in tensors):
        # Row by row: over a matrix of 4 million elements torch's float32 norm is off by 1e-4 on a CPU, so the norm,
        # and with it clipping, would depend on how the matrix is divided over ranks.
        rows = [
            torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32))
            for tensor in tensors
        ]
        return torch.stack([norms.double().square().sum() for norms in rows]).sum()
    from meshtron.kernels import multi_tensor

    alike = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype].append(tensor)
    sums = [multi_tensor.sum_of_squares(same) for same in alike.values()]
    return torch.stack(sums).sum()
