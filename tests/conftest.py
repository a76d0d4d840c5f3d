"""Fixtures that several test modules share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of every case of ``tests/hf_models.py``, with one tokenizer for all."""
    from meshtron.data.tokenizer import train_tokenizer
    from tests.hf_models import CASES, write

    root = tmp_path_factory.mktemp("hf")
    tokenizer = train_tokenizer(["for x in y: return x\n" * 5], 260)
    made = {}
    for case in CASES:
        made[case] = write(case, root / case)
        tokenizer.save(str(root / case / "tokenizer.json"))
    return made
