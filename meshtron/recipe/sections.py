"""The schema of a recipe: one frozen class a section, one line below each field with its unit and default.

Defaults that follow from other values are filled in as early as they can be: those inside a section when it is
built, those that need another section or the number of ranks by ``Recipe.resolve``.
"""

from bisect import bisect_right
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from meshtron.recipe import layout
from meshtron.recipe.base import Count, Positive, Section
from meshtron.recipe.data import DataSection, DataStage, ValidationSection
from meshtron.recipe.model import CustomModelSection, ModelSection, model_tag
from meshtron.recipe.problems import UNION_TAGS, Problems, show


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
    overlap: bool = True
    """Whether gradients are summed over dp while backward goes on; false waits for each sum at once, to measure what
    that hides. The numbers are the same. Default true."""

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
    """What the backward pass recomputes: "selective" all but matrix products and attention, "full" those products
    too but for the last of attention and of the feed-forward. Default "none"."""
    activation_checkpointing_layers: Count = 0
    """How many layers of each stage it is done to, from the first; 0 for all. Default 0."""
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
    grad_norm: Literal["l2", "inf"] = "l2"
    """Norm that is logged and clipped: Euclidean, or the largest absolute value. Default "l2"."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which Adam's moments are kept. Default "float32"."""
    groups: Annotated[tuple[OptimizerGroup, ...], Field(strict=False)] = ()
    """Groups with a learning rate or weight decay of their own; of two that match, the later counts. Default []."""


class LRScheduleSection(Section):
    """Learning rate as a function of the step: linear warm-up, then the kind."""

    kind: Literal["cosine", "linear", "constant", "wsd", "1-sqrt"] = "cosine"
    """Shape after warm-up; "wsd" and "1-sqrt" stay level until their final decay. Default "cosine"."""
    warmup_steps: Count = 0
    """Steps of linear warm-up. Default 0."""
    decay_steps: Count = 0
    """Steps of decay; 0 for all after warm-up, or a fifth of training.steps for "wsd" and "1-sqrt". Default 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a part of the peak. Default 0.0."""


class TokenizerSection(Section):
    """The tokenizer that made the data."""

    path: str = ""
    """A tokenizer.json or a folder that holds one; "" for the folder of the first data source. Default ""."""


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
    """"weights" starts a new run from the weights of another run's checkpoint, a path in resume. Default "all"."""
    partial: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of parameter names that the checkpoint may lack. Default []."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.load == "weights" and (isinstance(self.resume, int) or self.resume in ("auto", "none")):
            sentence = '"weights" begins a new run: checkpoint.resume must be the path of another run\'s checkpoint'
            raise Problems([("load", f"{sentence}, found {show(self.resume)}")])
        return self


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
        Discriminator(model_tag),
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

    @property
    def data_stages(self) -> tuple[DataStage, ...]:
        """The data of the whole run, from step 0 on: ``data.train``, then ``data.stages``, each with its seq_len."""
        first = (DataStage(start_step=0, train=self.data.train),) if self.data.train else ()
        return tuple(
            stage.model_copy(update={"seq_len": stage.seq_len or self.training.seq_len})
            for stage in (*first, *self.data.stages)
        )

    def data_stage(self, step: int) -> int:
        """Number in ``data_stages`` of the one that feeds the step after ``step`` finished ones."""
        starts = [0] * bool(self.data.train) + [stage.start_step for stage in self.data.stages]
        return bisect_right(starts, step) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole run."""
        stages, last = self.data_stages, self.training.steps
        stops = [*(min(stage.start_step, last) for stage in stages[1:]), last]
        steps = [stop - min(stage.start_step, last) for stage, stop in zip(stages, stops, strict=True)]
        return self.training.global_batch_size * sum(n * s.seq_len for n, s in zip(steps, stages, strict=True))
