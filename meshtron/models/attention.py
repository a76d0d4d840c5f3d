"""Attention functions behind one signature; the model is handed one and calls it.

``attention_backend`` maps the recipe's name to a function: torch's own ``scaled_dot_product_attention``, the
flash-attn project's kernels (version 4, ``flash_attn.cute``, or 2), or FlexAttention. What a faster kernel cannot do
(a mask, float32, a CPU) goes to ``scaled_dot_product_attention``, which can do everything.
"""

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from meshtron.errors import RecipeError

log = logging.getLogger(__name__)


class Attend(Protocol):
    """Attention over heads.

    Args:
        q: (batch, query heads, sequence, head_dim).
        k, v: (batch, key-value heads, sequence, head_dim); query heads are a multiple of theirs.
        mask: what the backend needs to restrict causal attention further, or None.
        window: a token attends to itself and the ``window - 1`` before it; None is all of them.

    Returns:
        (batch, query heads, sequence, head_dim).
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor: ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """Attention through torch's ``scaled_dot_product_attention``; ``mask`` is a boolean mask or None (causal)."""
    if window is not None and window < q.shape[2]:
        inside = window_mask(q.shape[2], window, q.device)
        mask = inside if mask is None else mask & inside
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def window_mask(sequence: int, window: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean mask (query, key) of sliding window attention: key in ``query - window + 1 .. query``."""
    positions = torch.arange(sequence, device=device)
    age = positions[:, None] - positions
    return (age >= 0) & (age < window)


def cudnn_first_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """``causal_attention`` with cuDNN's kernel where it can run, else torch's own order."""
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        return causal_attention(q, k, v, mask, window=window)


_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """Causal attention through ``flash_attn.cute``; ``causal_attention`` where it cannot run."""
    if not _fits_flash(q, mask):
        return causal_attention(q, k, v, mask, window=window)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    return torch.ops.meshtron.flash_attention_4(q, k, v, -1 if window is None else window)[0].transpose(1, 2)


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """Causal attention through ``flash_attn`` 2; ``causal_attention`` where it cannot run."""
    if not _fits_flash(q, mask):
        return causal_attention(q, k, v, mask, window=window)
    from flash_attn import flash_attn_func

    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    left = -1 if window is None else window - 1
    return flash_attn_func(q, k, v, causal=True, window_size=(left, 0 if left >= 0 else -1)).transpose(1, 2)


def _fits_flash(q: Tensor, mask: Any) -> bool:
    return mask is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """FlexAttention; ``mask`` is a ``BlockMask`` that holds causality and window too, or None."""
    block_mask = mask if mask is not None else _block_mask(q.shape[2], window, str(q.device))
    # On CPU, and inside somebody's compiled region, the function is used as it is.
    attend: Any = flex_attention if not q.is_cuda or torch.compiler.is_compiling() else _compiled_flex()
    return attend(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _block_mask(length: int, window: int | None, device: str) -> BlockMask:
    reach = length if window is None else window
    return create_block_mask(
        lambda batch, head, query, key: (query >= key) & (query - key < reach), None, None, length, length, device
    )


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def attention_backend(name: str) -> Attend:
    """The attention function of a recipe's ``model.attention``; what was picked is logged.

    ``auto`` is the fastest that is installed: flash-attn 4 on Hopper and later, cuDNN's kernel there without it,
    torch's own choice elsewhere.

    Raises:
        RecipeError: there is no such backend, or ``flash_attn`` was asked for and is not installed.
    """
    if name not in ("auto", "sdpa", "flash_attn", "flex"):
        raise RecipeError(f"model.attention = {name!r}: use one of auto, sdpa, flash_attn, flex")
    attend, what = _pick(name)
    log.info("attention: %s (model.attention = %r)", what, name)
    return attend


def _pick(name: str) -> tuple[Attend, str]:
    capability = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    if name == "flex":
        return flex, "FlexAttention"
    if name in ("auto", "flash_attn") and capability >= 9 and _installed("flash_attn.cute"):
        try:
            _define_flash_attention_4()
        except ImportError as error:
            log.warning("flash-attn 4 is installed but cannot be imported: %s", error)
        else:
            return flash_attention_4, "flash-attn 4"
    if name == "flash_attn":
        if capability >= 8 and _installed("flash_attn.flash_attn_interface"):
            return flash_attention_2, "flash-attn 2"
        raise RecipeError(
            "model.attention = 'flash_attn': needs a CUDA device and the package flash-attn or flash-attn-4; install "
            "one, or use 'auto' or 'sdpa'"
        )
    if capability >= 9:
        return cudnn_first_attention, "scaled_dot_product_attention, cuDNN first"
    return causal_attention, "scaled_dot_product_attention"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _define_flash_attention_4() -> None:
    """Wrap the forward and backward kernels as operators, which torch.compile takes as they are.

    Shapes here are the kernels' own: (batch, sequence, heads, head_dim). ``window`` is -1 for none.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def sides(window: int) -> dict[str, int | None]:
        return {
            "window_size_left": None if window < 0 else window - 1,
            "window_size_right": None if window < 0 else 0,
        }

    @torch.library.custom_op("meshtron::flash_attention_4", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        out, log_sum_exp = _flash_attn_fwd(q, k, v, causal=True, return_lse=True, **sides(window))[:2]
        return out, log_sum_exp

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        batch, sequence, heads, _ = q.shape
        out = q.new_empty(batch, sequence, heads, v.shape[-1])
        return out, q.new_empty((batch, heads, sequence), dtype=torch.float32)

    @torch.library.custom_op("meshtron::flash_attention_4_backward", mutates_args=())
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_bwd(
            q, k, v, out, grad, log_sum_exp, causal=True, deterministic=deterministic, dq=dq, dk=dk, dv=dv,
            **sides(window),
        )  # fmt: skip
        return dq, dk, dv

    @backward.register_fake
    def _(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, window: int
    ) -> tuple[Tensor, ...]:
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.window = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = torch.ops.meshtron.flash_attention_4_backward
        return *operator(grad.contiguous(), *ctx.saved_tensors, ctx.window), None

    forward.register_autograd(differentiate, setup_context=keep)
