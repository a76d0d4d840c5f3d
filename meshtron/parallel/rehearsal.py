"""A rehearsal of a tensor parallel plan: the model's forward pass on the meta device at the shapes of one rank.

No ranks and no memory are needed. A copy of the model gets parameters of a shard's shape; hooks give what enters and
leaves planned modules the shapes that the styles would give them. Code that assumes the whole model then fails, or
does something else than in a forward pass of the whole model, and the module is named.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshtron.errors import PlanError
from meshtron.parallel.names import global_name
from meshtron.parallel.origins import Origin, follow, note
from meshtron.parallel.placement import shard_range
from meshtron.parallel.styles import KNOWN, Change, effect_of, sharded_dim

_CUTS = ("chunk", "split", "tensor_split", "split_with_sizes")
_OWN_PARAMETERS = (ColwiseParallel, RowwiseParallel, SequenceParallel)  # these shard them, or sum their gradients
_VIEWS = ("view", "reshape", "unflatten")


def example_ids(model: nn.Module, tp: int) -> list[Tensor]:
    """Token ids for a model that begins with an embedding, longest first; none for others.

    The longest can be cut over tp twice, so that a sequence that is cut once too often shows, but not every model
    takes as many.
    """
    leaves = (module for module in model.modules() if any(True for _ in module.parameters(recurse=False)))
    if not isinstance(next(leaves, None), nn.Embedding):
        return []
    return [torch.zeros(2, length, dtype=torch.int64, device="meta") for length in (2 * tp * tp, 2 * tp)]


def rehearse(
    model: nn.Module, styles: Mapping[str, ParallelStyle], tp: int, example: Any, *, must_run: bool = True
) -> bool:
    """Run ``model`` on ``example`` whole and at the shapes of tp rank 0, and compare.

    Args:
        model: the whole model, on any device; it is not changed.
        styles: exact module name to style.
        tp: ranks.
        example: input of the model: a tensor, or a tuple of arguments; only shapes and types are read.
        must_run: False gives up quietly where the whole model does not run on ``example``.

    Returns:
        Whether the rehearsal took place.

    Raises:
        PlanError: code in a module does not fit one rank's shapes; names the module and says what to do.
    """
    if any(not isinstance(style, KNOWN) for style in styles.values()):
        return False
    arguments = example if isinstance(example, tuple) else (example,)
    inputs = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in arguments]
    try:
        part, expected = _meta_copy(model), _Trace(_meta_copy(model), styles)
        expected.run(inputs)
    except Exception as error:
        if must_run:
            raise PlanError(
                "a copy of the model does not run on the example, on the meta device: "
                f"{type(error).__name__}: {error}"
            ) from error
        return False
    for name, module in part.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and not isinstance(styles.get(name), _OWN_PARAMETERS):
                note(parameter, Origin(source=f"{name}.{attribute}".lstrip("."), sharded=False))
        if name in styles:
            _shard(name, module, styles[name], tp)
    found = _Trace(part, styles)
    try:
        found.run(inputs)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{found.where()} fails at the shapes of one of tp = {tp} ranks: {_first_line(error)}. If its forward "
            "counts all heads or features, let it read them off the shape it is given, as in view(batch, sequence, "
            "-1, head_dim); else the plan lacks a line for a module before it, or has one too many"
        ) from error
    _compare(expected, found, tp)
    return True


def _meta_copy(model: nn.Module) -> nn.Module:
    """The same modules with parameters and buffers of the same shapes on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _shard(path: str, module: nn.Module, style: ParallelStyle, tp: int) -> None:
    """Give ``module`` rank 0's parameters, and hooks that change shapes and note origins as ``style`` does."""
    effect = effect_of(style, module)
    out_features = None
    for name, parameter in list(module._parameters.items()):
        dim = None if parameter is None else sharded_dim(style, module, name)
        if parameter is not None and dim is not None:
            shape = list(parameter.shape)
            if dim == 0 and name == "weight":
                out_features = shape[0]
            shape[dim] = len(shard_range(shape[dim], tp, 0))
            module._parameters[name] = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = _relaid(args, effect.inputs, tp)
        named = {
            key: _local(value, *effect.keywords[key], tp) if key in effect.keywords else value
            for key, value in kwargs.items()
        }
        return changed, named

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        colwise = isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear)
        changed = _relaid(outputs, effect.outputs, tp, last=out_features if colwise else None)
        for value, layout in zip(changed, effect.outputs[1], strict=False):
            if isinstance(value, Tensor) and layout is not None:
                note(value, Origin(source=path, sharded=isinstance(layout, Shard)))
        return changed if isinstance(output, tuple) else changed[0]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _relaid(values: tuple[Any, ...], change: Change, tp: int, last: int | None = None) -> tuple[Any, ...]:
    now, wanted = change
    if len(now) != len(wanted) or not now:
        return values
    layouts = [*zip(now, wanted, strict=True)][: len(values)]
    rest = values[len(layouts) :]
    return (*(_local(value, a, b, tp, last) for value, (a, b) in zip(values, layouts, strict=False)), *rest)


def _local(value: Any, now: Placement | None, wanted: Placement | None, tp: int, last: int | None = None) -> Any:
    """A rank's part of ``value`` under layout ``wanted``, given its part under ``now``; values are not defined."""
    if not isinstance(value, Tensor) or now is None or wanted is None or now == wanted:
        return value
    shape = list(value.shape)
    if isinstance(now, Shard):
        dim = now.dim % len(shape)
        gathered_last = last is not None and dim == len(shape) - 1
        shape[dim] = last if gathered_last and last is not None else shape[dim] * tp
    if isinstance(wanted, Shard):
        dim = wanted.dim % len(shape)
        if shape[dim] % tp:
            raise ValueError(f"a tensor of shape {tuple(shape)} cannot be cut over {tp} ranks along dim {dim}")
        shape[dim] //= tp
    local = value.new_empty(shape).requires_grad_(value.requires_grad)
    return note(local, Origin(source="the input", sharded=isinstance(wanted, Shard)))


class _Trace(TorchFunctionMode):
    """A forward pass that notes which module is running, what attention is given, and how outputs are taken apart."""

    def __init__(self, model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
        super().__init__()
        self._model = model
        self._running: list[str] = []
        self._outputs: dict[int, tuple[Tensor, str]] = {}
        self.products: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """Module, and shapes of queries and keys (or of the factors of a product) of each call."""
        self.cuts: list[tuple[str, str]] = []
        """Column parallel module, and the function that cuts its output along its last dim."""
        self.views: list[tuple[str, int, tuple[int, ...]]] = []
        """Column parallel module, dims of its output before the last, and the shape it is viewed as."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(global_name(name)), prepend=True)
            module.register_forward_hook(self._leaving(global_name(name), _stays_sharded(styles.get(name))))

    def run(self, inputs: list[Any]) -> None:
        with _quiet(), torch.enable_grad(), self:
            self._model(*inputs)

    def where(self) -> str:
        """The innermost module that is running."""
        return (self._running[-1] if self._running else "") or type(self._model).__name__

    def _entering(self, name: str) -> Any:
        return lambda module, args: self._running.append(name)

    def _leaving(self, name: str, colwise: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            if colwise and isinstance(output, Tensor):
                self._outputs[id(output)] = (output, name)

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        result = func(*args, **kwargs)
        follow((*args, *kwargs.values()), result, self.where(), name)
        if func is F.scaled_dot_product_attention and len(args) > 1:
            self.products.append((self.where(), tuple(args[0].shape), tuple(args[1].shape)))
        elif name in ("matmul", "__matmul__") and all(isinstance(x, Tensor) and x.dim() >= 4 for x in args[:2]):
            self.products.append((self.where(), tuple(args[0].shape), tuple(args[1].transpose(-1, -2).shape)))
        elif isinstance(first, Tensor) and id(first) in self._outputs:
            source = self._outputs[id(first)][1]
            if name in _CUTS and kwargs.get("dim", args[2] if len(args) > 2 else 0) % first.dim() == first.dim() - 1:
                self.cuts.append((source, name))
            elif name in _VIEWS:
                self.views.append((source, first.dim() - 1, tuple(result.shape)))
        return result


def _stays_sharded(style: ParallelStyle | None) -> bool:
    return isinstance(style, ColwiseParallel) and any(isinstance(layout, Shard) for layout in style.output_layouts)


def _compare(expected: _Trace, found: _Trace, tp: int) -> None:
    """Raise PlanError where one rank did something else than the whole model."""
    for source, function in found.cuts:
        raise PlanError(
            f"{source}: its output is cut by {function} along the dim that ColwiseParallel shards, so a rank would "
            "take its consecutive rows for one part of each: use unpack_linear on it, or put the parts of each head "
            "side by side"
        )
    for (source, kept, whole), (_, _, local) in zip(expected.views, found.views, strict=False):
        made = [(a, b) for a, b in zip(whole[kept:], local[kept:], strict=False)]
        if len(whole) == len(local) and made and made[0][0] == made[0][1] and any(a != b for a, b in made):
            raise PlanError(
                f"{source}: the last dim of its output is viewed as {whole[kept:]} on one process and as "
                f"{local[kept:]} on a rank: what shrinks is not the outermost of these, so heads would be mixed up: "
                "let the first be -1, and use unpack_linear for a fused query-key-value"
            )
    for (module, whole_q, whole_k), (_, q, k) in zip(expected.products, found.products, strict=False):
        for a, b in ((whole_q, q), (whole_k, k)):
            if b[-2] * tp == a[-2]:
                raise PlanError(
                    f"{module}: attention is given {b[-2]} of {a[-2]} tokens on one of tp = {tp} ranks: gather the "
                    "sequence before it (PrepareModuleInput from Shard(1) to Replicate())"
                )
            if a[-2:] != b[-2:] or b[1] not in (a[1], a[1] // tp):
                raise PlanError(
                    f"{module}: attention is given {b} on one of tp = {tp} ranks where the whole model gives {a}, "
                    f"expected {(a[0], a[1] // tp, *a[2:])}: its forward assumes all heads; read their number off "
                    "the shape, as in view(batch, sequence, -1, head_dim)"
                )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
