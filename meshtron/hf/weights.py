"""safetensors files of a Hugging Face folder: read slice by slice, written shard by shard.

Reading is memory-mapped: a rank asks for the rows or columns that it holds and the rest of the file is never
touched. Names are LlamaForCausalLM's, which are meshtron's with ``model.`` before all but ``lm_head``.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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
        self._handles = {path.name: _open(path) for path in _weight_paths(folder)}
        self._file_of: dict[str, str] = {}
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
                if name in self._file_of:
                    raise CheckpointError(f"{folder}: {name} is in {self._file_of[name]} and in {file}")
                self._file_of[name] = file
        _check_index(folder, self._file_of)
        # Old Llama files carry the rotary frequencies, which the model derives from rope_theta.
        self._file_of = {name: file for name, file in self._file_of.items() if not _ROTARY.fullmatch(name)}
        self.shapes = {name: torch.Size(self._slice(name).get_shape()) for name in self._file_of}
        self.dtypes = {name: self._dtype(name) for name in self._file_of}
        self.bytes_read = 0
        """Bytes of tensor data read so far."""

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)

    def _dtype(self, name: str) -> torch.dtype:
        dtype = self._slice(name).get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} is {dtype}; expected {', '.join(DTYPES)}: "
                "quantised weights must be converted first"
            )
        return DTYPES[dtype]

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """The part of a tensor that ``slices`` (one a dim, without steps) cut out, in the file's dtype."""
        part = self._slice(name)[slices]
        self.bytes_read += part.numel() * part.element_size()
        return part


def _weight_paths(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        files = set(_read_index(folder).values())
        absent = sorted(file for file in files if not (folder / file).is_file())
        if absent:
            raise CheckpointError(f"{folder}: {_some(absent)} named by {INDEX} but not there; download it again")
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
        return dict(json.loads((folder / INDEX).read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files ({error})") from error


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
        part = files.read(hf_name(name), slices)
        for alias in (hf_name(alias) for alias, first in ties.items() if first == name):
            if alias in files.shapes and not torch.equal(files.read(alias, slices), part):
                raise CheckpointError(
                    f"{files.folder}: tie_word_embeddings is true, but {alias} differs from {hf_name(name)}; "
                    "to keep both set tie_word_embeddings to false in config.json, else remove the first"
                )
        local_part(tensor).copy_(part)


def save_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    read: Callable[[list[str]], Mapping[str, Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write safetensors, one file or several with an index, holding one file in memory at a time.

    Args:
        folder: an existing folder.
        shapes: our name -> shape, in the order to write.
        read: whole tensors of some of our names, in any dtype.
        dtype: of every tensor written.
        max_shard_bytes: a file grows to this size, unless one tensor alone is larger.
    """
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, shape in shapes.items():
        tensor_bytes = shape.numel() * dtype.itemsize
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + tensor_bytes, total + tensor_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {hf_name(name): tensor.to(dtype).contiguous() for name, tensor in read(names).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
