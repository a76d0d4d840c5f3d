"""What lies in a Hugging Face folder beside the weights: config.json and the ids that end a text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtron.errors import CheckpointError
from meshtron.hf.config import config_from_hf
from meshtron.models.llama import LlamaConfig

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like Hugging Face's: it has a config.json."""
    return (path / CONFIG).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it does not, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}; expected a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def render_json(content: Mapping[str, Any]) -> str:
    """JSON as ``read_json`` reads it."""
    return json.dumps(content, indent=2) + "\n"


def read_config(folder: Path) -> tuple[str, LlamaConfig]:
    """Family and configuration of a folder's model.

    Raises:
        CheckpointError: there is no config.json, or it says what meshtron does not implement.
    """
    path = folder / CONFIG
    return config_from_hf(read_json(path), str(path))


def stop_ids(folder: Path) -> set[int]:
    """Ids that end a text, from generation_config.json, else config.json; empty where neither says.

    Raises:
        CheckpointError: one of them is damaged, or says something else than ids.
    """
    for name in (GENERATION, CONFIG):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token) is int for token in ids):
                raise CheckpointError(f"{folder / name}: eos_token_id = {found!r}: expected an id or a list of ids")
            return set(ids)
    return set()
