"""The loop that turns prompts into tokens: one pass over the prompts, then one token a row and pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshtron.errors import DataError
from meshtron.generate.cache import CacheStep, cached
from meshtron.generate.sampling import Sampling, choose
from meshtron.parallel.pipeline import forward_stages
from meshtron.parallel.placement import shard_range
from meshtron.parallel.schedules import stage_indices

Finished = Callable[[int, list[int]], bool]
"""``(row, new tokens) -> whether the row ends here``; called on every rank, so it must depend on nothing else."""


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A model spread over the ranks of a mesh for forward passes, without sequence parallelism."""

    stages: Sequence[nn.Module]
    """This rank's stages, in model order."""
    pp_mesh: DeviceMesh | None = None
    """Ranks that the stages are spread over; None for one process."""
    tp_mesh: DeviceMesh | None = None
    """Ranks that share each layer; None for one process."""
    vocab_size: int
    """Rows of the whole embedding."""
    hidden_size: int
    """Width of what passes from stage to stage."""
    max_length: int
    """Most tokens of a sequence."""
    schedule: str = "1F1B"
    """The schedule by which the stages were dealt to ranks."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.stages[0].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations."""
        return next(self.stages[0].parameters()).dtype

    def last_logits(self, inputs: Tensor, positions: Tensor, step: CacheStep | None, last: Tensor) -> Tensor | None:
        """Logits of one token a row, (batch, vocabulary), on the ranks of the last stage; None on others."""
        arguments = {"positions": positions, "mask": step, "last": last}
        if self.pp_mesh is None:
            return self.stages[0](inputs, **arguments)[:, 0]
        hidden = torch.empty(*inputs.shape, self.hidden_size, dtype=self.dtype, device="meta")
        logits = forward_stages(self.stages, self.pp_mesh, self.schedule, inputs, hidden, **arguments)
        return None if logits is None else self._gather_vocabulary(logits[:, 0])

    def _gather_vocabulary(self, logits: Tensor) -> Tensor:
        """Whole rows from this tp rank's columns, which may be fewer on the last ranks."""
        tp = self.tp_mesh
        if tp is None or tp.size() == 1:
            return logits
        sizes = [len(shard_range(self.vocab_size, tp.size(), rank)) for rank in range(tp.size())]
        padded = logits.new_zeros(len(logits), sizes[0])
        padded[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=tp.get_group())
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def agree(self, tokens: Tensor | None, batch: int) -> Tensor:
        """The tokens that the first tp rank of the last stage chose, on every rank."""
        if tokens is None:
            tokens = torch.empty(batch, dtype=torch.int64, device=self.device)
        tp, pp = self.tp_mesh, self.pp_mesh
        if tp is not None and tp.size() > 1:
            dist.broadcast(tokens, group=tp.get_group(), group_src=0)
        if pp is not None and pp.size() > 1:
            dist.broadcast(tokens, group=pp.get_group(), group_src=self._last_stage_rank(pp.size()))
        return tokens

    def _last_stage_rank(self, pp: int) -> int:
        last = pp * len(self.stages) - 1
        return next(rank for rank in range(pp) if last in stage_indices(self.schedule, pp, rank, len(self.stages)))


@torch.no_grad()
def generate(
    model: PlacedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    finished: Finished = lambda row, tokens: False,
    rows: Sequence[int] | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continue a batch of prompts, which may differ in length.

    A row ends when ``finished`` says so, after ``max_new_tokens``, or when its sequence no longer fits the model.

    Args:
        model: placed on this and other ranks, all of which call this with the same arguments.
        prompts: token ids, at least one each.
        max_new_tokens: most tokens added to a prompt.
        sampling: how tokens are chosen; by default greedily.
        finished: asked after each token of a row.
        rows: numbers that tell the prompts' draws apart; by default 0, 1, ...
        use_cache: whether keys and values are kept; without, every pass computes all tokens again.

    Returns:
        The new tokens of each prompt, the one that ended the row included.

    Raises:
        DataError: a prompt has no token, one outside the vocabulary, or more than the model's length.
    """
    sampling = sampling or Sampling()
    check_prompts(prompts, model.vocab_size, model.max_length)
    if max_new_tokens < 1 or not prompts:
        return [[] for _ in prompts]
    rows = range(len(prompts)) if rows is None else rows
    # A sequence may be one longer than the model's length: its last token is never read.
    limits = [min(max_new_tokens, model.max_length + 1 - len(prompt)) for prompt in prompts]
    room = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) - 1
    sequences = [list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    ended = [False] * len(prompts)
    inputs, step = _first_pass(model, prompts)
    last = lengths - 1
    with cached(model.stages, room) if use_cache else nullcontext():
        while True:
            logits = model.last_logits(inputs, step.positions, step if use_cache else None, last)
            chosen = None
            if logits is not None:
                chosen = choose(logits, sampling, rows, [len(sequence) for sequence in sequences])
            chosen = model.agree(chosen, len(prompts))
            for row, token in enumerate(chosen.tolist()):
                if not ended[row]:
                    sequences[row].append(token)
                    new = sequences[row][len(prompts[row]) :]
                    ended[row] = finished(row, new) or len(new) == limits[row]
            if all(ended):
                break
            if use_cache:
                inputs, step = chosen[:, None], _next_step(step, last, room)
                last = torch.zeros_like(last)
            else:
                inputs, step = _first_pass(model, sequences)
                last = torch.tensor([len(sequence) for sequence in sequences], device=model.device) - 1
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, max_length: int) -> None:
    """Raise DataError for a prompt that has no token, one outside the vocabulary, or more than ``max_length``."""
    for number, prompt in enumerate(prompts):
        where = f"prompt {number + 1} of {len(prompts)}"
        if not prompt:
            raise DataError(f"{where} has no tokens: give it some text, since the tokenizer adds none at the start")
        if len(prompt) > max_length:
            raise DataError(
                f"{where} has {len(prompt)} tokens, but the model takes at most {max_length} "
                "(max_position_embeddings): shorten it"
            )
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise DataError(
                f"{where} has token {max(prompt)}, but the model's vocabulary has {vocab_size}: "
                "the tokenizer belongs to another model"
            )


def _first_pass(model: PlacedModel, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, CacheStep]:
    """Token ids padded on the right, (batch, longest), and where they stand."""
    longest = max(len(sequence) for sequence in sequences)
    padded = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    inputs = torch.tensor(padded, device=model.device)
    positions = torch.arange(longest, device=model.device).expand(len(padded), -1)
    ragged = any(len(sequence) != longest for sequence in sequences)
    return inputs, CacheStep(positions=positions, end=longest, ragged=ragged)


def _next_step(step: CacheStep, last: Tensor, room: int) -> CacheStep:
    """One token further; rows that have ended go on, so that rows of one length stay together."""
    positions = step.positions.gather(1, last[:, None]) + 1
    return CacheStep(positions=positions.clamp(max=room - 1), end=min(step.end + 1, room), ragged=step.ragged)
