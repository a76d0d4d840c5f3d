"""What is done to every layer of a model before training: recomputation in the backward pass, and compilation."""

from collections.abc import Iterable
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshtron.errors import RecipeError

# Results that "selective" keeps: those of matrix products and of attention. All else is cheap to make again.
_KEPT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten._scaled_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "meshtron.flash_attention_4",
    "flash_attn._flash_attn_forward",
)


def recompute_layers(layers: Iterable[nn.Module], mode: str) -> None:
    """Trade memory for time: keep less of each layer's forward pass and compute it again in the backward pass.

    Args:
        layers: modules to change in place; their parameters keep their names.
        mode: ``"full"`` keeps a layer's input only (a third more arithmetic), ``"selective"`` also the results of
            matrix products and attention, so that only element-wise work is done twice (Korthikanti et al., 2022),
            ``"none"`` changes nothing.
    """
    if mode == "none":
        return
    for layer in layers:
        # One subclass for all layers of a class: torch.compile then compiles their code once, not once a layer.
        layer.__class__ = _recomputed(type(layer), mode)


_subclasses: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def _recomputed(kind: type[nn.Module], mode: str) -> type[nn.Module]:
    if (kind, mode) in _subclasses:
        return _subclasses[kind, mode]
    options: dict[str, Any] = {"context_fn": _keep_selected} if mode == "selective" else {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def layer(*inputs: Any) -> Any:
            return kind.forward(self, *inputs, **kwargs)

        return checkpoint(layer, *args, use_reentrant=False, **options)  # dropout drops the same both times

    _subclasses[kind, mode] = type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward})
    return _subclasses[kind, mode]


def _keep_selected() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().replace("::", ".") if hasattr(operator, "name") else ""
    kept = any(name == one or name.startswith(f"{one}.") for one in _KEPT_OPERATORS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Iterable[nn.Module], *, tensor_parallel: bool) -> None:
    """Compile each layer in place at its next call, for static shapes; alike layers share the compiled code.

    Args:
        layers: modules to compile.
        tensor_parallel: whether they hold DTensors. AOTAutograd's cache on disk is then left out, for the rest of
            this process: it has handed out backward passes of other runs, with wrong gradients (torch 2.13).
    """
    if tensor_parallel:
        torch._functorch.config.enable_autograd_cache = False
    for layer in layers:
        layer.compile(dynamic=False)


def parts_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of layers that have parts themselves: attention and feed-forward, without norms.

    Tensor parallelism compiles these: a layer whose input comes out of another planned module's hook does not compile
    as a whole ("no attribute '_local_tensor'" in its backward pass, torch 2.11 to 2.13).
    """
    return [part for layer in layers for part in layer.children() if any(part.children())]


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
