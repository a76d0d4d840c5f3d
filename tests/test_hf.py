"""Hugging Face folders in and out: weights, layouts, round trips, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from meshtron.build import place_model
from meshtron.checkpoint import find_step, read_manifest
from meshtron.cli import app
from meshtron.data import PrepareOptions, prepare_corpus
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import CheckpointError, MeshtronError, RecipeError
from meshtron.generate.load import recipe_for_inference
from meshtron.hf.convert import export_hf, import_hf
from meshtron.hf.recipe import fill_from_hf
from meshtron.hf.weights import INDEX, WeightFiles, parse_size
from meshtron.loop import train
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.pipeline import forward_stages
from meshtron.parallel.placement import shard_range
from meshtron.recipe import (
    CheckpointSection,
    DataSection,
    ModelSection,
    ParallelSection,
    Recipe,
    RunSection,
    Source,
    TrainingSection,
)
from meshtron.source import find_source
from meshtron.testing import run_ranks
from tests.hf_models import CASES, logits_of, model_of, tokens_of, write

TOKENS = tokens_of()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of every case, with one tokenizer for all."""
    root = tmp_path_factory.mktemp("hf")
    tokenizer = train_tokenizer(["for x in y: return x\n" * 5], 260)
    made = {}
    for case in CASES:
        made[case] = write(case, root / case)
        tokenizer.save(str(root / case / "tokenizer.json"))
    return made


def _logits(folder: Path, layout: str) -> tuple[range, torch.Tensor] | None:
    """Logits of TOKENS at a layout, ``"2x1x3"``: this rank's columns and their range; None before the last stage."""
    parsed, source = Layout.parse(layout), find_source(folder)
    options = [f"parallel.pp={parsed.pp}", f"parallel.tp={parsed.tp}", "training.param_dtype=float32"]
    recipe = recipe_for_inference(source.recipe, options, parsed.world_size)
    mesh = build_mesh(parsed, "cpu")
    model = place_model(recipe, mesh, torch.device("cpu"))
    for stage in model.stages:
        for parameter in stage.parameters():
            torch.nn.init.constant_(parameter.to_local() if hasattr(parameter, "to_local") else parameter, torch.nan)
    source.fill(model)
    hidden = torch.empty(*TOKENS.shape, recipe.model.hidden_size, device="meta")
    logits = forward_stages(model.stages, mesh["pp"], "1F1B", TOKENS, hidden)
    return None if logits is None else (shard_range(263, parsed.tp, mesh.get_local_rank("tp")), logits.detach())


def _logits_of_all(folders: list[Path], layout: str) -> list[tuple[range, torch.Tensor] | None]:
    return [_logits(folder, layout) for folder in folders]


# Every case has 3 or 6 key-value heads, so tp = 2 is for those with 6.
@pytest.mark.parametrize("layout", ["1x1x1", "1x1x2", "1x1x3", "2x1x1", "4x1x1", "2x1x3", "2x1x2"])
def test_logits_equal_those_of_transformers_at_every_layout(folders: dict[str, Path], layout: str) -> None:
    parsed = Layout.parse(layout)
    cases = [case for case in CASES if model_of(case).config.num_key_value_heads % parsed.tp == 0]
    assert cases
    ranks = run_ranks(_logits_of_all, parsed.world_size, [folders[case] for case in cases], layout)
    for number, case in enumerate(cases):
        expected, columns = logits_of(case, TOKENS), set()
        for found in (rank[number] for rank in ranks):
            if found is not None:
                held, logits = found
                columns |= set(held)
                torch.testing.assert_close(
                    logits,
                    expected[..., held.start : held.stop],
                    atol=1e-4,
                    rtol=0,
                    msg=lambda m, c=case: f"{c}: {m}",
                )
        assert columns == set(range(263))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_export_of_import_is_bit_equal(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import_hf(folders[case], tmp_path / "in")
    out = export_hf(tmp_path / "in", tmp_path / "out")
    _assert_equal(_tensors(out), _tensors(folders[case]))
    config = transformers.AutoConfig.from_pretrained(out)
    for key, value in model_of(case).config.to_dict().items():
        if key not in ("transformers_version", "max_window_layers", "architectures", "_name_or_path"):
            assert config.to_dict()[key] == value, key
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(theirs(TOKENS).logits, logits_of(case, TOKENS))
    assert theirs.generation_config.eos_token_id == 2


def test_export_writes_the_dtype_and_file_size_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    write("llama3", tmp_path / "bf16")
    tensors = {name: tensor.bfloat16() for name, tensor in _tensors(tmp_path / "bf16").items()}
    save_file(tensors, tmp_path / "bf16" / "model.safetensors")
    import_hf(tmp_path / "bf16", tmp_path / "in")
    _assert_equal(_tensors(export_hf(tmp_path / "in", tmp_path / "same")), tensors)
    run = CliRunner().invoke
    command = ["export-hf", str(tmp_path / "in"), str(tmp_path / "half"), "--dtype", "float16"]
    done = run(app, [*command, "--max-shard-size", "40KB"])
    assert done.exit_code == 0, done.output
    out = tmp_path / "half"
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 4
    assert all(file.stat().st_size < 60_000 for file in files)
    _assert_equal(_tensors(out), {name: tensor.half() for name, tensor in tensors.items()})
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"]) == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_float16_never_overflows_silently(tmp_path: Path) -> None:
    write("llama3", tmp_path / "a")
    tensors = _tensors(tmp_path / "a")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    import_hf(tmp_path / "a", tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"norm\.weight: has values that float16 cannot hold"):
        export_hf(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if "writing" in path.name] == []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    (root / "text" / "a.py").write_text("for x in y:\n    return x + 1\n" * 400)
    prepare_corpus([str(root / "text")], root / "data", PrepareOptions(tokenizer=str(folders["llama2"]), workers=1))
    return root / "data"


def _recipe(folder: Path, corpus: Path, run: Path, **parallel) -> Recipe:
    return Recipe(
        run=RunSection(dir=str(run), device="cpu"),
        model=ModelSection(from_hf=str(folder)),
        parallel=ParallelSection(**parallel),
        training=TrainingSection(steps=3, seq_len=24, global_batch_size=8, param_dtype="float32"),
        data=DataSection(train=(Source(path=str(corpus)),)),
    )


def _train_all(recipes: list[Recipe]) -> None:
    for recipe in recipes:
        train(recipe)


@pytest.mark.parametrize(
    ("cases", "layout"),
    [
        (["llama2"], {"pp": 2, "dp": 2, "tp": 2}),
        (["llama3.2", "mistral", "qwen2", "qwen3-bias"], {"pp": 2, "dp": 1, "tp": 3}),
    ],
    ids=str,
)
def test_a_run_from_a_folder_exports_what_it_trained(
    cases: list[str], layout: dict, folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    recipes = [_recipe(folders[case], corpus, tmp_path / case, **layout) for case in cases]
    run_ranks(_train_all, layout["pp"] * layout["dp"] * layout["tp"], recipes)
    for case in cases:
        first = json.loads((tmp_path / case / "metrics.jsonl").read_text().splitlines()[0])
        tokens = torch.tensor(json.loads(_first_batch(corpus)))
        with torch.no_grad():
            loss = model_of(case)(tokens, labels=tokens).loss.item()
        assert first["loss"] == pytest.approx(loss, abs=0.3)  # it began from the folder's weights, not at ln(263)
        out = export_hf(tmp_path / case, tmp_path / f"{case}-out")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        moved = (theirs(TOKENS).logits - logits_of(case, TOKENS)).abs().max()
        assert moved > 1e-3
        (found,) = run_ranks(_logits, 1, tmp_path / case, "1x1x1")
        torch.testing.assert_close(found[1], theirs(TOKENS).logits.detach(), atol=1e-4, rtol=0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.decode(tokenizer("for x in y")["input_ids"]) == "for x in y"
        assert tokenizer.eos_token == "<|endoftext|>"


def test_an_imported_checkpoint_gives_a_run_its_weights(
    folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    import_hf(folders["qwen3"], tmp_path / "in")
    direct = _recipe(folders["qwen3"], corpus, tmp_path / "direct", pp=2)
    section = fill_from_hf(direct).model.model_copy(update={"from_hf": ""})
    resumed = direct.model_copy(
        update={
            "run": RunSection(dir=str(tmp_path / "resumed"), device="cpu"),
            "model": section,
            "checkpoint": CheckpointSection(resume=str(tmp_path / "in"), load="weights"),
        }
    )
    run_ranks(_train_all, 2, [direct, resumed])
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("direct", "resumed")]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def _first_batch(corpus: Path) -> str:
    from meshtron.data import open_source

    samples = open_source(corpus, seq_len=24, vocab_size=263)
    return json.dumps([samples.dataset[index].tokens.tolist() for index in range(8)])


def test_tied_heads_that_are_there(tmp_path: Path) -> None:
    folder = write("llama3.2", tmp_path / "a")
    tensors = _tensors(folder)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    (found,) = run_ranks(_logits, 1, folder, "1x1x1")
    torch.testing.assert_close(found[1], logits_of("llama3.2", TOKENS), atol=1e-4, rtol=0)
    import_hf(folder, tmp_path / "in")
    tensors["lm_head.weight"][100, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    differs = r"lm_head\.weight differs from model\.embed_tokens\.weight"
    with pytest.raises(AssertionError, match=differs):
        run_ranks(_logits, 1, folder, "1x1x1")
    with pytest.raises(CheckpointError, match=differs):
        import_hf(folder, tmp_path / "in2")


def test_tensors_that_do_not_fit_are_listed(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama3"], tmp_path / "a")
    tensors = _tensors(folder)
    tensors["model.layers.0.mlp.extra.weight"] = torch.ones(2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # derived: neither needed nor a mistake
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors")
    listed = (
        r"1 missing: lm_head\.weight; 1 unexpected: model\.layers\.0\.mlp\.extra\.weight; "
        r"1 of another shape: model\.norm\.weight \(5,\) instead of \(48,\)"
    )
    with pytest.raises(CheckpointError, match=listed):
        import_hf(folder, tmp_path / "out")


def test_files_that_cannot_be_used_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(match: str, prepare) -> None:
        folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders["llama3"], folder)
        prepare(folder)
        with pytest.raises(CheckpointError, match=match):
            import_hf(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def cut_short(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    def quantised(folder: Path) -> None:
        tensors = _tensors(folder)
        tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
        save_file(tensors, folder / "model.safetensors")

    def wrong_index(folder: Path) -> None:
        names = dict.fromkeys(_tensors(folder), "model.safetensors")
        del names["lm_head.weight"]
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    def absent_file(folder: Path) -> None:
        (folder / INDEX).write_text(
            json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
        )

    refused(r"pickled \(pytorch_model\.bin\).*save_pretrained", pickled)
    refused("not a whole safetensors file", cut_short)
    refused(r"model\.norm\.weight is I8; expected F64, F32, F16, BF16", quantised)
    refused(r"disagree about lm_head\.weight", wrong_index)
    refused(r"model-00002-of-00002\.safetensors named by", absent_file)
    refused(r"no \*\.safetensors files", lambda folder: (folder / "model.safetensors").unlink())
    refused("not JSON", lambda folder: (folder / "config.json").write_text("{"))
    refused("expected a JSON object", lambda folder: (folder / "config.json").write_text("[]"))


def test_nothing_is_overwritten(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    import_hf(folders["llama3"], tmp_path / "out")  # an empty folder will do
    for make in (
        lambda: import_hf(folders["llama3"], tmp_path / "out"),
        lambda: export_hf(tmp_path / "out", tmp_path),
    ):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            make()
    with pytest.raises(CheckpointError, match="is a Hugging Face folder already"):
        export_hf(folders["llama3"], tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected a Hugging Face folder"):
        import_hf(tmp_path / "out", tmp_path / "other")


def test_a_damaged_checkpoint_is_not_exported(folders: dict[str, Path], tmp_path: Path) -> None:
    step = import_hf(folders["llama3"], tmp_path / "in")
    assert read_manifest(find_step(tmp_path / "in")).meta["imported"]
    file = step / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: rank-00000\.safetensors"):
        export_hf(tmp_path / "in", tmp_path / "out")


def test_a_recipe_may_adjust_but_not_contradict_the_folder(folders: dict[str, Path], corpus: Path) -> None:
    recipe = _recipe(folders["qwen3"], corpus, Path("run"))
    model = fill_from_hf(recipe).model
    assert (model.family, model.head_dim, model.num_key_value_heads, model.vocab_size) == ("qwen3", 16, 3, 263)
    assert fill_from_hf(fill_from_hf(recipe)) == fill_from_hf(recipe)
    longer = ModelSection(from_hf=str(folders["qwen3"]), max_position_embeddings=512, rope_theta=5e6)
    model = fill_from_hf(recipe.model_copy(update={"model": longer})).model
    assert (model.max_position_embeddings, model.rope_theta) == (512, 5e6)
    for wrong in ({"hidden_size": 64}, {"family": "llama"}, {"tie_word_embeddings": False}):
        section = ModelSection(from_hf=str(folders["qwen3"]), **wrong)
        with pytest.raises(RecipeError, match=f"model.{next(iter(wrong))}: .*config.json has"):
            fill_from_hf(recipe.model_copy(update={"model": section}))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fill_from_hf(_recipe(corpus, corpus, Path("run")))


def _load_shard(folder: Path) -> tuple[int, int, int]:
    """Bytes of this rank's parameters, bytes read from the files, and growth of the peak of resident memory."""
    mesh = build_mesh(Layout(pp=2, tp=2), "cpu")
    options = ["parallel.pp=2", "parallel.tp=2", "training.param_dtype=bfloat16"]
    source = find_source(folder)
    model = place_model(recipe_for_inference(source.recipe, options, 4), mesh, torch.device("cpu"))
    own = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.stages[0].parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, read = _resident("VmRSS"), WeightFiles.read
    total = 0

    def counted(self: WeightFiles, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        nonlocal total
        part = read(self, name, slices)
        total += part.nbytes
        return part

    WeightFiles.read = counted  # type: ignore[method-assign]
    try:
        source.fill(model)
    finally:
        WeightFiles.read = read  # type: ignore[method-assign]
    return own, total, _resident("VmHWM") - before


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_a_rank_reads_and_holds_about_its_own_shard(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 380e6
    for own, read, peak in run_ranks(_load_shard, 4, tmp_path):
        print(f"file {size / 1e6:.0f} MB, shard {own / 1e6:.0f}, read {read / 1e6:.0f}, peak {peak / 1e6:.0f}")
        assert own < 0.3 * size
        assert read == own
        assert peak < own + 0.15 * size


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
