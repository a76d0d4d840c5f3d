"""A Hugging Face folder to a checkpoint, and a checkpoint to a Hugging Face folder."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import meshtron
from meshtron.build import dtype_of, model_section
from meshtron.checkpoint import Checkpointer, read_manifest, read_tensors, stored_tensors, verify
from meshtron.data.tokenizer import load_tokenizer, tokenizer_file
from meshtron.errors import CheckpointError
from meshtron.hf.config import config_to_hf
from meshtron.hf.folder import CONFIG, GENERATION, TOKEN_IDS, is_hf_folder, render_json
from meshtron.hf.tokenizer import check_tokenizer, complete_tokenizer, copy_tokenizer, generation_config
from meshtron.hf.weights import WeightFiles, check_weights, hf_name, save_weights
from meshtron.models import FAMILIES
from meshtron.parallel.tied import find_ties
from meshtron.recipe import dump_recipe
from meshtron.resume import WEIGHTS
from meshtron.source import Source, find_source


def import_hf(folder: Path, out: Path) -> Path:
    """Turn a Hugging Face folder into a checkpoint, one tensor at a time.

    Args:
        folder: config.json, safetensors and tokenizer files.
        out: receives ``checkpoints/step-00000000``, recipe.toml and the tokenizer files, as a run's folder does.

    Returns:
        The step folder.

    Raises:
        CheckpointError: the model is not supported, tensors do not fit config.json, or ``out`` is not empty.
        DataError: the tokenizer has more ids than the model.
    """
    if not is_hf_folder(folder):
        raise CheckpointError(f"{folder}: no {CONFIG} there; expected a Hugging Face folder")
    source = find_source(folder)
    files = WeightFiles(folder)
    shapes, ties = _shapes(source)
    check_weights(files, shapes, ties)
    files.check_ties(ties)
    recipe = source.recipe.resolve(1)
    if tokenizer_file(folder) is not None:
        load_tokenizer(folder, recipe.model.vocab_size)
    meta = {
        "step": 0,
        "samples": 0,
        "tokens": 0,
        "recipe": dump_recipe(recipe),
        "layout": "1x1x1",
        "zero": recipe.parallel.zero,
        "meshtron": meshtron.__version__,
        "imported": True,
    }
    with _new_folder(out) as new:
        # Tensors of a mapped file: a page of them is in memory while it is being copied.
        tensors = {WEIGHTS + name: files.mapped(hf_name(name)) for name in shapes}
        with Checkpointer(new / "checkpoints", async_save=False) as checkpointer:
            checkpointer.save(0, tensors, meta)
        (new / "recipe.toml").write_text(dump_recipe(recipe), encoding="utf-8")
        copy_tokenizer(folder, new)
        (new / GENERATION).write_text(render_json(generation_config(folder)), encoding="utf-8")
    return out / "checkpoints" / "step-00000000"


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
    with_tokenizer: bool = True,
) -> Path:
    """Write a checkpoint's weights as a Hugging Face folder that transformers opens offline.

    Args:
        checkpoint: a step folder, or a run's folder (its newest whole step).
        out: the new folder.
        dtype: of every tensor; by default the run's param_dtype, or what an imported checkpoint holds.
        max_shard_bytes: most bytes in a file of several tensors.
        tokenizer: a tokenizer.json or its folder; by default the one beside the checkpoint, or its recipe's.
        with_tokenizer: whether the folder gets one at all.

    Returns:
        ``out``.

    Raises:
        DataError: there is no tokenizer, or it has more ids than the model.
        CheckpointError: there is no sound checkpoint, the model cannot be said in transformers' terms, or ``out`` is
            not empty.
    """
    source = find_source(checkpoint)
    if source.is_hf:
        raise CheckpointError(f"{checkpoint}: is a Hugging Face folder already")
    if damaged := verify(source.folder):
        listed = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
        raise CheckpointError(f"{source.folder} is damaged: {listed}")
    section = source.recipe.model
    if section.family not in FAMILIES:
        raise CheckpointError(f"model.family = {section.family!r}: transformers knows {', '.join(FAMILIES)}")
    config = config_to_hf(section.family, FAMILIES[section.family]().config(model_section(source.recipe)))
    shapes, _ = _shapes(source)
    stored = stored_tensors(source.folder)
    wrong = [name for name, shape in shapes.items() if stored.get(WEIGHTS + name, (None,))[0] != shape]
    if wrong:
        raise CheckpointError(f"{source.folder}: does not hold {', '.join(wrong[:8])} as its recipe says")
    imported = bool(read_manifest(source.folder).meta.get("imported"))
    if with_tokenizer and (tokenizer is not None or not imported):  # an imported folder may have had none
        check_tokenizer(tokenizer or source.tokenizer_path, section.vocab_size)
    tokenizer = tokenizer or source.tokenizer_path
    kept = {name: stored[WEIGHTS + name][1] for name in shapes}
    if dtype is not None or not imported:
        kept = dict.fromkeys(kept, dtype_of(dtype or source.recipe.training.param_dtype))

    def read(names: list[str]) -> Mapping[str, Tensor]:
        found = read_tensors(source.folder, [WEIGHTS + name for name in names])
        return {name: found[WEIGHTS + name] for name in names}

    generation = generation_config(tokenizer)
    main_dtype = max(set(kept.values()), key=list(kept.values()).count)
    config |= {key: value for key, value in generation.items() if key in TOKEN_IDS}
    with _new_folder(out) as new:
        save_weights(new, shapes, read, kept, max_shard_bytes)
        (new / CONFIG).write_text(render_json(config | {"torch_dtype": str(main_dtype).removeprefix("torch.")}))
        (new / GENERATION).write_text(render_json(generation))
        if with_tokenizer:
            copy_tokenizer(tokenizer, new)
            complete_tokenizer(new, tokenizer, section.max_position_embeddings)
    return out


def _shapes(source: Source) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Shape of every parameter by its first name, and later name -> first name of tied ones."""
    with torch.device("meta"):
        model = FAMILIES[source.recipe.model.family]().build(model_section(source.recipe))
    return {name: parameter.shape for name, parameter in model.named_parameters()}, find_ties(model)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name ``out`` when all is written, and vanishes when something fails."""
    out = out.resolve()  # ".." has no name
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists and is not empty; name a new folder")
    if out == Path.cwd():  # which would be pulled from under the caller's shell
        raise CheckpointError(f"{out}: is the working directory; name a new folder")
    new = out.parent / f".{out.name}.writing"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be created ({error.strerror})") from None
    try:
        yield new
        new.replace(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
