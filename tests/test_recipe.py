"""The recipe: what is accepted, what is refused and in which words, and that it survives TOML."""

import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtron.errors import LayoutError, RecipeError
from meshtron.recipe import (
    DataSection,
    ModelSection,
    ParallelSection,
    Recipe,
    Source,
    TrainingSection,
    dump_recipe,
    load_recipe,
    parse_overrides,
    recipe_schema,
)

MINIMAL = """
[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 64
[training]
steps = 10
seq_len = 8
global_batch_size = 8
[data]
train = [{path = "corpus"}]
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(MINIMAL)
    return file


def refusal(path, *overrides, world=None):
    """The lines of the error that loading (and resolving) raises."""
    with pytest.raises((RecipeError, LayoutError)) as caught:
        load_recipe(path, overrides).resolve(world)
    return str(caught.value).splitlines()


def test_defaults_follow_from_other_values(path):
    recipe = load_recipe(path)
    assert (recipe.model.head_dim, recipe.run.dir) == (4, "runs/run")
    resolved = recipe.resolve(4)
    assert resolved.parallel.dp == 4
    assert resolved.num_microbatches == 2
    assert resolved.model.max_position_embeddings == 8
    assert resolved.lr_schedule.decay_steps == 10
    assert resolved.tokenizer.path == "corpus"
    assert resolved.resolve(4) == resolved
    assert recipe.parallel.dp == -1  # the recipe itself is never changed
    other = load_recipe(path, ["run.name=other", "model.num_key_value_heads=4", "training.param_dtype=float64"])
    assert other.run.dir == "runs/other"
    assert other.training.grad_accum_dtype == "float64"


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1F1B", 1),
        ("AFAB", 1),
        ("Interleaved1F1B", 2),
        ("LoopedBFS", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_stages_per_rank_follows_the_schedule(schedule, stages):
    assert ParallelSection(schedule=schedule).stages_per_rank == stages


def test_every_mistake_is_reported_once_with_key_file_and_nearest_name(path):
    path.write_text(
        MINIMAL.replace("hidden_size = 16", "hiden_size = 16\nhidden_size = '16'").replace("steps", "lr = 3\nstep")
        + "[parallell]\npp = 2\n[metrics]\nwandb = 'offlin'\n"
    )
    lines = refusal(path, "data.train=[{path=3}]", "checkpoint.resume=1.5")
    assert sorted(lines) == sorted(
        [
            f'{path}: model.hidden_size: expected a whole number, found "16"',
            f'{path}: model.hiden_size: unknown key; did you mean "hidden_size"?',
            f"{path}: training.lr: unknown key; did you mean optimizer.lr?",
            f'{path}: training.step: unknown key; did you mean "steps"?',
            f"{path}: training.steps: missing",
            f'{path}: parallell: unknown key; did you mean "parallel"?',
            f'{path}: metrics.wandb: expected "off", "offline" or "online", found "offlin"; did you mean "offline"?',
            "data.train[0].path: expected text in quotes, found 3",
            "checkpoint.resume: expected text in quotes or a whole number, found 1.5",
        ]
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=data/x", 'data.train: expected a list, found "data/x"; did you mean [{path = "data/x"}]?'),
        ("training.compile=True", 'training.compile: expected true or false, found "True"'),
        ("training.steps=1e3", "training.steps: expected a whole number, found 1000.0"),
        ("training.steps=0", "training.steps: expected at least 1, found 0"),
        ("training.steps=true", "training.steps: expected a whole number, found true"),
        ("optimizer.lr=nan", "optimizer.lr: expected a finite number, found nan"),
        ("optimizer.betas=[0.9]", "optimizer.betas[1]: missing"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas[1]: expected less than 1.0, found 1.0"),
        ("model=3", "override 'model=3': expected section.key=value"),
        ("model.hidden_size", "override 'model.hidden_size': expected section.key=value"),
        (
            "data.train.path=x",
            "override data.train.path: data.train is not a table; give data.train as a whole",
        ),
        ("profile.steps=9:3", 'profile.steps: expected "first:last" with 1 <= first <= last, found "9:3"'),
        ("validation.interval=5", "validation.data: missing (a list of sources)"),
        (
            "checkpoint.load=weights",
            'checkpoint.load: "weights" begins a new run: checkpoint.resume must be the path of another run\'s '
            'checkpoint, found "auto"',
        ),
        ("parallel.dp=0", "parallel.dp: expected at least 1, or -1 for what is left of the world, found 0"),
        ("parallel.zero=2", "parallel.zero: expected 0 or 1, found 2"),
        (
            "model.num_key_value_heads=3",
            "model.num_key_value_heads: 3 does not divide num_attention_heads(4)",
        ),
        (
            "model.family=lama",
            'model.family: expected "llama", "mistral", "qwen2", "qwen3" or "package.module:Name", found "lama"; did',
        ),
        (
            "model.rope_scaling.rope_type=yarn",
            'model.rope_scaling.rope_type: expected "default", "linear" or "llama3"',
        ),
        ("parallel.schedule=1f1b", 'did you mean "1F1B"?'),
        ("data.train=[]", "data.train: missing"),
    ],
)
def test_wrong_value_is_refused(path, override, message):
    (line,) = refusal(path, override)
    assert message in line


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (
            ["parallel.pp=2", "parallel.dp=3", "parallel.tp=2"],
            8,
            "pp(2) * dp(3) * tp(2) = 12, but the world has 8 ranks",
        ),
        (
            ["parallel.tp=2", "parallel.pp=2"],
            6,
            "pp(2) * tp(2) = 4, but the world has 6 ranks: start a multiple of 4",
        ),
        (
            ["training.micro_batch_size=3"],
            2,
            "8 is not a multiple of micro_batch_size(3) * dp(2) = 6: use 6 or 12, or a",
        ),
        (
            ["parallel.tp=4"],
            4,
            "parallel.tp: 4 does not divide model.num_key_value_heads(2): use one of [1, 2]",
        ),
        (["parallel.tp=2", "training.seq_len=9"], 2, "9 is not a multiple of tp(2)"),
        (["parallel.pp=8"], 8, "pp(8) * stages_per_rank(1) = 8 stages, but model.num_hidden_layers is 4"),
        (
            ["parallel.pp=4", "training.micro_batch_size=4"],
            4,
            "1F1B needs at least as many micro-batches as its 4 stages",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=DualPipeV", "training.micro_batch_size=4"],
            2,
            "as its 4 stages, but",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=Interleaved1F1B", "training.global_batch_size=5"],
            2,
            "= 5 micro-batches a step: use a global_batch_size of 4 or 6",
        ),
        (
            ["training.activation_checkpointing_layers=2"],
            1,
            '2 layers of each stage, but training.activation_checkpointing is "none": set it',
        ),
        (
            ["lr_schedule.kind=wsd", "lr_schedule.warmup_steps=2", "lr_schedule.decay_steps=9"],
            1,
            "lr_schedule.decay_steps: 9, but training.steps(10) - warmup_steps(2) = 8: wsd comes down from the peak",
        ),
        (["profile.steps=11:12"], 1, "profile.steps: tracing begins at step 11, after the last one, 10"),
        (["model.max_position_embeddings=4"], 1, "8 tokens, but model.max_position_embeddings is 4"),
    ],
)
def test_layout_that_does_not_fit_is_refused_with_the_numbers(path, overrides, world, message):
    (line,) = refusal(path, *overrides, world=world)
    assert message in line


@pytest.mark.parametrize(
    ("schedule", "stages", "message"),
    [
        ("1F1B", 2, "1F1B has 1 stage a rank, found 2"),
        ("Interleaved1F1B", 1, "needs at least 2 stages a rank, found 1: use 1F1B"),
        ("DualPipeV", 3, "exactly 2 stages a rank, found 3"),
    ],
)
def test_stages_that_a_schedule_cannot_have_are_refused(path, schedule, stages, message):
    (line,) = refusal(path, f"parallel.schedule={schedule}", f"parallel.stages_per_rank={stages}")
    assert message in line


def test_several_reasons_against_a_layout_come_together(path):
    lines = refusal(path, "parallel.tp=4", "training.global_batch_size=7", "training.seq_len=10", world=8)
    assert len(lines) == 3


def test_overrides_are_toml_values_or_plain_text():
    texts = ["run.name=a=b c", "run.name=2026", "optimizer.lr=1e-3", "training.compile=true"]
    values = [{"run.name": "a=b c"}, {"run.name": "2026"}, {"optimizer.lr": 1e-3}, {"training.compile": True}]
    assert [parse_overrides([text]) for text in texts] == values
    assert parse_overrides(['run.name="two words"'])["run.name"] == "two words"
    assert parse_overrides(["checkpoint.resume=20"])["checkpoint.resume"] == 20
    assert parse_overrides(["run.name='x'\nseed = 3"])["run.name"] == "'x'\nseed = 3"
    assert parse_overrides(['data.train=[{path="x"}, {path="y", weight=2.0}]'])["data.train"][1]["weight"] == 2.0


def test_a_recipe_built_in_python_is_checked_alike(path):
    parts = {
        "training": TrainingSection(steps=10, seq_len=8, global_batch_size=8),
        "data": {"train": [Source(path="corpus")]},
    }
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    recipe = Recipe(model=ModelSection(**sizes, num_key_value_heads=2, vocab_size=64), **parts)
    assert recipe == load_recipe(path)
    with pytest.raises(RecipeError, match=r"^ModelSection: vocab_siz: unknown key; did you mean \"vocab_size\""):
        ModelSection(**sizes, vocab_siz=3)
    with pytest.raises(RecipeError, match=r"^model.vocab_size: missing"):
        Recipe(model=sizes, **parts)
    with pytest.raises(RecipeError, match="missing"):
        DataSection()


def test_a_family_of_ones_own_takes_further_keys(path):
    recipe = load_recipe(path, ["model.family=my.module:Spec", "model.num_experts=4"])
    assert recipe.model.model_extra == {"num_experts": 4}
    assert "num_experts = 4" in dump_recipe(recipe)
    assert 'unknown key; did you mean "num_hidden_layers"?' in refusal(path, "model.num_layers=4")[0]


def test_sizes_may_be_left_to_a_hugging_face_folder(path):
    path.write_text(MINIMAL.replace(MINIMAL[: MINIMAL.index("[training]")], "[model]\nfrom_hf = 'some/folder'\n"))
    assert load_recipe(path).resolve(2).model.hidden_size == 0


text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
positive = st.floats(min_value=1e-12, max_value=1e6)


@settings(deadline=None, max_examples=60)
@given(
    text,
    text,
    positive,
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(text, positive), min_size=1, max_size=3),
)
def test_a_dumped_recipe_loads_back_equal(tmp_path_factory, name, pattern, lr, world, sources):
    recipe = Recipe(
        run={"name": name},
        model={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": lr},
        },
        training={"steps": 10, "seq_len": 8, "global_batch_size": 8},
        optimizer={"lr": lr, "groups": [{"match": pattern}, {"match": name, "weight_decay": 0.0}]},
        data={"train": [{"path": path, "weight": weight} for path, weight in sources]},
    ).resolve(world)
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(file) == recipe


def test_files_that_are_no_recipe(tmp_path, path):
    assert refusal(tmp_path / "smal.toml")[0].endswith('no such file; did you mean "small.toml"?')
    assert "cannot be read" in refusal(tmp_path)[0]
    for content, message in [
        (b"a = = 1", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "model: missing"),
    ]:
        (tmp_path / "bad.toml").write_bytes(content)
        assert message in refusal(tmp_path / "bad.toml")[0]
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_recipe(path).training.steps == 10


def test_schema_describes_every_key():
    schema = recipe_schema()
    for name, definition in schema["$defs"].items():
        for key, field in definition["properties"].items():
            assert field.get("description"), f"{name}.{key} has no description"
    assert schema["$defs"]["TrainingSection"]["required"] == ["steps", "seq_len", "global_batch_size"]


def test_recipe_does_without_torch():
    code = "import sys, meshtron.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dump_is_toml(path):
    assert tomllib.loads(dump_recipe(load_recipe(path)))["training"]["steps"] == 10
