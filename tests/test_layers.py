"""Recomputation changes memory, not numbers; attention backends; the trace of chosen steps."""

import gc
import gzip
import json
import time
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshtron.build import build_job
from meshtron.errors import RecipeError
from meshtron.initialize import init_weights
from meshtron.layers import convert_to_float8, recompute_layers
from meshtron.models.attention import attention_backend, causal_attention
from meshtron.models.llama import Llama
from meshtron.timing import Stopwatch, profiler, scheduled_garbage_collection
from meshtron.world import process_group
from tests.layouts import small_config
from tests.runs import small_recipe

CPU = torch.device("cpu")


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.dropout = torch.nn.Linear(16, 16), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.mix(x)).relu()


def gradients_with_dropout(mode: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Dropping() for _ in range(2))
    recompute_layers(layers, mode)
    x = torch.randn(4, 16)
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_drops_the_same_when_a_layer_is_computed_again(mode):
    expected = gradients_with_dropout("none")
    assert all(torch.equal(a, b) for a, b in zip(gradients_with_dropout(mode), expected, strict=True))


def gradients(mode: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a small Llama, and how many elements of activations its forward pass keeps."""
    model = Llama(small_config(num_hidden_layers=2))
    init_weights([model], seed=0)
    recompute_layers(model.layers, mode)
    ids = torch.arange(32).view(2, 16)
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids).square().mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(kept.values())


def test_recomputed_layers_give_bit_equal_gradients_and_keep_less():
    (expected, most), (selective, _), (full, least) = (gradients(mode) for mode in ("none", "selective", "full"))
    assert expected.keys() == selective.keys() == full.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, selective[name]), name
        assert torch.equal(gradient, full[name]), name
    assert least < most / 2


class Counted(TorchDispatchMode):
    """Counts the operators that are run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls[operator.name().partition("::")[2].partition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


def run_in_backward(mode: str) -> Counter[str]:
    """Operators that the backward pass of a small Llama runs, its recomputation included."""
    model = Llama(small_config(num_hidden_layers=2))
    init_weights([model], seed=0)
    recompute_layers(model.layers, mode)
    loss = model(torch.arange(32).view(2, 16)).square().mean()
    with Counted() as counted:
        loss.backward()
    return counted.calls


def test_what_is_computed_again():
    none, selective, full = (run_in_backward(mode) for mode in ("none", "selective", "full"))
    assert {counts["_scaled_dot_product_flash_attention_for_cpu"] for counts in (none, selective, full)} == {0}
    assert selective["silu"] == full["silu"] == 2
    assert selective["mm"] == none["mm"]
    assert full["mm"] == none["mm"] + 2 * 5  # q, k, v, gate and up; what o and down give is a kept input


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # all that a CPU can do
@pytest.mark.parametrize("window", [None, 5])
def test_flex_equals_scaled_dot_product_attention(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 16) for heads in (4, 2, 2))
    expected = causal_attention(q, k, v, window=window)
    torch.testing.assert_close(attention_backend("flex")(q, k, v, window=window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")
def test_what_needs_a_gpu_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"flash_attn.*needs a CUDA device"):
        attention_backend("flash_attn")
    with pytest.raises(RecipeError, match="float8 = 'rowwise' needs a GPU"):
        convert_to_float8(torch.nn.Linear(4, 4), "rowwise")
    assert attention_backend("auto") is causal_attention
    with pytest.raises(RecipeError, match="use one of auto, sdpa, flash_attn, flex"):
        attention_backend("fast")


def test_trace_holds_the_chosen_steps(tmp_path):
    with profiler("2:3", tmp_path) as before:
        for step in range(1, 6):
            before(step)
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(4).sum()
    (trace,) = (tmp_path / "traces").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("step ")} == {"step 2", "step 3"}


def test_a_run_that_fails_leaves_no_profiler_running(tmp_path):
    for _ in range(2):  # torch refuses a second one while the first is running
        with pytest.raises(ZeroDivisionError), profiler("1:3", tmp_path) as before:
            before(1) or 1 / 0
    assert not list(tmp_path.iterdir())


def test_garbage_is_collected_on_schedule_only():
    with scheduled_garbage_collection() as collect:
        assert not gc.isenabled()
        collect(1)
    assert gc.isenabled()


def test_stopwatch_leaves_out_what_is_not_a_step():
    watch = Stopwatch()
    watch.count(0.5)
    watch.count(1.5)
    with watch.stopped(CPU):
        time.sleep(0.2)
    step_s, waited_s = watch.lap()
    assert step_s < 0.1
    assert waited_s == 1.0


def test_only_as_many_layers_of_a_stage_are_recomputed_as_asked_for(tmp_path):
    recipe = small_recipe(
        tmp_path,
        training={
            "activation_checkpointing": "full",
            "activation_checkpointing_layers": 3,
            "global_batch_size": 2,
            "micro_batch_size": 2,
        },
    )
    calls: list[int] = []
    with process_group(CPU):
        job = build_job(recipe.resolve(1), CPU)
        (stage,) = job.model.stages
        for number, layer in enumerate(stage.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
        tokens = torch.arange(32).view(2, 16)
        stage(tokens).sum().backward()
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3]
