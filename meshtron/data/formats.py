"""Which format of token files lies at a path."""

from pathlib import Path

from meshtron.data.foreign import is_datatrove, megatron_prefix, open_datatrove, open_megatron
from meshtron.data.shards import HEADER, TokenFiles, open_shards
from meshtron.errors import DataError


def has_tokens(path: str | Path) -> bool:
    """Whether anything lies at a path of token files; nothing of it is read."""
    return Path(path).exists() or megatron_prefix(Path(path)) is not None


def open_tokens(path: str | Path) -> TokenFiles:
    """Map the token files at a path.

    Raises:
        DataError: nothing there that is known.
    """
    path = Path(path)
    if (path / HEADER).is_file():
        return open_shards(path)
    if is_datatrove(path):
        return open_datatrove(path)
    prefix = megatron_prefix(path)
    if prefix is not None:
        return open_megatron(prefix)
    if not path.exists():
        seen_from = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{path}: not there{seen_from}; make it with `meshtron prepare SOURCE... --out {path}`")
    raise DataError(
        f"{path}: no tokens that meshtron knows; expected a folder made by `meshtron prepare`, a .ds file or a "
        "folder of them (datatrove, nanotron), or PREFIX of a PREFIX.bin and PREFIX.idx (Megatron-LM)"
    )
