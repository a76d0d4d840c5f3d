"""The schema of a recipe: one frozen class a section, one line below each field with its unit and default.

Defaults that follow from other values are filled in as early as they can be: those inside a section when it is
built, those that need another section or the number of ranks by ``Recipe.resolve``.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from meshtron.recipe import layout
from meshtron.recipe.problems import UNION_TAGS, Problems, nearest, recipe_error

FAMILIES = ("llama",)
"""Families that ship with meshtron; any other is given as ``package.module:Name``."""

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys refused, no conversion between types, no change after it is built."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = type(self).__name__
            raise recipe_error(error, type(self), lambda key: "" if name == "Recipe" else f"{name}: ") from None

    # Without this flag pydantic would also call __init__ for a section inside a recipe, and the first mistake
    # would hide those in other sections.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class RunSection(Section):
    """Where a run happens and what it is called."""

    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run. Default "run"."""
    dir: str = Field(default_factory=lambda earlier: f"runs/{earlier['name']}")
    """Folder that receives recipe.toml, metrics.jsonl and checkpoints. Default "runs/<name>"."""
    seed: Count = 0
    """Seed of initial weights, sample order and dropout. Default 0."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device type; "auto" takes a GPU where there is one. Default "auto"."""
    deterministic: bool = False
    """Only operations whose result is the same, bit for bit, at each run (slower). Default false."""


class RopeScalingSection(Section):
    """How rotary frequencies are stretched past the original context (Hugging Face's ``rope_scaling``)."""

    rope_type: Literal["default", "linear", "llama3"]
    """Kind of stretching."""
    factor: Annotated[float, Field(gt=0)] = 1.0
    """How many times longer the context gets. Default 1.0."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths above original / this are stretched in full (llama3). Default 1.0."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths below original / this are kept (llama3). Default 4.0."""
    original_max_position_embeddings: Positive = 8192
    """Context, in tokens, before stretching (llama3). Default 8192."""


class ModelSection(Section):
    """The model, under Hugging Face's names. With ``from_hf`` the sizes come from that folder's config.json."""

    family: str = "llama"
    """"llama", or "package.module:Name" for a model of your own. Default "llama"."""
    from_hf: str = ""
    """Hugging Face folder that gives sizes and initial weights; "" for none. Default ""."""
    hidden_size: Count = 0
    """Width of the hidden states. Required unless from_hf is set."""
    intermediate_size: Count = 0
    """Width of the feed-forward layer. Required unless from_hf is set."""
    num_hidden_layers: Count = 0
    """Transformer blocks. Required unless from_hf is set."""
    num_attention_heads: Count = 0
    """Query heads. Required unless from_hf is set."""
    num_key_value_heads: Count = Field(default_factory=lambda earlier: earlier["num_attention_heads"])
    """Key and value heads. Default num_attention_heads."""
    head_dim: Count = Field(
        default_factory=lambda earlier: earlier["hidden_size"] // max(1, earlier["num_attention_heads"])
    )
    """Size of a head. Default hidden_size / num_attention_heads."""
    vocab_size: Count = 0
    """Rows of the embedding; at least the tokenizer's vocabulary. Required unless from_hf is set."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square inside each norm. Default 1e-5."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary wavelengths. Default 10000.0."""
    rope_scaling: RopeScalingSection | None = None
    """Table that stretches rotary frequencies. Default none."""
    max_position_embeddings: Count = 0
    """Longest sequence in tokens; 0 for training.seq_len. Default 0."""
    tie_word_embeddings: bool = False
    """Whether the head and the embedding are one parameter. Default false."""
    attention_bias: bool = False
    """Whether q, k, v and o projections have biases. Default false."""
    attention: Literal["auto", "sdpa", "flash_attn", "flex"] = "auto"
    """Attention backend; "auto" takes the fastest of the device. Default "auto"."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights. Default 0.02."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if _model_tag(self) == "custom family":
            return self
        found = [] if self.from_hf else _missing_or_odd_sizes(self)
        if self.family not in FAMILIES:
            families = ", ".join(f'"{family}"' for family in FAMILIES)
            hint = nearest(self.family, FAMILIES)
            found.append(("family", f'expected {families} or "package.module:Name", found "{self.family}"{hint}'))
        Problems.raise_if(found)
        return self


class CustomModelSection(ModelSection):
    """A model of your own (``family = "package.module:Name"``): any further keys are in ``model_extra``."""

    model_config = ConfigDict(extra="allow")


def _model_tag(model: Any) -> str:
    family = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    shipped, custom = UNION_TAGS
    return custom if isinstance(family, str) and ":" in family else shipped


def _missing_or_odd_sizes(model: ModelSection) -> list[tuple[str, str]]:
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [name for name in required if getattr(model, name) == 0]:
        return [(name, "missing (a whole number of at least 1)") for name in missing]
    heads, kv_heads, found = model.num_attention_heads, model.num_key_value_heads, list[tuple[str, str]]()
    if kv_heads == 0 or heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        found.append(
            (
                "num_key_value_heads",
                f"{kv_heads} does not divide num_attention_heads({heads}): use one of {divisors}",
            )
        )
    if "head_dim" not in model.model_fields_set and model.hidden_size % heads:
        found.append(
            (
                "hidden_size",
                f"{model.hidden_size} is not a multiple of num_attention_heads({heads}): set head_dim",
            )
        )
    elif model.head_dim == 0 or model.head_dim % 2:
        found.append(("head_dim", f"{model.head_dim} is not even, as rotary position embedding needs"))
    return found


class ParallelSection(Section):
    """How the model is spread over ranks: pp * dp * tp must be the number of ranks."""

    pp: Positive = 1
    """Pipeline-parallel ranks. Default 1."""
    dp: int = -1
    """Data-parallel ranks; -1 for what is left of the world. Default -1."""
    tp: Positive = 1
    """Tensor-parallel ranks; keep them inside a node. Default 1."""
    sequence_parallel: bool = True
    """Whether tp ranks also divide the sequence between the sharded layers. Default true."""
    schedule: Literal[
        "AFAB", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Pipeline schedule. Default "1F1B"."""
    stages_per_rank: Positive = Field(
        default_factory=lambda earlier: 1 if earlier["schedule"] in layout.ONE_STAGE_SCHEDULES else 2
    )
    """Pipeline stages on each pp rank. Default 1 for AFAB and 1F1B, 2 for the other schedules."""
    zero: Literal[0, 1] = 1
    """1: optimizer state sharded over dp (ZeRO-1); 0: kept whole on each dp rank. Default 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = []
        if self.dp != -1 and self.dp < 1:
            found.append(("dp", f"expected at least 1, or -1 for what is left of the world, found {self.dp}"))
        stages, schedule = self.stages_per_rank, self.schedule
        if schedule in layout.ONE_STAGE_SCHEDULES and stages != 1:
            found.append(
                (
                    "stages_per_rank",
                    f"{schedule} has 1 stage a rank, found {stages}: Interleaved1F1B has several",
                )
            )
        elif schedule in layout.V_SCHEDULES and stages != 2:
            found.append(("stages_per_rank", f"{schedule} has exactly 2 stages a rank, found {stages}"))
        elif schedule not in layout.ONE_STAGE_SCHEDULES and stages < 2:
            found.append(("stages_per_rank", f"{schedule} needs at least 2 stages a rank, found {stages}: use 1F1B"))
        Problems.raise_if(found)
        return self


class TrainingSection(Section):
    """Length, batch and numerics of training."""

    steps: Positive
    """Optimizer steps of the whole run. Required."""
    seq_len: Positive
    """Tokens in a sequence. Required."""
    global_batch_size: Positive
    """Sequences a step over all ranks. Required."""
    micro_batch_size: Positive = 1
    """Sequences in one forward pass of a rank. Default 1."""
    param_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of parameters and activations; the optimizer's masters are at least float32. Default "bfloat16"."""
    grad_accum_dtype: Annotated[Literal["float32", "float64"], Field(validate_default=True)] = "float32"
    """Type in which gradients are summed; float64 whenever param_dtype is. Default "float32"."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of keeping. Default "none"."""
    compile: bool = False
    """Whether blocks go through torch.compile. Default false."""
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Scaling of float8 matrix products (needs torchao and an H100 or newer). Default "off"."""
    loss_chunks: Count = 0
    """Parts of the sequence whose logits are held one after another; 0 for automatic. Default 0."""
    max_skipped_steps: Positive = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite. Default 10."""

    @field_validator("grad_accum_dtype")
    @classmethod
    def _at_least_param_dtype(cls, value: str, info: ValidationInfo) -> str:
        return "float64" if info.data.get("param_dtype") == "float64" else value


class OptimizerGroup(Section):
    """Parameters that get a learning rate or weight decay of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern of parameter names, such as "embed_tokens.*"."""
    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate. Default 1.0."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of the group. Default optimizer.weight_decay."""


class OptimizerSection(Section):
    """AdamW (Loshchilov & Hutter, 2019) and clipping."""

    name: Literal["adamw"] = "adamw"
    """Optimizer. Default "adamw"."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate. Default 3e-4."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """Decay of the first and second moment. Default [0.9, 0.95]."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment. Default 1e-8."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases get none. Default 0.1."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 for no clipping. Default 1.0."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which Adam's moments are kept. Default "float32"."""
    groups: Annotated[tuple[OptimizerGroup, ...], Field(strict=False)] = ()
    """Groups with a learning rate or weight decay of their own; the first match counts. Default []."""


class LRScheduleSection(Section):
    """Learning rate as a function of the step: linear warm-up, then the kind."""

    kind: Literal["cosine", "linear", "constant", "wsd", "1-sqrt"] = "cosine"
    """Shape after warm-up; "wsd" and "1-sqrt" stay level until their final decay. Default "cosine"."""
    warmup_steps: Count = 0
    """Steps of linear warm-up. Default 0."""
    decay_steps: Count = 0
    """Steps of decay; 0 for all after warm-up, or a fifth of training.steps for "wsd" and "1-sqrt". Default 0."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a part of the peak. Default 0.0."""


class TokenizerSection(Section):
    """The tokenizer that made the data."""

    path: str = ""
    """A tokenizer.json or a folder that holds one; "" for the folder of the first data source. Default ""."""


class Source(Section):
    """One folder of token shards in a mixture."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of token shards, as ``meshtron prepare`` writes it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Part of the mixture, relative to the other sources. Default 1.0."""


Sources = Annotated[tuple[Source, ...], Field(strict=False)]


class DataStage(Section):
    """Data from a given step on."""

    start_step: Count
    """First step, counted from 0, that this stage feeds."""
    train: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
    """Sources of the stage."""
    seq_len: Positive | None = None
    """Tokens in a sequence. Default training.seq_len."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the learning rate. Default 1.0."""


class DataSection(Section):
    """What is trained on."""

    train: Sources = ()
    """Sources of the mixture. Required unless there are stages."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Stages that replace ``train`` from their start_step on. Default []."""
    document_mask: bool = False
    """Whether attention stops at the boundaries of packed documents. Default false."""
    workers: Count = 0
    """Loader threads a rank; 0 loads between steps. Default 0."""
    prefetch: Positive = 2
    """Batches that workers hold ready. Default 2."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        starts, found = [stage.start_step for stage in self.stages], list[tuple[str, str]]()
        if not self.train and not self.stages:
            found.append(("train", 'missing (a list of sources, such as [{path = "data/my_corpus"}])'))
        elif not self.train and starts[0] != 0:
            found.append(("stages", f"the first stage starts at step {starts[0]}, and train is empty before it"))
        if starts != sorted(set(starts)):
            found.append(("stages", f"start_step must grow from stage to stage, found {starts}"))
        Problems.raise_if(found)
        return self


class ValidationSection(Section):
    """Loss on held-out data."""

    interval: Count = 0
    """Steps between validations; 0 for none. Default 0."""
    steps: Count = 0
    """Global batches of one validation; 0 for all the data once. Default 0."""
    data: Sources = ()
    """Sources. Required where interval is not 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.interval and not self.data:
            raise Problems([("data", "missing (a list of sources), since validation.interval is not 0")])
        return self


class CheckpointSection(Section):
    """Saving and resuming. The last step is always saved."""

    interval: Count = 0
    """Steps between checkpoints; 0 for only the last step. Default 0."""
    keep_last: Count = 0
    """Newest checkpoints that are kept; 0 for all. Default 0."""
    keep_every: Count = 0
    """Steps that are multiples of this are kept for ever; 0 for none. Default 0."""
    async_save: bool = True
    """Whether training goes on while a checkpoint is written. Default true."""
    save_on_exit: bool = True
    """Whether a run that is asked to stop saves first. Default true."""
    resume: str | Count = "auto"
    """"auto" (newest whole step, if any), "none", a step number, or a path. Default "auto"."""
    load: Literal["all", "weights"] = "all"
    """"weights" starts a new run from a checkpoint's weights. Default "all"."""
    partial: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of parameter names that the checkpoint may lack. Default []."""


class MetricsSection(Section):
    """What is written about the run's progress."""

    log_interval: Positive = 1
    """Steps between lines. Default 1."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; "offline" needs no login. Default "off"."""
    wandb_project: Annotated[str, Field(min_length=1)] = "meshtron"
    """Project of Weights & Biases. Default "meshtron"."""
    tensorboard: bool = False
    """Whether TensorBoard files are written below run.dir. Default false."""
    peak_tflops: Annotated[float, Field(ge=0)] = 0.0
    """Dense peak of one device for mfu, in TFLOP/s; 0 for the known figure of the device. Default 0.0."""


class ProfileSection(Section):
    """A trace of a few steps."""

    steps: Annotated[str, Field(pattern=r"^(\d+:\d+)?$")] = ""
    """Steps to trace, "first:last" as in "10:13"; "" for none. Default ""."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps:
            first, last = map(int, self.steps.split(":"))
            if not 1 <= first <= last:
                raise Problems([("steps", f'expected "first:last" with 1 <= first <= last, found "{self.steps}"')])
        return self


class Recipe(Section):
    """Everything that decides a run."""

    run: RunSection = RunSection()
    """Where a run happens and what it is called."""
    model: Annotated[
        Annotated[ModelSection, Tag(UNION_TAGS[0])] | Annotated[CustomModelSection, Tag(UNION_TAGS[1])],
        Discriminator(_model_tag),
    ]
    """The model."""
    parallel: ParallelSection = ParallelSection()
    """How the model is spread over ranks."""
    training: TrainingSection
    """Length, batch and numerics of training."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and clipping."""
    lr_schedule: LRScheduleSection = LRScheduleSection()
    """Learning rate as a function of the step."""
    tokenizer: TokenizerSection = TokenizerSection()
    """The tokenizer that made the data."""
    data: DataSection
    """What is trained on."""
    validation: ValidationSection = ValidationSection()
    """Loss on held-out data."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving and resuming."""
    metrics: MetricsSection = MetricsSection()
    """What is written about the run's progress."""
    profile: ProfileSection = ProfileSection()
    """A trace of a few steps."""

    def resolve(self, world_size: int) -> "Recipe":
        """The recipe with every derived value filled in for ``world_size`` ranks.

        Raises:
            LayoutError: the recipe does not fit that many ranks; one line for each reason.
        """
        return layout.resolve(self, world_size)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches a step on each dp rank; the recipe must be resolved."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.dp)
