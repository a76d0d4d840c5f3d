"""Checkpoint folders that somebody has changed: refused in a line, and nothing outside is read or deleted."""

import copy
import json
import os
import pickle
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtron import ckpt
from meshtron.checkpoint import (
    Checkpointer,
    files,
    find_step,
    load,
    newest,
    read_manifest,
    read_rank_state,
    read_tensors,
    steps,
    stored_tensors,
    verify,
    whole_steps,
)
from meshtron.checkpoint import manifest as manifest_module
from meshtron.errors import CheckpointError, CheckpointFormatError, MeshtronError
from meshtron.testing import run_ranks


def save(folder: Path, step: int, **options) -> Path:
    with Checkpointer(folder, **options) as checkpointer:
        checkpointer.save(step, {"a": torch.full((2,), float(step))}, {"step": step}, {"rng": torch.tensor(step)})
    return folder / f"step-{step:08d}"


def rewrite_manifest(folder: Path, change) -> None:
    """Change the manifest and sign it anew, as somebody who wishes harm would."""
    text = (folder / "manifest.json").read_text()
    fields = json.loads(text)["manifest"]
    fields = change(fields) or fields
    (folder / "manifest.json").write_text(manifest_module._sealed(json.dumps(fields)))


def reseal(folder: Path) -> None:
    """Make the manifest vouch for whatever the folder holds now."""

    def change(fields: dict[str, Any]) -> None:
        paths = [path for path in folder.iterdir() if path.name != "manifest.json"]
        fields["files"] = {path.name: vars(files.hash_file(path)) for path in paths}

    rewrite_manifest(folder, change)


def test_a_hostile_folder_is_refused_and_runs_nothing(tmp_path):
    hostile = {
        "a header longer than the file": struct.pack("<Q", 1 << 60) + b"{}",
        "not JSON": struct.pack("<Q", 4) + b"\x80\x04N.",
        "offsets outside": struct.pack("<Q", 62)
        + b'{"a[0:2]":{"dtype":"F32","shape":[2],"data_offsets":[100,108]}}'.ljust(62),
        "a shape that does not fit": struct.pack("<Q", 60)
        + b'{"a[0:2]":{"dtype":"F32","shape":[9],"data_offsets":[0,8]}}'.ljust(60)
        + bytes(8),
        "a dtype that is none": struct.pack("<Q", 60)
        + b'{"a[0:2]":{"dtype":"PY","shape":[2],"data_offsets":[0,8]}}'.ljust(60)
        + bytes(8),
        "a list": struct.pack("<Q", 2) + b"[]",
        "nothing": b"",
        "another tensor": struct.pack("<Q", 60)
        + b'{"b[0:2]":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(60)
        + bytes(8),
    }
    for number, content in enumerate(hostile.values()):
        folder = save(tmp_path / str(number), 1)
        (folder / "rank-00000.safetensors").write_bytes(content)
        reseal(folder)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
            load(folder, {"a": torch.zeros(2)})
    folder = find_step(tmp_path / "0")
    for index in ({"a": {"dtype": "F32", "shape": [2], "chunks": [[[0], [2], "../../../etc/passwd"]]}}, [], {"a": 3}):
        (folder / "index.json").write_text(json.dumps(index))
        reseal(folder)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            load(folder, {"a": torch.zeros(2)})


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    folder, tensor = save(tmp_path, 1), torch.zeros(2)

    def refuse(*_args, **_options):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load(folder, {"a": tensor})["step"] == int(read_rank_state(folder, 0)["rng"]) == int(tensor[0]) == 1
    for path in folder.iterdir():
        assert path.suffix in (".json", ".safetensors")


# Links and names that lead outside


def test_links_are_refused_and_what_they_point_to_is_neither_read_nor_deleted(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    for number, name in enumerate(("rank-00000.safetensors", "index.json", "manifest.json"), start=1):
        step = save(folder, number)
        (step / name).rename(outside / f"{number}-{name}")
        (step / name).symlink_to(outside / f"{number}-{name}")
        assert list(verify(step)) == [name]
        with pytest.raises(CheckpointError, match=name):
            load(step, {"a": torch.zeros(2)})
        with pytest.raises(CheckpointError, match=rf"{name}.*(link|levels of symbolic links)"):
            load(step, {"a": torch.zeros(2)}, check_hashes=False)
    beside = save(folder, 4)
    (beside / "more").symlink_to(outside)
    assert verify(beside) == {"more": "not a file of this checkpoint"}
    for suffix in steps.WRITING, steps.REMOVING, steps.REPLACED:
        (folder / f"step-00000009{suffix}").mkdir()
        (folder / f"step-00000009{suffix}" / "link").symlink_to(outside)
        (folder / f"step-00000008{suffix}").symlink_to(outside)
    (folder / "step-00000009").symlink_to(outside)
    (folder / "step-00000008").symlink_to(tmp_path / "nowhere")
    before = sorted(os.listdir(outside))
    Checkpointer(folder).close()
    for step in (7, 8, 9, 10):
        save(folder, step, keep_last=1)
    assert whole_steps(folder) == [10]
    assert sorted(os.listdir(outside)) == before
    assert not (folder / "step-00000009").exists()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    folder = save(tmp_path, 1)
    for name in ("manifest.json", "index.json"):
        (folder / name).rename(tmp_path / name)
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name}.*not a file"):
            load(folder, {"a": torch.zeros(2)}, check_hashes=False)
        assert list(verify(folder)) == [name]
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\\nb", "\0"])
def test_a_manifest_can_name_nothing_outside_its_folder(tmp_path, monkeypatch, name):
    folder = save(tmp_path / "run", 1)

    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"]["index.json"]

    rewrite_manifest(folder, change)
    opened = []
    monkeypatch.setattr(files, "open_file", opened.append)
    with pytest.raises(CheckpointError, match="is no name of a file in this folder"):
        read_manifest(folder)
    assert list(verify(folder)) == ["manifest.json"]
    assert not opened


# Content that is not what a save writes


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value, as the list or object that holds it and its key there."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


HOSTILE = [
    None,
    True,
    -1,
    1.5,
    1 << 63,
    10**4000,
    1e308,
    "",
    "../x",
    "F64",
    "step-00000001",
    [],
    {},
    [[]],
    [0, 1 << 62],
]


def changed(value: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one place put to something else, doubled or gone."""
    value = copy.deepcopy(value)
    holder, key = chance.choice(list(places(value)))
    act = chance.randrange(4)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder[key]
    else:
        holder[key] = chance.choice(HOSTILE)
    return value


def test_whatever_json_says_it_is_used_or_refused_in_a_line(tmp_path, capsys):
    """One place in one of the three kinds of JSON is changed and the manifest signed anew, a few hundred times."""
    tensors = {"a": torch.ones(3, 2), "b": torch.ones(4).bfloat16(), "scalar": torch.tensor(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tensors, {"layout": "1x1x1"}, {"rng": torch.arange(3), "python": [1, [2, 3]]})
    folder, chance, messages = find_step(tmp_path), random.Random(0), []
    tensor_file = folder / "rank-00000.safetensors"
    length = struct.unpack("<Q", tensor_file.read_bytes()[:8])[0]
    data = tensor_file.read_bytes()[8 + length :]
    originals = {
        "manifest": json.loads((folder / "manifest.json").read_text())["manifest"],
        "index": json.loads((folder / "index.json").read_text()),
        "header": json.loads(tensor_file.read_bytes()[8 : 8 + length]),
    }

    def write(kind: str, value: dict[str, Any]) -> None:
        if kind == "index":
            (folder / "index.json").write_text(json.dumps(value))
        if kind == "header":
            text = json.dumps(value).encode()
            tensor_file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        rewrite_manifest(folder, lambda fields: value if kind == "manifest" else None)
        if kind != "manifest":
            reseal(folder)

    def look() -> None:
        verify(folder)
        names = stored_tensors(folder)
        read_tensors(folder, names)
        read_rank_state(folder, 0)
        load(folder, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        load(find_step(tmp_path), {}, prefix="none", check_hashes=False)
        ckpt.show(folder)

    for _ in range(40):
        for kind, original in originals.items():
            write(kind, changed(original, chance))
            try:
                ckpt.list_steps(tmp_path)
                look()
            except MeshtronError as error:
                messages.append(str(error))
            write(kind, original)
    look()
    assert len(messages) > 80
    assert not any("\n" in message for message in messages)
    capsys.readouterr()


DEEP = "[" * 100_000 + "]" * 100_000
NUMBERS = ["9" * 5000, "-1", "NaN", "1e999", "18446744073709551616", "1.5", '"1"']


@pytest.mark.parametrize("text", [DEEP, DEEP[99_800:-99_800], *NUMBERS], ids=lambda text: text[:8] + str(len(text)))
def test_json_without_end_and_numbers_that_are_none_are_refused_in_a_line(tmp_path, text):
    folder = save(tmp_path, 1)
    whole = (folder / "manifest.json").read_text()
    body = whole.partition("\n")[2].rpartition(",\n")[0]
    (folder / "manifest.json").write_text(manifest_module._sealed(re.sub(r'(?<="world_size": )1', text, body)))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged") as raised:
        read_manifest(folder)
    assert len(str(raised.value)) < 400
    (folder / "manifest.json").write_text(whole)
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace("[2]", f"[{text}]"))
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"index\.json: damaged") as raised:
        load(folder, {"a": torch.zeros(2)})
    assert len(str(raised.value)) < 400


# A later format


def resume_beside_a_later_format(folder: str) -> list[str]:
    messages = []
    with Checkpointer(folder, keep_last=1) as checkpointer:
        for look in (checkpointer.newest_sound, checkpointer.newest, lambda: checkpointer.find(folder)):
            with pytest.raises(CheckpointFormatError) as raised:
                look()
            messages.append(str(raised.value))
        with pytest.raises(CheckpointFormatError) as raised:
            load(Path(folder) / "step-00000002", {"a": torch.zeros(2)})
        messages.append(str(raised.value))
        assert checkpointer.steps() == [1]
        checkpointer.save(3, {"a": torch.zeros(2)}, {})
        checkpointer.wait()
        assert checkpointer.newest_sound() == Path(folder) / "step-00000003"
    return messages


def test_a_later_format_is_refused_by_its_version_and_is_not_damage(tmp_path, caplog, capsys):
    save(tmp_path, 1)
    later = save(tmp_path, 2)

    def change(fields: dict[str, Any]) -> dict[str, Any]:
        return {"format_version": 7, "meshtron": "9.1.0", "pieces": fields}

    rewrite_manifest(later, change)
    own = manifest_module._own_version()
    expected = (
        f"{later}/manifest.json: checkpoint format 7, written by meshtron 9.1.0; this meshtron, {own}, reads "
        "format 1: upgrade meshtron to load it"
    )
    ckpt.list_steps(tmp_path)
    assert f"LATER FORMAT {expected}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"written by a later meshtron, not checked: step-00000002$"):
        ckpt.verify(tmp_path)
    assert "DAMAGED" not in capsys.readouterr().out
    with pytest.raises(CheckpointFormatError):
        newest(tmp_path)
    for messages in run_ranks(resume_beside_a_later_format, 2, str(tmp_path)):
        assert messages == [expected] * 4
    assert "damaged" not in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]  # retention counts and deletes no other


def test_a_flipped_bit_in_the_version_is_damage(tmp_path):
    folder = save(tmp_path, 1)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 3'))
    with pytest.raises(CheckpointError, match="its hash does not match") as raised:
        read_manifest(folder)
    assert not isinstance(raised.value, CheckpointFormatError)
