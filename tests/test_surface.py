"""What `from meshtron import ...` gives, and what importing it costs."""

import subprocess
import sys

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
