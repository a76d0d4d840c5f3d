"""Fit a recipe to a number of ranks: fill in what follows, refuse what cannot work, with the numbers."""

import os
from typing import TYPE_CHECKING, Any

from meshtron.errors import LayoutError

if TYPE_CHECKING:
    from meshtron.recipe.sections import Recipe

ONE_STAGE_SCHEDULES = ("AFAB", "1F1B")
LATE_DECAYS = ("wsd", "1-sqrt")  # kinds of lr_schedule that hold the peak and decay at the end of the run
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")  # each rank holds a stage of the way down and one of the way up


def resolve(recipe: "Recipe", world_size: int) -> "Recipe":
    """See ``Recipe.resolve``."""
    dp, problems = _data_parallel(recipe, world_size)
    problems += _model_problems(recipe) + _data_problems(recipe) + _length_problems(recipe)
    if dp:
        problems += _batch_problems(recipe, dp)
    if problems:
        raise LayoutError("\n".join(problems))
    model, training, schedule = recipe.model, recipe.training, recipe.lr_schedule
    longest = max([training.seq_len, *(stage.seq_len for stage in recipe.data.stages)])
    rest = max(training.steps - schedule.warmup_steps, 1)
    final = min(max(training.steps // 5, 1), rest) if schedule.kind in LATE_DECAYS else rest
    derived: dict[str, dict[str, Any]] = {
        "parallel": {"dp": dp},
        "model": {"max_position_embeddings": model.max_position_embeddings or longest},
        "lr_schedule": {"decay_steps": schedule.decay_steps or final},
        "tokenizer": {"path": recipe.tokenizer.path or _tokenizer_beside_data(recipe)},
    }
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=values) for name, values in derived.items()}
    )


def _tokenizer_beside_data(recipe: "Recipe") -> str:
    """The folder of the first source, or nothing where that is not a folder."""
    path = recipe.data_stages[0].train[0].path
    return "" if path.startswith(("hf:", "py:")) else path


def _data_problems(recipe: "Recipe") -> list[str]:
    problems = []
    trained = [source.path for stage in recipe.data_stages for source in stage.train]
    for path in dict.fromkeys(source.path for source in recipe.validation.data):
        if _same_place(path, trained):
            problems.append(
                f"validation.data: {path} is trained on too, so its loss says nothing about other text: hold some "
                "out with `meshtron prepare --val-fraction`"
            )
    streamed = next((path for path in trained if path.startswith("hf:")), None)
    if streamed and not recipe.tokenizer.path:
        problems.append(f"tokenizer.path: missing; {streamed} is tokenized while it is read")
    return problems


def _length_problems(recipe: "Recipe") -> list[str]:
    """What the number of steps leaves no room for."""
    steps, schedule, problems = recipe.training.steps, recipe.lr_schedule, []
    rest = steps - schedule.warmup_steps
    if schedule.kind in LATE_DECAYS and schedule.decay_steps > max(rest, 1):
        problems.append(
            f"lr_schedule.decay_steps: {schedule.decay_steps}, but training.steps({steps}) - "
            f"warmup_steps({schedule.warmup_steps}) = {rest}: {schedule.kind} comes down from the peak over the last "
            "decay_steps of the run; lower it, or use 0 for a fifth of the run"
        )
    first = int(recipe.profile.steps.partition(":")[0] or 0)
    if first > steps:
        problems.append(f"profile.steps: tracing begins at step {first}, after the last one, {steps}")
    return problems


def _same_place(path: str, others: list[str]) -> bool:
    return any(path == other or os.path.realpath(path) == os.path.realpath(other) for other in others)


def _data_parallel(recipe: "Recipe", world_size: int) -> tuple[int, list[str]]:
    """The size of the dp axis, or 0 and what is wrong."""
    pp, dp, tp = recipe.parallel.pp, recipe.parallel.dp, recipe.parallel.tp
    world = f"the world has {world_size} rank{'s' * (world_size != 1)}"
    if dp == -1:
        if world_size % (pp * tp):
            return 0, [
                f"parallel: pp({pp}) * tp({tp}) = {pp * tp}, but {world}: start a multiple of {pp * tp} ranks "
                "or change pp and tp"
            ]
        return world_size // (pp * tp), []
    if pp * dp * tp != world_size:
        return 0, [
            f"parallel: pp({pp}) * dp({dp}) * tp({tp}) = {pp * dp * tp}, but {world}: start {pp * dp * tp} ranks, "
            "change one of them, or use dp = -1 for what is left of the world"
        ]
    return dp, []


def _model_problems(recipe: "Recipe") -> list[str]:
    """What does not divide over tp or pp; a model whose sizes are not in the recipe is checked when it is built."""
    model, training, parallel, tp = recipe.model, recipe.training, recipe.parallel, recipe.parallel.tp
    problems = []
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model, name)
        if heads % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            problems.append(f"parallel.tp: {tp} does not divide model.{name}({heads}): use one of {fits}")
    width = model.intermediate_size
    if width % tp and ":" not in model.family:  # what a family of one's own does with it is not known here
        fits = [n for n in range(1, width + 1) if width % n == 0][:8]
        problems.append(f"parallel.tp: {tp} does not divide model.intermediate_size({width}): use one of {fits}")
    lengths = {"training.seq_len": training.seq_len}
    lengths |= {f"data.stages[{i}].seq_len": s.seq_len for i, s in enumerate(recipe.data.stages) if s.seq_len}
    for key, length in lengths.items():
        if parallel.sequence_parallel and length % tp:
            problems.append(
                f"{key}: {length} is not a multiple of tp({tp}), as parallel.sequence_parallel needs: "
                f"use {_multiples_around(length, tp)}"
            )
        if model.max_position_embeddings and length > model.max_position_embeddings:
            problems.append(
                f"{key}: {length} tokens, but model.max_position_embeddings is {model.max_position_embeddings}"
            )
    stages = parallel.pp * parallel.stages_per_rank
    if 0 < model.num_hidden_layers < stages:
        problems.append(
            f"parallel: pp({parallel.pp}) * stages_per_rank({parallel.stages_per_rank}) = {stages} stages, but "
            f"model.num_hidden_layers is {model.num_hidden_layers}: each stage needs a layer"
        )
    if recipe.data.document_mask and model.attention == "flash_attn":
        problems.append(
            'model.attention: "flash_attn" has no document masks, as data.document_mask needs: use "auto", "sdpa" or '
            '"flex"'
        )
    if training.activation_checkpointing == "none" and training.activation_checkpointing_layers:
        problems.append(
            f"training.activation_checkpointing_layers: {training.activation_checkpointing_layers} layers of each "
            'stage, but training.activation_checkpointing is "none": set it to "selective" or "full"'
        )
    return problems


def _batch_problems(recipe: "Recipe", dp: int) -> list[str]:
    training, parallel = recipe.training, recipe.parallel
    batch, micro = training.global_batch_size, training.micro_batch_size
    if batch % (micro * dp):
        fits = [n for n in range(1, batch // dp + 1) if batch % (n * dp) == 0]
        or_micro = f", or a micro_batch_size of {_some(fits)}" if fits else ""
        return [
            f"training.global_batch_size: {batch} is not a multiple of micro_batch_size({micro}) * dp({dp}) = "
            f"{micro * dp}: use {_multiples_around(batch, micro * dp)}{or_micro}"
        ]
    if parallel.pp == 1:
        return []
    microbatches = batch // (micro * dp)
    stages = parallel.pp * parallel.stages_per_rank
    arithmetic = (
        f"global_batch_size({batch}) / (micro_batch_size({micro}) * dp({dp})) = {microbatches} "
        f"micro-batch{'es' * (microbatches != 1)} a step"
    )
    if parallel.schedule in ("1F1B", "DualPipeV") and microbatches < stages:
        return [
            f"parallel.schedule: {parallel.schedule} needs at least as many micro-batches as its {stages} stages, "
            f"but {arithmetic}: use a global_batch_size of {stages * micro * dp} or more, or another schedule"
        ]
    rounds = max(1, microbatches // parallel.pp)
    if parallel.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        fits = [n for n in range(1, 4 * microbatches) if n % max(1, n // parallel.pp) == 0]
        below = max(n for n in fits if n < microbatches)
        above = min(n for n in fits if n > microbatches)
        return [
            f"parallel.schedule: {parallel.schedule} works through micro-batches in rounds of equal size over "
            f"pp({parallel.pp}), but {arithmetic}: use a global_batch_size of {below * micro * dp} or "
            f"{above * micro * dp}"
        ]
    return []


def _multiples_around(value: int, of: int) -> str:
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else str(above)


def _some(values: list[int]) -> str:
    """At most the six largest, in order."""
    return ", ".join(map(str, values[-6:]))
