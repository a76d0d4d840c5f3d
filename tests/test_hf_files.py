"""Files of a Hugging Face folder that cannot be used: each is named, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshtron.errors import CheckpointError, DataError, MeshtronError
from meshtron.hf.convert import import_hf
from meshtron.hf.weights import INDEX, parse_size
from tests.hf_models import VOCAB, tensors_in


def test_tensors_that_do_not_fit_are_listed(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(hf_folders["llama3"], tmp_path / "a")
    tensors = tensors_in(folder)
    tensors["model.layers.0.mlp.extra.weight"] = torch.ones(2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # derived: neither needed nor a mistake
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors")
    listed = (
        r"1 missing: lm_head\.weight; 1 unexpected: model\.layers\.0\.mlp\.extra\.weight; "
        r"1 of another shape: model\.norm\.weight \(5,\) instead of \(96,\)"
    )
    with pytest.raises(CheckpointError, match=listed):
        import_hf(folder, tmp_path / "out")


def test_files_that_cannot_be_used_are_named(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(match: str, prepare) -> None:
        folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(hf_folders["llama3"], folder)
        prepare(folder)
        with pytest.raises((CheckpointError, DataError), match=match):
            import_hf(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def cut_short(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    def quantised(folder: Path) -> None:
        tensors = tensors_in(folder)
        tensors["model.norm.weight"] = torch.ones(96, dtype=torch.int8)
        save_file(tensors, folder / "model.safetensors")

    def wrong_index(folder: Path) -> None:
        names = dict.fromkeys(tensors_in(folder), "model.safetensors")
        del names["lm_head.weight"]
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    def absent_file(folder: Path) -> None:
        (folder / INDEX).write_text(
            json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
        )

    def no_files_in_index(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": 5}}))

    def saved_twice(folder: Path) -> None:
        shutil.copyfile(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
        names = dict.fromkeys(tensors_in(folder), "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    def large_tokenizer(folder: Path) -> None:
        tokens = {str(number): number for number in range(VOCAB + 1)}
        Tokenizer(WordLevel(tokens, unk_token="0")).save(str(folder / "tokenizer.json"))

    refused(r"pickled \(pytorch_model\.bin\).*save_pretrained", pickled)
    refused("not a whole safetensors file", cut_short)
    refused(r"model\.norm\.weight is I8; expected F64, F32, F16, BF16", quantised)
    refused(r"disagree about lm_head\.weight", wrong_index)
    refused(r"model-00002-of-00002\.safetensors named by", absent_file)
    refused(r"model\.safetensors and model\.safetensors\.index\.json, which does not name it", saved_twice)
    refused(rf"{VOCAB + 1} ids.*{VOCAB}", large_tokenizer)
    refused("not an index of safetensors files", no_files_in_index)
    refused(r"no \*\.safetensors files", lambda folder: (folder / "model.safetensors").unlink())
    refused("not JSON", lambda folder: (folder / "config.json").write_text("{"))
    refused("expected a JSON object", lambda folder: (folder / "config.json").write_text("[]"))


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "2KiB", "123", "7B")] == [
        5 * 10**9,
        1_500_000,
        2048,
        123,
        7,
    ]
    for text in ("", "5 apples", "-1GB", "0MB"):
        with pytest.raises(MeshtronError, match="expected a number and a unit"):
            parse_size(text)
