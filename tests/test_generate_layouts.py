"""The same text at every layout, from Hugging Face folders and from training checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshtron.build import build_job
from meshtron.checkpoint import Checkpointer
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import CheckpointError, DataError, LayoutError, RecipeError
from meshtron.generate.program import Request, complete
from meshtron.generate.sampling import Sampling
from meshtron.recipe import DataSection, ModelSection, ParallelSection, Recipe, Source, TrainingSection
from meshtron.resume import Progress, save
from meshtron.testing import run_ranks

PROMPTS = ["for x in y:", "x", "def f(a, b):\n    return"]
SAMPLING = Sampling(temperature=1.0, top_p=0.9, seed=5)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def hf_folder(hf_folders: dict[str, Path]) -> Path:
    return hf_folders["llama3.2"]


def _completions(checkpoint: Path, overrides: list[str], samplings: list[Sampling]) -> list[list[str]]:
    """Completions of PROMPTS on this rank, and that only rank 0 writes them."""
    results = []
    for sampling in samplings:
        written: list[str] = []
        request = Request(checkpoint=checkpoint, prompts=PROMPTS, max_new_tokens=12, sampling=sampling)
        results.append(complete(request, ["training.param_dtype=float32", *overrides], written.append))
        is_writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        assert written == ([text + "\n" for text in results[-1]] if is_writer else [])
    return results


LAYOUTS = {
    1: [["parallel.tp=1"]],
    2: [["parallel.pp=2"], ["parallel.tp=2"], ["parallel.dp=2"]],
    3: [["parallel.tp=3"]],
    4: [["parallel.pp=4"]],
    6: [["parallel.pp=2", "parallel.tp=3"]],
}
OTHERS = ("mistral", "qwen2", "qwen3-bias")  # a window, biases, norms of q and k


def _completions_of_layouts(checkpoint: Path, layouts: list[list[str]]) -> list[list[list[str]]]:
    return [_completions(checkpoint, layout, [Sampling(), SAMPLING]) for layout in layouts]


def _completions_of_folders(folders: list[Path], layout: list[str]) -> list[list[list[str]]]:
    return [_completions(folder, layout, [Sampling(), SAMPLING]) for folder in folders]


def test_a_hugging_face_folder_gives_the_text_of_transformers_at_every_layout(hf_folder: Path) -> None:
    greedy = _greedy_of_transformers("llama3.2", hf_folder)
    sampled = _completions(hf_folder, [], [SAMPLING])[0]
    assert sampled != greedy
    for world_size, layouts in LAYOUTS.items():
        for results in run_ranks(_completions_of_layouts, world_size, hf_folder, layouts):
            assert results == [[greedy, sampled]] * len(layouts)


def test_every_family_gives_one_text_at_every_layout(hf_folders: dict[str, Path]) -> None:
    folders = [hf_folders[case] for case in OTHERS]
    expected = [
        [_greedy_of_transformers(case, hf_folders[case]), _completions(hf_folders[case], [], [SAMPLING])[0]]
        for case in OTHERS
    ]
    assert all(greedy != sampled for greedy, sampled in expected)
    for layout in (["parallel.tp=3"], ["parallel.pp=2", "parallel.tp=2"]):
        world_size = 3 if len(layout) == 1 else 4
        for results in run_ranks(_completions_of_folders, world_size, folders, layout):
            assert results == expected


def _greedy_of_transformers(case: str, folder: Path) -> list[str]:
    from tokenizers import Tokenizer

    from tests.hf_models import model_of

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model_of(case).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :].tolist()))
    return texts


def _save_a_run(folder: Path, tokenizer: Path, changes: dict) -> None:
    """A checkpoint of initial weights, large enough that greedy text is not one token over and over."""
    recipe = Recipe(
        model=ModelSection(
            vocab_size=263,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=4,
            num_attention_heads=6,
            init_std=0.3,
            max_position_embeddings=64,
        ),
        parallel=ParallelSection(**changes),
        training=TrainingSection(steps=1, seq_len=16, global_batch_size=8, param_dtype="float32"),
        data=DataSection(train=(Source(path=str(tokenizer)),)),
    ).resolve(torch.distributed.get_world_size())
    job = build_job(recipe, torch.device("cpu"))
    with Checkpointer(folder / "checkpoints", async_save=False) as checkpointer:
        save(job, checkpointer, Progress(step=3))


def test_a_training_checkpoint_gives_one_text_at_every_layout(tmp_path: Path, hf_folder: Path) -> None:
    run_ranks(_save_a_run, 8, tmp_path / "a", hf_folder, {"pp": 2, "dp": 2, "tp": 2})
    run_ranks(_save_a_run, 4, tmp_path / "b", hf_folder, {"pp": 2, "dp": 2, "schedule": "Interleaved1F1B"})
    expected = _completions(tmp_path / "a" / "checkpoints" / "step-00000003", [], [Sampling(), SAMPLING])
    assert len(set(expected[0])) == 3
    layouts = [["parallel.tp=2"], ["parallel.pp=2"], ["parallel.pp=2", "parallel.schedule=Interleaved1F1B"]]
    for folder in (tmp_path / "a", tmp_path / "b"):
        for results in run_ranks(_completions_of_layouts, 2, folder, layouts):
            assert results == [expected] * len(layouts)


def test_generate_py_prints_only_completions(hf_folder: Path) -> None:
    command = [sys.executable, str(ROOT / "generate.py"), str(hf_folder), "--prompt", PROMPTS[0], "--prompt", "x"]
    command += ["--max-new-tokens", "12", "training.param_dtype=float32", "run.device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    expected = _completions(hf_folder, [], [Sampling()])[0]
    assert done.stdout == f"{expected[0]}\n{expected[1]}\n"


def _request(checkpoint: Path, **changes) -> Request:
    return Request(checkpoint=checkpoint, **({"prompts": ["for x"], "max_new_tokens": 12} | changes))


def test_stop_strings_and_streaming(hf_folder: Path) -> None:
    options = ["training.param_dtype=float32"]
    whole = complete(_request(hf_folder), options, lambda text: None)[0]
    stop = whole[4:6]
    cut = complete(_request(hf_folder, stop=["never there", stop]), options, lambda text: None)[0]
    assert cut == whole[: whole.index(stop)]
    pieces: list[str] = []
    complete(_request(hf_folder, stop=[stop], stream=True), options, pieces.append)
    assert len(pieces) > 2
    assert "".join(pieces) == cut + "\n"


def test_mistakes_are_named_before_a_model_is_built(hf_folder: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, overrides: tuple[str, ...] = (), **changes) -> None:
        with pytest.raises(error, match=match):
            complete(_request(changes.pop("checkpoint", hf_folder), **changes), overrides, lambda text: None)

    refused(RecipeError, "--stream takes one --prompt, found 2", prompts=["a", "b"], stream=True)
    refused(RecipeError, "--max-new-tokens 0", max_new_tokens=0)
    refused(DataError, "prompt 1 of 1 has 300 tokens, but the model takes at most 96", prompts=["z" * 300])
    refused(DataError, "prompt 1 of 1 has no tokens", prompts=[""])
    refused(RecipeError, "override training.steps: only parallel", overrides=("training.steps=3",))
    refused(RecipeError, 'parallel.schdule: unknown key.*"?schedule"?', overrides=("parallel.schdule=1F1B",))
    refused(LayoutError, "parallel", overrides=("parallel.tp=2",))
    refused(CheckpointError, "no such folder", checkpoint=tmp_path / "nothing")
    refused(CheckpointError, "holds no checkpoint", checkpoint=tmp_path)
    train_tokenizer(["for x in y: return x\n" * 5, "while True: pass " * 9], 290).save(str(hf_folder / "big.json"))
    folder = tmp_path / "big"
    folder.mkdir()
    for file in hf_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(hf_folder / "big.json")
    refused(DataError, "the tokenizer has .* ids, but the model's vocabulary has 263", checkpoint=folder)
