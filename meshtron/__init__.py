"""DTensor- and DeviceMesh-native 3D parallelism for pretraining transformers."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("meshtron")
except PackageNotFoundError:  # a checkout on PYTHONPATH without an install: the same number, where it is written
    _project = Path(__file__).parent.parent / "pyproject.toml"
    __version__ = tomllib.loads(_project.read_text(encoding="utf-8"))["project"]["version"]
