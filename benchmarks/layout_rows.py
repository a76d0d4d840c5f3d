"""The shapes and layouts that multi_gpu.py measures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A recipe and the batch it is measured at."""

    recipe: str
    micro_batch: int
    per_gpu: int
    """Sequences a step for each GPU, whatever the layout."""
    overrides: tuple[str, ...] = ()
    on_one: bool = True
    """Whether one GPU holds it with the accumulator that several micro-batches need."""


SHAPES = {
    "1b": Shape(recipe="llama_1b.toml", micro_batch=4, per_gpu=8),
    "8b": Shape(
        recipe="llama_8b.toml",
        micro_batch=1,
        per_gpu=4,
        overrides=("training.activation_checkpointing=full", "training.compile=true"),
        on_one=False,
    ),
    "tiny": Shape(recipe="tiny_llama.toml", micro_batch=2, per_gpu=4),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of one shape."""

    shape: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 1
    schedule: str = "1F1B"
    overlap: bool = True
    """Whether sums of gradients over dp hide behind backward."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        options = [f"zero {self.zero}"] if self.dp > 1 else []
        options += [] if self.overlap else ["no overlap"]
        options += [self.schedule] if self.pp > 1 else []
        return " ".join([self.shape, f"{self.pp}x{self.dp}x{self.tp}", *options])

    def overrides(self, gpus: int) -> list[str]:
        """Recipe keys; the global batch is that of ``gpus`` GPUs also where fewer run it."""
        shape = SHAPES[self.shape]
        return [
            f"parallel.pp={self.pp}",
            f"parallel.dp={self.dp}",
            f"parallel.tp={self.tp}",
            f"parallel.zero={self.zero}",
            f"parallel.overlap={str(self.overlap).lower()}",
            *([f"parallel.schedule={self.schedule}"] if self.pp > 1 else []),
            f"training.micro_batch_size={shape.micro_batch}",
            f"training.global_batch_size={shape.per_gpu * gpus}",
            *shape.overrides,
        ]

    def bubble(self, gpus: int) -> float:
        """Part of the time that a pipeline can be busy."""
        shape = SHAPES[self.shape]
        micro_batches = shape.per_gpu * gpus // shape.micro_batch // self.dp
        chunks = 1 if self.schedule == "1F1B" else 2
        return chunks * micro_batches / (chunks * micro_batches + self.pp - 1)


def rows(shapes: Sequence[str], gpus: int) -> list[Row]:
    """The layouts that are measured, those that matter most first."""
    if gpus == 1:
        return [Row(shape=shape) for shape in shapes if SHAPES[shape].on_one]
    found = []
    for shape in shapes:
        found += [Row(shape=shape)] if SHAPES[shape].on_one else []
        found += [Row(shape=shape, dp=gpus), Row(shape=shape, tp=gpus), Row(shape=shape, pp=gpus)]
        if gpus >= 4:
            found += [Row(shape=shape, dp=gpus // 2, tp=2), Row(shape=shape, pp=2, dp=gpus // 4, tp=2)]
        found += [Row(shape=shape, dp=gpus, overlap=False), Row(shape=shape, pp=gpus, schedule="Interleaved1F1B")]
        found += [Row(shape=shape, dp=gpus, zero=0)] if SHAPES[shape].on_one else []  # state that one GPU holds
    return list(dict.fromkeys(found))


def layouts(ranks: int) -> Iterator[str]:
    """Every pp x dp x tp of ``ranks`` ranks."""
    for pp in range(1, ranks + 1):
        for dp in range(1, ranks // pp + 1):
            if ranks % (pp * dp) == 0:
                yield f"{pp}x{dp}x{ranks // pp // dp}"
