"""What is done to every layer of a model before training: recomputation in the backward pass, and compilation."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshtron.errors import RecipeError

_PRODUCTS = ("aten.mm", "aten.addmm", "aten._scaled_mm")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "meshtron.flash_attention_4",
    "flash_attn._flash_attn_forward",
)
# Operators whose results are kept. Attention's takes the longest to make again for its size. FlexAttention is no
# operator of this kind: it is computed again.
_KEPT = {"full": _ATTENTION, "selective": _PRODUCTS + _ATTENTION}


def prepare_layers(
    layers: Iterable[nn.Module],
    recompute: str,
    *,
    num_recomputed: int | None = None,
    compiled: bool,
    tensor_parallel: bool,
) -> None:
    """Recompute and compile layers as [training] says, in the order in which torch can do both.

    Args:
        layers: modules to change in place; their parameters keep their names.
        recompute: as ``recompute_layers``' mode.
        num_recomputed: how many of the layers, from the first; None is all.
        compiled: whether ``compile_layers``.
        tensor_parallel: whether the layers hold DTensors.
    """
    layers = list(layers)
    recompute_layers(layers[:num_recomputed], recompute)
    if compiled:
        compile_layers(layers, tensor_parallel=tensor_parallel)


def recompute_layers(layers: Iterable[nn.Module], mode: str) -> None:
    """Trade memory for time: keep less of each layer's forward pass and compute it again in the backward pass.

    Args:
        layers: modules to change in place; their parameters keep their names. ``recomputed_parts`` of one, names
            of methods that its forward pass is made of, are what ``"full"`` computes again one at a time (by
            default the forward pass).
        mode: ``"full"`` keeps a part's input and what attention gave (a fifth more arithmetic; Li et al., 2023,
            "DistFlashAttn", keep attention's result too), ``"selective"`` a layer's input and the results of matrix
            products and attention, so that only element-wise work is done twice (Korthikanti et al., 2022),
            ``"none"`` changes nothing.
    """
    if mode == "none":
        return

    def kept() -> Any:
        return create_selective_checkpoint_contexts(functools.partial(_policy, _KEPT[mode]))

    def recomputed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def part(*inputs: Any) -> Any:
                return inner(self, *inputs, **kwargs)

            return checkpoint(part, *args, use_reentrant=False, context_fn=kept)  # dropout drops the same both times

        return run

    for layer in layers:
        parts = getattr(layer, "recomputed_parts", ("forward",)) if mode == "full" else ("forward",)
        for method in parts:
            _override(layer, method, f"Recomputed{mode.title()}", recomputed)


_subclasses: dict[tuple[type[nn.Module], str, str], type[nn.Module]] = {}


def _override(
    layer: nn.Module, method: str, prefix: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Give a layer another ``method``, made from its class's own.

    One subclass serves all layers of a class: torch.compile then compiles their code once, not once a layer.
    """
    kind = type(layer)
    if (kind, method, prefix) not in _subclasses:
        members = {method: change(getattr(kind, method))}
        _subclasses[kind, method, prefix] = type(prefix + kind.__name__, (kind,), members)
    layer.__class__ = _subclasses[kind, method, prefix]


def _policy(kept: tuple[str, ...], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().replace("::", ".") if hasattr(operator, "name") else ""
    keep = any(name == one or name.startswith(f"{one}.") for one in kept)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Iterable[nn.Module], *, tensor_parallel: bool) -> None:
    """Compile each layer in place at its next call, for static shapes; alike layers share the compiled code.

    Args:
        layers: modules to compile.
        tensor_parallel: whether they hold DTensors. AOTAutograd's cache on disk is then left out, for the rest of
            this process: it has handed out backward passes of other runs, with wrong gradients (torch 2.13). And
            layers are given copies of their inputs: of one that comes straight out of another planned module's hook
            (the embedding's) no backward pass is compiled ("no attribute '_local_tensor'", torch 2.11 to 2.13).
    """
    from torch._dynamo import config  # takes seconds to import

    layers = list(layers)
    # torch gives up on a function after 8 versions and runs it uncompiled. Layers that differ in a number need one
    # each, and all have several: for other lengths of the sequence, and for validation.
    config.recompile_limit = max(config.recompile_limit, 8 * len(layers))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * len(layers))
    for layer in layers:
        layer.compile(dynamic=False)
    if tensor_parallel:
        torch._functorch.config.enable_autograd_cache = False
        for layer in layers:
            _override(layer, "__call__", "Copying", _copying_inputs)


def _copying_inputs(inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (args, kwargs))
        return inner(self, *args, **kwargs)

    return run


def convert_to_float8(layers: nn.Module, scaling: str) -> None:
    """Run the matrix products of layers in float8, through torchao.

    Args:
        layers: module whose ``nn.Linear`` modules are replaced in place; embedding and head are none of them.
        scaling: ``"tensorwise"`` or ``"rowwise"``: how many elements share a scale.

    Raises:
        RecipeError: torchao is not installed, or the device has no float8 matrix products.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise RecipeError(f"training.float8 = {scaling!r} needs a GPU with float8 products (H100 or newer)")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise RecipeError(
            f'training.float8 = {scaling!r} needs the torchao package: pip install "meshtron[float8]"'
        ) from None
    convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(scaling))
