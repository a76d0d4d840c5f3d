"""Tied parameters: one parameter under two names, which tensor parallelism and pipelining both pull apart.

The first name in module order is the canonical one: initial values, decay rules and checkpoints go by it. Where
both names live on one rank they are made the same ``Parameter`` again; where two pipeline stages on different
ranks hold them, each keeps a copy, and ZeroOptimizer sums their gradients once a step (gradients.py).
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from meshtron.parallel.names import global_name, unwrapped


def find_ties(*parts: nn.Module) -> dict[str, str]:
    """Map each later name of a shared parameter to its first name: ``{"lm_head.weight": "embed_tokens.weight"}``."""
    first_names: dict[int, str] = {}
    ties = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            name = global_name(name)
            first = first_names.setdefault(id(parameter), name)
            if first != name:
                ties[name] = first
    return ties


def parameter_owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that holds parameter ``name`` and its attribute there, or None where ``model`` has no such part."""
    path, _, attribute = name.rpartition(".")
    module: nn.Module | None = unwrapped(model)
    for part in path.split(".") if path else ():
        child = module._modules.get(part) if module is not None else None
        module = unwrapped(child) if child is not None else None
    if module is None or module._parameters.get(attribute) is None:
        return None
    return module, attribute


def retie(stages: Sequence[nn.Module], ties: Mapping[str, str]) -> None:
    """Make every tied pair whose two names are both on this rank one ``Parameter`` again."""
    for alias, canonical in ties.items():
        owners = [list(_owners(stages, name)) for name in (canonical, alias)]
        if owners[0] and owners[1]:
            module, attribute = owners[0][0]
            shared = module._parameters[attribute]
            for module, attribute in owners[1]:
                module._parameters[attribute] = shared


def _owners(stages: Sequence[nn.Module], name: str) -> Iterator[tuple[nn.Module, str]]:
    for stage in stages:
        owner = parameter_owner(stage, name)
        if owner is not None:
            yield owner
