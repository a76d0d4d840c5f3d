"""Wrong plans are named before anything runs; explain says what a right one does."""

import io
import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import meshtron as mt
from meshtron.models.llama import Llama, tensor_parallel_plan
from meshtron.models.llama_spec import LlamaSpec
from meshtron.testing import run_ranks
from tests.layouts import small_config
from tests.test_gpt2 import example

UNEVEN = LlamaSpec.uneven


def llama(**changes) -> Llama:
    with torch.device("meta"):
        return Llama(small_config(**changes))


def gpt2(*, packed: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = example("model").GPT2(example("model").Config(64, 8, 32, 4, 4, 0.0))
    if packed:
        mt.unpack_linear(model, "blocks.*.attn.qkv", parts=3)
    return model


def test_a_rank_without_any_of_a_vocabulary_is_refused():
    plan = tensor_parallel_plan(True)
    with pytest.raises(mt.PlanError, match=r"9 leaves nothing for the last rank of tp = 4; tp can be 1, 2, 3, 5, 9"):
        mt.check_plan(llama(vocab_size=9), plan, 4, uneven=UNEVEN)
    mt.check_plan(llama(vocab_size=9), plan, 2, uneven=UNEVEN)


class Locked(nn.Module):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lock = nn.Embedding(8, 8), threading.Lock()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.table(x)))


def test_a_model_that_cannot_be_copied_is_not_rehearsed():
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mt.check_plan(Locked(), plan, 2)
    with pytest.raises(mt.PlanError, match=r"a copy of the model does not run .*cannot pickle '_thread.lock'"):
        mt.check_plan(Locked(), plan, 2, example=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("tp", [2, 4])
def test_right_plans_pass(tp):
    for sequence_parallel in (True, False):
        plan = tensor_parallel_plan(sequence_parallel, qk_norm=True)
        mt.check_plan(llama(qk_norm=True, vocab_size=101), plan, tp, uneven=UNEVEN)
    mt.check_plan(gpt2(), example("train").PLAN, tp)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def wrapped_first() -> tuple[list[bool], float]:
    """Which weights are sharded where wrapping came before the plan, and how far the output is from the plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(Feed(), Feed())
    x = torch.randn(3, 8)
    expected = plain(x)
    model = nn.Sequential(*(checkpoint_wrapper(layer) for layer in plain))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    mt.check_plan(model, plan, 2, example=x)
    mesh = mt.build_mesh(mt.Layout(tp=2), "cpu")
    mt.apply_tensor_parallel(model, mesh["tp"], plan)
    sharded = [isinstance(p, DTensor) for name, p in model.named_parameters() if name.endswith("weight")]
    return sharded, (model(x) - expected).abs().max().item()


def test_plan_keys_name_modules_inside_torchs_wrappers():
    for sharded, difference in run_ranks(wrapped_first, 2):
        assert sharded == [True] * 4
        assert difference < 1e-6


def test_a_module_that_torchs_style_does_not_take_is_named():
    model = nn.Sequential(nn.Conv1d(8, 32, 1), nn.GELU(), nn.Conv1d(32, 8, 1))
    with pytest.raises(mt.PlanError, match=r"0: ColwiseParallel shards nn.Linear and nn.Embedding, found Conv1d"):
        mt.check_plan(model, {"0": ColwiseParallel(), "2": RowwiseParallel()}, 2)


@pytest.mark.parametrize(
    ("forgotten", "message"),
    [
        (
            "layers.*.self_attn.o_proj",
            r"layers.0.self_attn.q_proj: Colwise.* leaves .*self_attn.o_proj\?",
        ),
        ("layers.*.mlp.down_proj", r"layers.0.mlp.gate_proj: ColwiseParallel leaves .*layers.0.mlp.down_proj\?"),
        (
            "layers.*.self_attn.q_proj",
            r"layers.0.self_attn: scaled_dot_product_attention joins .*q_proj.weight, whole",
        ),
        ("layers.*.mlp.up_proj", r"layers.0.mlp fails at the shapes"),
        ("layers.*.mlp", r"layers.0 fails at the shapes"),
        ("layers.*.self_attn", r"layers.0.self_attn fails at the shapes"),
        ("layers.*.input_layernorm", r"layers.0.input_layernorm: rms_norm joins .*SequenceParallel"),
        ("norm", r"norm: rms_norm joins what comes from norm.weight, whole.* share of .*down_proj:"),
    ],
)
def test_a_forgotten_line_is_named(forgotten, message):
    plan = tensor_parallel_plan(True)
    del plan[forgotten]
    with pytest.raises(mt.PlanError, match=message):
        mt.check_plan(llama(), plan, 4, uneven=UNEVEN)


def test_a_rowwise_without_its_colwise_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(mt.PlanError, match=r"1: RowwiseParallel takes its input in parts.*\(0\?\)"):
        mt.check_plan(model, {"1": RowwiseParallel()}, 2)
    mt.check_plan(model, {"1": RowwiseParallel(input_layouts=Replicate())}, 2)
    mt.check_plan(model, {"0": ColwiseParallel(), "1": RowwiseParallel()}, 2, example=torch.ones(2, 8))


class OneKeyHead(nn.Module):
    """Attention whose query heads share one key and one value head, however these are brought to them."""

    def __init__(self, heads: str) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.heads == "expanded":
            k, v = (y.expand_as(q) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads == "grouped")
        return self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads", ["grouped", "expanded"])
@pytest.mark.parametrize("output", [None, Replicate()])
def test_fewer_key_heads_than_ranks_are_named(heads, output):
    plan = {"q": ColwiseParallel(), "o": RowwiseParallel()}
    if output is not None:  # gathered again, but the gradient of what is gathered is not added up
        plan |= {"k": ColwiseParallel(output_layouts=output), "v": ColwiseParallel(output_layouts=output)}
    with pytest.raises(mt.PlanError, match=r"OneKeyHead: scaled_dot.* joins what comes from v.*key-value heads"):
        mt.check_plan(OneKeyHead(heads), plan, 2, example=torch.zeros(1, 4, 8))


def test_what_has_no_gradient_may_meet_a_share():
    model = OneKeyHead("grouped")
    for part in (model.k, model.v):
        part.requires_grad_(False)
    mt.check_plan(model, {"q": ColwiseParallel(), "o": RowwiseParallel()}, 2, example=torch.zeros(1, 4, 8))


def fixed_heads(self, x):
    batch, sequence, _ = x.shape
    q, k, v = (part.view(batch, sequence, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
    return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, sequence, -1))


def fixed_heads_and_free_head_size(self, x):
    batch, sequence, _ = x.shape
    q, k, v = (part.view(batch, sequence, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
    return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, sequence, -1))


def the_same_by_hand(self, x):
    batch, sequence, _ = x.shape
    q, k, v = (part.view(batch, sequence, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
    return self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(batch, sequence, -1))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (fixed_heads, r"blocks.0.attn fails at the shapes of one of tp = 2 ranks.*view\(batch, sequence, -1"),
        (fixed_heads_and_free_head_size, r"blocks.0.attn: attention is given \(2, 4, 8, 4\).*assumes all heads"),
        (the_same_by_hand, r"blocks.0.attn: attention is given \(2, 4, 8, 4\).*assumes all heads"),
    ],
)
def test_a_forward_that_assumes_all_heads_is_named(forward, message):
    model = gpt2()
    for block in model.blocks:
        block.attn.forward = forward.__get__(block.attn)
    with pytest.raises(mt.PlanError, match=message):
        mt.check_plan(model, example("train").PLAN, 2)


def test_a_fused_projection_that_would_be_mixed_up_is_named():
    plan = dict(example("train").PLAN)
    plan["blocks.*.attn.qkv"] = plan.pop("blocks.*.attn.qkv.*")
    with pytest.raises(mt.PlanError, match=r"blocks.0.attn.qkv: its output is cut by chunk.*unpack_linear"):
        mt.check_plan(gpt2(packed=False), plan, 2)


def test_unpacking_refuses_what_does_not_fit():
    model = nn.Sequential(nn.Linear(4, 12))
    with pytest.raises(mt.PlanError, match="0 has 12 rows, which parts = 5 do not make up"):
        mt.unpack_linear(model, "0", parts=5)
    with pytest.raises(mt.PlanError, match="matches no module"):
        mt.unpack_linear(model, "1")
    with pytest.raises(mt.PlanError, match="the model itself cannot be replaced"):
        mt.unpack_linear(model[0], "")
    with pytest.raises(mt.PlanError, match=r"'0': expected a style such as ColwiseParallel\(\), found 'colwise'"):
        mt.check_plan(model, {"0": "colwise"}, 2)
    x, whole = torch.randn(2, 4), model[0]
    expected = whole(x)
    mt.unpack_linear(model, "0", parts=[4, 2, 6])
    torch.testing.assert_close(model(x), expected)


def test_explain_names_key_placement_shapes_and_bytes_of_every_parameter():
    model, out = llama(vocab_size=101), io.StringIO()
    mt.explain(model, mt.Layout(dp=2, tp=4), tensor_parallel_plan(True), file=out)
    lines = out.getvalue().splitlines()
    for name, _ in model.named_parameters():
        assert sum(line.split()[:1] == [name] for line in lines) == 1, name
    row = next(line for line in lines if line.startswith("layers.3.mlp.down_proj.weight"))
    assert "layers.*.mlp.down_proj" in row
    assert "(32, 16)" in row
    assert row.endswith("2,048")
    assert "(26, 32) on tp 0-2, (23, 32) on tp 3" in next(line for line in lines if line.startswith("embed_tokens"))
    whole = next(line for line in lines if line.startswith("whole on every tp rank"))
    assert "layers.0.input_layernorm.weight" in whole
    assert "q_proj" not in whole
    assert any(line.startswith("layers.*.mlp ") and "Shard(dim=1)" in line and "Replicate" in line for line in lines)
