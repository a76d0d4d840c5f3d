"""import-hf and export-hf: bit-equal round trips, dtypes, file sizes, tokenizers, and nothing overwritten."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from meshtron.checkpoint import find_step, read_manifest
from meshtron.cli import app
from meshtron.data import PrepareOptions, prepare_corpus
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import CheckpointError, DataError
from meshtron.hf.convert import export_hf, import_hf
from meshtron.hf.weights import INDEX
from meshtron.loop import train
from tests.hf_models import CASES, logits_of, model_of, tensors_in, tokens_of, write
from tests.hf_ranks import peak_of
from tests.runs import small_recipe

TOKENS = tokens_of()


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_export_of_import_is_bit_equal(case: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    import_hf(hf_folders[case], tmp_path / "in")
    out = export_hf(tmp_path / "in", tmp_path / "out")
    _assert_equal(tensors_in(out), tensors_in(hf_folders[case]))
    config = transformers.AutoConfig.from_pretrained(out)
    for key, value in model_of(case).config.to_dict().items():
        if key not in ("transformers_version", "max_window_layers", "architectures", "_name_or_path"):
            assert config.to_dict()[key] == value, key
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(theirs(TOKENS).logits, logits_of(case, TOKENS))
    assert theirs.generation_config.eos_token_id == 2


def test_export_writes_the_dtype_and_file_size_asked_for(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    write("llama3", tmp_path / "bf16")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_in(tmp_path / "bf16").items()}
    save_file(tensors, tmp_path / "bf16" / "model.safetensors")
    import_hf(tmp_path / "bf16", tmp_path / "in")
    _assert_equal(tensors_in(export_hf(tmp_path / "in", tmp_path / "same")), tensors)
    run = CliRunner().invoke
    for dtype in (torch.bfloat16, torch.float32):
        out = export_hf(tmp_path / "in", tmp_path / str(dtype), dtype=str(dtype).removeprefix("torch."))
        _assert_equal(tensors_in(out), {name: tensor.to(dtype) for name, tensor in tensors.items()})
        assert transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == dtype
    command = ["export-hf", str(tmp_path / "in"), str(tmp_path / "half"), "--dtype", "float16"]
    done = run(app, [*command, "--max-shard-size", "40KB"])
    assert done.exit_code == 0, done.output
    out = tmp_path / "half"
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 4
    assert all(file.stat().st_size < 60_000 for file in files)
    _assert_equal(tensors_in(out), {name: tensor.half() for name, tensor in tensors.items()})
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"]) == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_float16_never_overflows_silently(tmp_path: Path) -> None:
    write("llama3", tmp_path / "a")
    tensors = tensors_in(tmp_path / "a")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    import_hf(tmp_path / "a", tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"norm\.weight: has values that float16 cannot hold"):
        export_hf(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if "writing" in path.name] == []


def test_nothing_is_overwritten(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    import_hf(hf_folders["llama3"], tmp_path / "out")  # an empty folder will do
    for make in (
        lambda: import_hf(hf_folders["llama3"], tmp_path / "out"),
        lambda: export_hf(tmp_path / "out", tmp_path),
    ):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            make()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"sub: cannot be created \(Not a directory\)"):
        export_hf(tmp_path / "out", tmp_path / "file" / "sub")
    with pytest.raises(CheckpointError, match="is a Hugging Face folder already"):
        export_hf(hf_folders["llama3"], tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected a Hugging Face folder"):
        import_hf(tmp_path / "out", tmp_path / "other")


def test_a_damaged_checkpoint_is_not_exported(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    step = import_hf(hf_folders["llama3"], tmp_path / "in")
    assert read_manifest(find_step(tmp_path / "in")).meta["imported"]
    file = step / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: rank-00000\.safetensors"):
        export_hf(tmp_path / "in", tmp_path / "out")


def test_the_exported_tokenizer_is_the_one_that_made_the_data(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    """A run whose data was prepared with a published tokenizer keeps all that its folder says."""
    published = tmp_path / "published"
    published.mkdir()
    tokenizer = train_tokenizer(["for x in y: return x\n" * 5], 258)
    tokenizer.add_special_tokens(["<s>", "<|end|>", "<|turn|>"])
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = template
    tokenizer.save(str(published / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>"}
    (published / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": "{{ messages }}"}))
    (tmp_path / "a.txt").write_text("for x in y: return x\n" * 50)
    options = PrepareOptions(tokenizer=str(published), eos_token="<|turn|>", workers=1)
    prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "data", options)
    train(small_recipe(tmp_path, model={"vocab_size": 264}, training={"steps": 1, "seq_len": 8}))
    out = export_hf(tmp_path / "run", tmp_path / "out")
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (out, published))
    text = "for x<|turn|>é"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == ("<s>", "<|end|>", "{{ messages }}")
    separator = tokenizer.token_to_id("<|turn|>")  # what ended documents ends a text
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == separator

    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"data: no tokenizer\.json there; name one with --tokenizer, or export with"):
        export_hf(tmp_path / "run", tmp_path / "out2")
    bare = export_hf(tmp_path / "run", tmp_path / "bare", with_tokenizer=False)
    assert sorted(path.name for path in bare.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    command = ["export-hf", str(tmp_path / "run"), str(tmp_path / "named"), "--tokenizer", str(tmp_path / "moved")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for file in out.iterdir():
        assert (tmp_path / "named" / file.name).read_bytes() == file.read_bytes(), file.name


def test_import_maps_its_files_and_export_holds_one_at_a_time(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(num_attention_heads=8, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    del tensors
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert file_bytes > 75e6
    with peak_of("RssAnon") as imported:  # pages of the mapped file are the system's to drop
        import_hf(tmp_path, tmp_path / "in")
    with peak_of("RssAnon") as exported:
        export_hf(tmp_path / "in", tmp_path / "out", max_shard_bytes=10_000_000)
    assert imported() < 0.2 * file_bytes
    assert exported() < 0.4 * file_bytes
