"""Rotary position embedding (Su et al., 2021), with Hugging Face's pairing of dims i and i + head_dim / 2."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched for contexts longer than the original one.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides those whose wavelength is longer than
    ``original / low_freq_factor``, keeps those shorter than ``original / high_freq_factor`` and blends between
    (Llama 3.1).
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each of the ``head_dim / 2`` pairs, float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None or scaling.rope_type == "default":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type != "llama3":
        raise ValueError(f"rope_type {scaling.rope_type!r}: expected default, linear or llama3")
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def rope_table(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``positions`` of shape (sequence,) or (batch, sequence).

    Returns:
        Two float32 tensors of shape (1 or batch, 1, sequence, head_dim), to broadcast over heads: the cosines of both
        halves, and the sines with the first half negated.
    """
    frequencies = inverse_frequencies(head_dim, theta, scaling).to(positions.device, non_blocking=True)
    angles = positions.float()[..., None] * frequencies
    angles = angles[:, None] if positions.dim() == 2 else angles[None, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` of shape (batch, heads, sequence, head_dim); computed in float32 or wider."""
    cos, sin = rope
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
