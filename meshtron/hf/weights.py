"""safetensors files of a Hugging Face folder: read slice by slice, written shard by shard.

Reading is memory-mapped: a rank asks for the rows or columns that it holds and the rest of the file is never
touched. Names are LlamaForCausalLM's, which are meshtron's with ``model.`` before all but ``lm_head``.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshtron.checkpoint.files import memory_of, tensor_header, write_file
from meshtron.errors import CheckpointError
from meshtron.parallel.placement import local_part, slices_of

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROTARY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
_SHOWN = 8  # names in an error before "and N more"


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter of ours."""
    return name if name.startswith("lm_head.") else f"model.{name}"


class WeightFiles:
    """The tensors of a folder's safetensors files, by Hugging Face name.

    Raises:
        CheckpointError: there are no safetensors, a file is damaged, or the index and the files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._file_of: dict[str, Path] = {}
        for path in _weight_paths(folder):
            self._list(path)
        _check_index(folder, {name: path.name for name, path in self._file_of.items()})
        # Old Llama files carry the rotary frequencies, which the model derives from rope_theta.
        for name in [name for name in self.shapes if _ROTARY.fullmatch(name)]:
            del self.shapes[name], self.dtypes[name]

    def _list(self, path: Path) -> None:
        """Take up the names, shapes and dtypes in a file's header."""
        file = _open(path)
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in self._file_of:
                raise CheckpointError(f"{self.folder}: {name} is in {self._file_of[name].name} and in {path.name}")
            header = file.get_slice(name)
            if header.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name} is {header.get_dtype()}; expected {', '.join(DTYPES)}: "
                    "quantised weights must be converted first"
                )
            self._file_of[name] = path
            self.shapes[name], self.dtypes[name] = torch.Size(header.get_shape()), DTYPES[header.get_dtype()]

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """The part of a tensor that ``slices`` (one a dim, without steps) cut out, in the file's dtype.

        The file is mapped anew for each part: pages that were read stay resident for as long as their mapping does.
        """
        return _open(self._file_of[name]).get_slice(name)[slices]

    def mapped(self, name: str) -> Tensor:
        """A whole tensor that stays in the mapped file until its values are used."""
        return _open(self._file_of[name]).get_tensor(name)

    def check_ties(self, ties: Mapping[str, str], slices: tuple[slice, ...] = (slice(None),)) -> None:
        """Raise CheckpointError where the files hold two different tensors for one parameter.

        Args:
            ties: our later name -> first name of tied parameters; the files need hold only the first.
            slices: the part that is compared.
        """
        for alias, first in ties.items():
            both = hf_name(alias), hf_name(first)
            if both[0] in self.shapes and not torch.equal(*(self.read(name, slices) for name in both)):
                raise CheckpointError(
                    f"{self.folder}: tie_word_embeddings is true, but {both[0]} differs from {both[1]}; to keep both "
                    "set tie_word_embeddings to false in config.json, else remove the first"
                )


def _weight_paths(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        files = set(_read_index(folder).values())
        absent = sorted(file for file in files if not (folder / file).is_file())
        if absent:
            raise CheckpointError(f"{folder}: {_some(absent)} named by {INDEX} but not there; download it again")
        if single.is_file() and single.name not in files:
            raise CheckpointError(
                f"{folder}: {single.name} and {INDEX}, which does not name it: two models, or one saved twice; "
                "remove the one that is not meant"
            )
        paths = sorted(folder / file for file in files)  # others may be there (Mistral's consolidated.safetensors)
    if paths:
        return paths
    pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if pickled:
        raise CheckpointError(
            f"{folder}: weights are pickled ({_some(pickled)}), which can run code when opened; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
        )
    raise CheckpointError(f"{folder}: no *.safetensors files")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error


def _read_index(folder: Path) -> dict[str, str]:
    try:
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not files or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("weight_map must give each tensor a file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files ({error})") from error
    return files


def _check_index(folder: Path, file_of: Mapping[str, str]) -> None:
    if not (folder / INDEX).exists():
        return
    listed = _read_index(folder)
    wrong = sorted(name for name in {*listed, *file_of} if listed.get(name) != file_of.get(name))
    if wrong:
        raise CheckpointError(f"{folder}: {INDEX} and the files disagree about {_some(wrong)}")


def check_weights(files: WeightFiles, shapes: Mapping[str, torch.Size], ties: Mapping[str, str]) -> None:
    """Compare the files with a whole model.

    Args:
        files: what is there.
        shapes: our name -> shape of every parameter, tied ones under their first name.
        ties: later name -> first name of tied parameters; files may hold the later one too.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; the message lists them.
    """
    expected = {hf_name(name): shape for name, shape in shapes.items()}
    optional = {hf_name(alias): shapes[first] for alias, first in ties.items()}
    known = expected | optional
    problems = [
        ("missing", [name for name in expected if name not in files.shapes]),
        ("unexpected", [name for name in files.shapes if name not in known]),
        (
            "of another shape",
            [
                f"{name} {tuple(files.shapes[name])} instead of {tuple(shape)}"
                for name, shape in known.items()
                if name in files.shapes and files.shapes[name] != shape
            ],
        ),
    ]
    found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems if names]
    if found:
        raise CheckpointError(f"{files.folder}: tensors do not fit config.json; {'; '.join(found)}")


def load_folder(
    folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], ties: Mapping[str, str]
) -> None:
    """``check_weights`` and ``load_weights`` from a folder's safetensors."""
    files = WeightFiles(folder)
    check_weights(files, shapes, ties)
    load_weights(tensors, files, ties)


@torch.no_grad()
def load_weights(tensors: Mapping[str, Tensor], files: WeightFiles, ties: Mapping[str, str]) -> None:
    """Fill this rank's tensors from the files, reading nothing but their slices.

    Args:
        tensors: our name -> tensor with memory, tied ones under their first name; DTensors get their shard.
        files: checked by ``check_weights`` against the whole model.
        ties: later name -> first name of tied parameters.

    Raises:
        CheckpointError: the files hold two different tensors for tied parameters.
    """
    for name, tensor in tensors.items():
        slices = slices_of(tensor)
        files.check_ties({alias: first for alias, first in ties.items() if first == name}, slices)
        local_part(tensor).copy_(files.read(hf_name(name), slices))


def save_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    read: Callable[[list[str]], Mapping[str, Tensor]],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
) -> None:
    """Write safetensors, one file or several with an index, holding one file's tensors in memory at a time.

    Args:
        folder: an existing folder.
        shapes: our name -> shape, in the order to write.
        read: whole tensors of some of our names, in any dtype and nobody else's: they are dropped one by one.
        dtypes: our name -> dtype in the file.
        max_shard_bytes: a file grows to this size, unless one tensor alone is larger.
    """
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, shape in shapes.items():
        tensor_bytes = shape.numel() * dtypes[name].itemsize
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + tensor_bytes, total + tensor_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, dict(read(names)), dtypes)
        weight_map |= dict.fromkeys(map(hf_name, names), file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, tensors: dict[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """One safetensors file; ``tensors`` is emptied as it is written."""
    ours = {hf_name(name): name for name in tensors}
    described = {key: tensors[name].to("meta", dtypes[name]) for key, name in ours.items()}
    header, order = tensor_header(described, {"format": "pt"})

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for name in map(ours.__getitem__, order):
            yield memory_of(_cast(name, tensors.pop(name), dtypes[name]))

    write_file(path, pieces())


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name}: has values that float16 cannot hold; export bfloat16 or float32")
    return cast


def parse_size(text: str) -> int:
    """Bytes in ``"5GB"``, ``"200MB"``, ``"1GiB"`` or a plain number.

    Raises:
        CheckpointError: ``text`` is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise CheckpointError(f"size {text!r}: expected a number and a unit, as in 5GB or 500MB")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
