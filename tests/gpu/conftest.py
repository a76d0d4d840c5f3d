"""Tests that need a CUDA device; without one each is skipped, and says so."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))
