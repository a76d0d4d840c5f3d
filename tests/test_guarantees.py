"""What must hold at every layout besides equal numbers: equal bits, no padding, resumes of tied models."""

import pytest
import torch

from meshtron.build import build_job, build_model, layout_of
from meshtron.errors import LayoutError
from meshtron.loop import train
from meshtron.mesh import build_mesh
from meshtron.parallel.placement import local_part
from meshtron.passes import forward_backward
from meshtron.resume import seed_rng
from meshtron.testing import run_ranks
from tests.combinations import batch_of, plain, recipe_of, sharded
from tests.runs import logged, logged_lines, small_recipe, token_folder


def norms_after_twenty_steps(mesh: str, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    options = {"mesh": mesh, "labels": "ragged", "parallel.sequence_parallel": sequence_parallel}
    micro_batch = 4 if mesh.startswith("2x") else 8
    options |= {"training.param_dtype": "float32", "training.micro_batch_size": micro_batch}
    options |= {"model.num_hidden_layers": 2}
    recipe = recipe_of(options).resolve(torch.distributed.get_world_size())
    job = build_job(recipe, torch.device("cpu"))
    for step in range(20):
        forward_backward(job, batch_of(job, "ragged", step))
        job.optimizer.clip_grad_norm(1.0)
        job.optimizer.step()
    named = [item for stage in job.model.stages for item in stage.named_parameters()]
    return {name: local_part(parameter).detach().clone() for name, parameter in named if parameter.dim() == 1}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_are_bit_equal_over_tp_after_twenty_steps(sequence_parallel):
    for mesh in ("1x1x4", "2x1x2 1F1B"):
        ranks = run_ranks(norms_after_twenty_steps, 4, mesh, sequence_parallel)
        tp = 4 if mesh == "1x1x4" else 2
        for rank, norms in enumerate(ranks):
            first = ranks[rank // tp * tp]
            assert norms
            assert all(torch.equal(weight, first[name]) for name, weight in norms.items())
            assert any(not torch.equal(weight, torch.ones_like(weight)) for weight in norms.values())


def twice(options: dict) -> bool:
    first, second = sharded(options), sharded(options)
    same = all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    return same and (first.losses, first.norms) == (second.losses, second.norms)


def test_a_deterministic_run_repeats_bit_for_bit():
    options = {"mesh": "2x1x2 1F1B", "labels": "ragged", "run.deterministic": True, "training.param_dtype": "float32"}
    assert run_ranks(twice, 4, options) == [True] * 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_of_50257_needs_no_padding(tied):
    options = {
        "mesh": "1x1x4",
        "labels": "ragged",
        "model.vocab_size": 50257,
        "model.num_hidden_layers": 1,
        "model.tie_word_embeddings": tied,
    }
    expected = plain(options)
    for curve in run_ranks(sharded, 4, options):
        torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(curve.norms, expected.norms, rtol=1e-10, atol=0)
        for name, weight in curve.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-10)


def test_sizes_that_tp_does_not_divide_are_refused_before_anything_starts():
    for key, value, fits in (
        ("intermediate_size", 85, "[1, 5, 17, 85]"),
        ("num_attention_heads", 2, "[1, 2]"),
        ("num_key_value_heads", 2, "[1, 2]"),
    ):
        recipe = recipe_of({"mesh": "1x1x4", f"model.{key}": value})
        with pytest.raises(LayoutError) as refusal:
            recipe.resolve(4)
        assert f"parallel.tp: 4 does not divide model.{key}({value}): use one of {fits}" in str(refusal.value)


def test_a_tied_model_resumes_where_both_ends_share_a_rank_and_back(tmp_path):
    token_folder(tmp_path / "data")
    model = {"tie_word_embeddings": True}
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    (uninterrupted / "data").symlink_to(tmp_path / "data")
    run_ranks(train, 1, small_recipe(uninterrupted, model=model, training={"steps": 8}))
    expected = [line["loss"] for line in logged(uninterrupted)]
    parts = [  # pp = 2: an end on each rank; 1x1x2: both on one; V-shaped: both on the first rank of two
        ("2x1x2", 2, {}),
        ("1x1x2", 4, {}),
        ("2x1x1", 6, {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}),
        ("2x2x1", 8, {}),
    ]
    for layout, steps, parallel in parts:
        recipe = small_recipe(tmp_path, layout, model=model, training={"steps": steps}, parallel=parallel)
        recipe = recipe.model_copy(
            update={
                "lr_schedule": recipe.lr_schedule.model_copy(
                    update={"decay_steps": 8 - recipe.lr_schedule.warmup_steps}
                )
            }
        )
        run_ranks(train, recipe.parallel.pp * recipe.parallel.dp * recipe.parallel.tp, recipe)
    torch.testing.assert_close([line["loss"] for line in logged(tmp_path)], expected, rtol=1e-5, atol=0)


def ends_and_leftovers() -> tuple[bool, int]:
    """Whether this rank has both ends of a tie as one parameter; gradients that a weight pass left in ``.grad``."""
    options = {"mesh": "2x1x1 ZBVZeroBubble", "labels": "all", "model.tie_word_embeddings": True}
    recipe = recipe_of(options | {"training.micro_batch_size": 4}).resolve(2)
    mesh, device = build_mesh(layout_of(recipe), "cpu"), torch.device("cpu")
    ends = [
        module.weight
        for stage in build_model(recipe, mesh, device).stages
        for name, module in stage.named_modules()
        if name in ("embed_tokens", "lm_head") and hasattr(module, "weight")
    ]
    job = build_job(recipe, device)
    forward_backward(job, batch_of(job, "all", 0))
    left = [p for stage in job.model.stages for p in stage.parameters() if p.grad is not None]
    return len(ends) == 2 and ends[0] is ends[1], len(left)


def test_a_tie_survives_materialisation_and_weight_passes_leave_nothing_to_be_summed_in_bf16():
    assert run_ranks(ends_and_leftovers, 2) == [(True, 0), (False, 0)]


def forwards(mode: str) -> tuple[int, list[str]]:
    """How often layers run in a step of 4 micro-batches under a zero-bubble schedule, and what the log says."""
    options = {"mesh": "2x1x1 ZBVZeroBubble", "training.activation_checkpointing": mode}
    with logged_lines("meshtron.build") as lines:
        job = build_job(recipe_of(options | {"training.micro_batch_size": 2}).resolve(2), torch.device("cpu"))
    count = []
    for stage in job.model.stages:
        for layer in stage.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: count.append(1))
    forward_backward(job, batch_of(job, "all", 0))  # the first also finds the shapes at the borders of stages
    job.optimizer.step()
    count.clear()
    forward_backward(job, batch_of(job, "all", 1))
    return len(count), [line for line in lines if "weight gradients" in line]


def test_a_zero_bubble_schedule_recomputes_each_layer_once_a_micro_batch():
    layers, micro_batches = 2, 4
    assert run_ranks(forwards, 2, "none") == [(layers * micro_batches, [])] * 2
    said = "ZBVZeroBubble: weight gradients come with those of inputs, as layers are recomputed"
    assert run_ranks(forwards, 2, "full") == [(2 * layers * micro_batches, [said])] * 2


def random_numbers() -> float:
    recipe = recipe_of({"mesh": "1x2x2"}).resolve(4)
    seed_rng(build_job(recipe, torch.device("cpu")), 3)
    return torch.rand(()).item()


def test_dropout_is_equal_within_a_tp_group_and_different_over_dp():
    first, second, third, fourth = run_ranks(random_numbers, 4)
    assert first == second
    assert third == fourth
    assert first != third


def losses_of(dtype: str, steps: int) -> list[float]:
    options = {"mesh": "1x2x1", "training.param_dtype": dtype, "optimizer.lr": 3e-3, "optimizer.eps": 1e-6}
    recipe = recipe_of(options).resolve(2)
    job = build_job(recipe, torch.device("cpu"))
    curve = []
    for step in range(steps):
        curve.append(float(forward_backward(job, batch_of(job, "all", step % 4))))
        job.optimizer.clip_grad_norm(1.0)
        job.optimizer.step()
    assert all(master.dtype == torch.float32 for master in job.optimizer.masters().values())
    return curve


def test_bfloat16_follows_float32():
    narrow, wide = (run_ranks(losses_of, 2, dtype, 60)[0] for dtype in ("bfloat16", "float32"))
    assert wide[-1] < 0.7 * wide[0]  # it learns the four batches by heart
    assert max(abs(a - b) for a, b in zip(narrow, wide, strict=True)) < 0.05
