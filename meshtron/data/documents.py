"""Which files a source of text names: files, folders, globs, folders saved by ``datasets``, and streamed datasets."""

import fnmatch
import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshtron.errors import DataError

# Whole-file documents that a folder is searched for; a file named outright may end in anything.
_PROSE = (".txt", ".md", ".rst", ".tex", ".html")
_CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".kt",
    ".scala",
    ".js",
    ".ts",
)
_SCRIPTS = (".css", ".rb", ".php", ".lua", ".sh", ".sql")
TEXT_SUFFIXES = _PROSE + _CODE + _SCRIPTS
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".zst")
UNREAD_SUFFIXES = (".7z", ".br", ".bz2", ".lz4", ".lzma", ".rar", ".tar", ".tgz", ".xz", ".zip")
DEFAULT_INCLUDE = tuple(f"*{suffix}" for suffix in TEXT_SUFFIXES + RECORD_SUFFIXES)
DEFAULT_EXCLUDE = (".*", "__pycache__", "site-packages", "dist-packages", "node_modules", "test", "tests")


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One input, with what decides whether it is still the same after a restart."""

    path: str
    """A path, or ``hf:NAME:SPLIT``."""
    kind: str
    """text, jsonl, json, parquet, dataset (a folder saved by ``datasets``) or hf (a streamed dataset)."""
    size: int = 0
    modified_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which files of a folder are read."""

    include: tuple[str, ...] = DEFAULT_INCLUDE
    """Patterns of file names; a compressed file is matched without its .gz or .zst."""
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    """Patterns of file and folder names below the source."""
    left_out: list[str] = field(default_factory=list)
    """Files that matched ``include`` and were left out because of ``exclude``; filled by ``find_files``."""


def find_files(sources: Sequence[str], selection: Selection) -> list[TextFile]:
    """Every file that the sources name, in the order of the sources, folders sorted by path.

    Args:
        sources: files, folders, globs, folders saved by ``datasets``, or ``hf:NAME[:SPLIT]``.
        selection: which files of folders count.

    Raises:
        DataError: a source names nothing, a file is named twice, or compressed in a way that is not read.
    """
    found: list[TextFile] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(TextFile(path=source, kind="hf"))
            continue
        path = Path(source)
        if path.is_dir():
            files = _walk(path, selection)
        elif path.is_file():
            files = [path]
        else:
            files = []
            for match in sorted(glob.glob(source, recursive=True)):
                files += _walk(Path(match), selection) if Path(match).is_dir() else [Path(match)]
        if not files:
            raise DataError(
                f"{source}: nothing to read there; expected a file, a folder with files such as "
                f"{', '.join(selection.include[:3])} (--include), a glob, or hf:NAME[:SPLIT]"
            )
        found += [_describe(file) for file in files]
    seen: set[str] = set()
    for file in found:
        if file.path in seen:
            raise DataError(f"{file.path}: named by two sources")
        seen.add(file.path)
    return found


def _walk(folder: Path, selection: Selection) -> list[Path]:
    if _is_dataset(folder):
        return [folder]

    def excluded(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in selection.exclude)

    files = []
    for path in sorted(folder.rglob("*")):
        name = _uncompressed(path)
        if not any(fnmatch.fnmatchcase(name, pattern.lower()) for pattern in selection.include) or not path.is_file():
            continue
        if any(excluded(part) for part in path.relative_to(folder).parts):
            selection.left_out.append(str(path))
        else:
            files.append(path)
    return files


def _uncompressed(path: Path) -> str:
    """Name without what says how it is compressed, in lower case: DATA.JSONL.GZ holds records too."""
    return path.name.lower().removesuffix(".gz").removesuffix(".zst")


def _is_dataset(folder: Path) -> bool:
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _describe(path: Path) -> TextFile:
    if path.is_dir():
        return TextFile(path=str(path), kind="dataset")
    if path.suffix.lower() in UNREAD_SUFFIXES:
        raise DataError(
            f"{path}: {path.suffix} files are not read; expected plain files, {' or '.join(COMPRESSED_SUFFIXES)}: "
            "unpack it first"
        )
    suffix = Path(_uncompressed(path)).suffix
    kind = suffix[1:] if suffix in RECORD_SUFFIXES else "text"
    status = path.stat()
    return TextFile(path=str(path), kind=kind, size=status.st_size, modified_ns=status.st_mtime_ns)
