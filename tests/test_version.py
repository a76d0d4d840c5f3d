"""One version number: pyproject.toml's."""

import tomllib
from pathlib import Path

import meshtron


def test_version_is_that_of_the_project():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert meshtron.__version__ == project["version"]
