"""Writing token shards so that they are whole or not there."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshtron.data.shards import DTYPES, Shard, dtype_name
from meshtron.durable import sync_folder
from meshtron.errors import DataError


class ShardWriter:
    """Appends documents to the shards of a folder that is not published yet.

    Args:
        folder: where the files go; it exists.
        vocab_size: decides the dtype.
        has_prompts: whether documents come with prompt lengths.
        max_shard_tokens: a shard that holds this many tokens or more is closed.
        state: what ``state()`` returned earlier, to go on behind it; anything written later is cut off.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        has_prompts: bool = False,
        max_shard_tokens: int = 1 << 28,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.dtype = DTYPES[dtype_name(vocab_size)]
        self.max_shard_tokens = max_shard_tokens
        self._endings = [".bin", ".ends"] + [".prompts"] * has_prompts
        self.shards = [Shard(**shard) for shard in state["shards"]] if state else []
        self._total = sum(shard.num_tokens for shard in self.shards)
        self._files: dict[str, Any] = {}
        if self.shards and self.shards[-1].num_tokens < max_shard_tokens:
            self._reopen(self.shards[-1])

    def _reopen(self, shard: Shard) -> None:
        sizes = {
            ".bin": shard.num_tokens * self.dtype.itemsize,
            ".ends": shard.num_documents * 8,
            ".prompts": shard.num_documents * 4,
        }
        for ending in self._endings:
            file = open(self.folder / (shard.name + ending), "r+b")  # noqa: SIM115 (closed by close)
            file.truncate(sizes[ending])
            file.seek(0, os.SEEK_END)
            self._files[ending] = file

    def append(self, tokens: np.ndarray, lengths: np.ndarray, prompts: np.ndarray | None = None) -> None:
        """Append whole documents: their tokens in one row, how many each has, and how many are prompt."""
        if not len(lengths):
            return
        if not self._files:
            name = f"shard-{len(self.shards):05d}"
            self.shards.append(Shard(name=name, num_tokens=0, num_documents=0))
            self._files = {
                ending: open(self.folder / (name + ending), "wb")  # noqa: SIM115 (closed by close)
                for ending in self._endings
            }
        ends = self._total + np.cumsum(lengths, dtype=np.int64)
        self._files[".bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._files[".ends"].write(ends.astype("<u8").tobytes())
        if prompts is not None:
            self._files[".prompts"].write(prompts.astype("<u4").tobytes())
        last = self.shards[-1]
        self.shards[-1] = Shard(
            name=last.name,
            num_tokens=last.num_tokens + len(tokens),
            num_documents=last.num_documents + len(lengths),
        )
        self._total += len(tokens)
        if self.shards[-1].num_tokens >= self.max_shard_tokens:
            self.close()

    def state(self) -> dict[str, Any]:
        """Sync what was written and say where the files end, as plain JSON values."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {"shards": [asdict(shard) for shard in self.shards]}

    def close(self) -> None:
        """Sync and close the open files; ``append`` may go on with a new shard."""
        self.state()
        for file in self._files.values():
            file.close()
        self._files = {}


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and sync it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(folder: Path, place: Path) -> None:
    """Give a finished folder its final name by one rename, after syncing its entries.

    Raises:
        DataError: something is at ``place`` already.
    """
    for path in [*(entry for entry in folder.rglob("*") if entry.is_dir()), folder]:
        sync_folder(path)
    try:
        os.rename(folder, place)
    except OSError:
        raise DataError(f"{place}: there already; remove it or choose another --out") from None
    sync_folder(place.parent)
