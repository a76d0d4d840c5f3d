"""Global parameter names: the same at every layout, with and without the wrappers that torch puts around modules."""

from collections.abc import Iterable, Iterator

from torch import nn

# Attributes in which torch keeps a wrapped module: checkpoint_wrapper and torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def global_name(name: str) -> str:
    """``name`` without the segments of wrappers: ``"blocks._orig_mod.0.weight"`` -> ``"blocks.0.weight"``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch's wrappers, or ``module`` where there are none."""
    while inner := next((module._modules[name] for name in WRAPPERS if name in module._modules), None):
        module = inner
    return module


def named_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of ``parts`` under its global name, each once a part."""
    for part in parts:
        for name, parameter in part.named_parameters():
            yield global_name(name), parameter
