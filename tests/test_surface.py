"""What `from meshtron import ...` gives, and what importing it costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import meshtron


def test_every_exported_name_is_there_documented_and_listed():
    assert sorted(meshtron.__all__) == meshtron.__all__
    assert set(meshtron._HOME_OF) | {"__version__"} == set(meshtron.__all__)
    for name in meshtron.__all__:
        value = getattr(meshtron, name)
        assert name in dir(meshtron)
        if name != "__version__":
            assert value.__doc__, name
            assert value.__module__.startswith("meshtron."), name


def test_an_unknown_name_is_an_ordinary_error():
    assert not hasattr(meshtron, "parallelise")


def test_importing_costs_little_and_loads_nothing():
    code = (
        "import time, sys, torch; start = time.perf_counter(); import meshtron; "
        "cost = time.perf_counter() - start; "
        "print(cost, [name for name in sys.modules if name.startswith('meshtron.')])"
    )
    costs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        cost, _, loaded = done.stdout.partition(" ")
        costs.append(float(cost))
        assert loaded.strip() == "[]"
        if costs[-1] < 0.3:
            break
    assert min(costs) < 0.3


ORDER = (
    *({"errors"}, {"mesh"}, {"models", "data"}, {"parallel"}, {"optim"}, {"checkpoint"}, {"metrics"}),
    *({"build"}, {"passes"}, {"loop", "generate", "comparison"}, {"cli"}),
)


def imports() -> Iterator[tuple[str, str]]:
    """The part of meshtron that each file is of, and one that it imports when it is loaded."""
    root = Path(meshtron.__file__).parent
    for file in root.rglob("*.py"):
        part = file.relative_to(root).with_suffix("").parts[0]
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "meshtron":
                modules = [node.module] if "." in node.module else [f"meshtron.{name.name}" for name in node.names]
                yield from ((part, module.split(".")[1]) for module in modules)


def test_imports_run_one_way():
    level = {part: number for number, parts in enumerate(ORDER) for part in parts}
    found = set(imports())
    assert ("parallel", "errors") in found
    for importer, imported in found:
        assert level.get(imported, 0) <= level.get(importer, len(ORDER)), f"{importer} imports {imported}"
        if importer == "recipe":
            assert imported in ("recipe", "errors"), imported
        elif level.get(importer, len(ORDER)) < level["build"]:
            assert imported != "recipe", f"{importer} imports recipe"
