"""Tokenizer files and token ids on their way in and out of a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import Any

from meshtron.data.tokenizer import copy_companions, find_end_of_text, load_tokenizer, tokenizer_file
from meshtron.errors import DataError
from meshtron.hf.folder import CONFIG, GENERATION, TOKEN_IDS, read_json, render_json


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Raise DataError where an export would have no tokenizer, or one with more ids than the model has rows."""
    try:
        load_tokenizer(path, vocab_size)
    except DataError as error:
        raise DataError(f"{error}; name one with --tokenizer, or export with --no-tokenizer") from None


def generation_config(path: Path) -> dict[str, Any]:
    """The tokenizer folder's generation_config.json, else the ids that config.json or the tokenizer says."""
    folder = path if path.is_dir() else path.parent
    if (folder / GENERATION).is_file():
        return read_json(folder / GENERATION)
    if (folder / CONFIG).is_file():
        config = read_json(folder / CONFIG)
        return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    end = None if tokenizer_file(path) is None else find_end_of_text(load_tokenizer(path), path)
    return {} if end is None else {"eos_token_id": end}


def copy_tokenizer(path: Path, out: Path) -> None:
    """Copy what there is of a tokenizer, given by its own path or its folder's."""
    copy_companions(path, out)
    file = tokenizer_file(path)
    if file is not None:
        shutil.copyfile(file, out / "tokenizer.json")


def complete_tokenizer(out: Path, path: Path, length: int) -> None:
    """Write the tokenizer_config.json that AutoTokenizer needs where the tokenizer at ``path`` came without one."""
    if not (out / "tokenizer.json").is_file() or (out / "tokenizer_config.json").is_file():
        return
    tokenizer = load_tokenizer(out)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    end = find_end_of_text(tokenizer, path)
    if end is not None:
        config["eos_token"] = tokenizer.id_to_token(end)
    (out / "tokenizer_config.json").write_text(render_json(config), encoding="utf-8")
