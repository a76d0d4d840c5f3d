"""What a run says about its progress: a console line, metrics.jsonl, and on request wandb and TensorBoard.

Only rank 0 has a writer; every figure it is given counts the whole job.
"""

import json
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from meshtron.durable import write_whole, writing
from meshtron.errors import MeshtronError

# Dense bfloat16 peak in FLOP/s by a part of the device's name; the first part found in the name counts. NVIDIA's
# data sheets give most of these with 2:4 sparsity, which doubles them.
PEAK_FLOPS = {
    "A100": 312e12,  # A100 Tensor Core GPU data sheet: 312 TFLOPS dense, SXM and PCIe
    "H100 PCIe": 756e12,  # H100 data sheet: 1,513 TFLOPS sparse
    "H100 NVL": 835e12,  # H100 NVL data sheet: 1,671 TFLOPS sparse
    "H100": 989e12,  # H100 data sheet, SXM: 1,979 TFLOPS sparse
    "GH200": 989e12,  # GH200 Grace Hopper data sheet: 1,979 TFLOPS sparse
    "H200 NVL": 835e12,  # H200 data sheet, NVL: 1,671 TFLOPS sparse
    "H200": 989e12,  # H200 data sheet, SXM: 1,979 TFLOPS sparse
    "GB200": 2500e12,  # Blackwell data sheet, GB200 NVL72: 5 PFLOPS sparse a GPU
    "GB300": 2500e12,  # Blackwell Ultra data sheet, GB300 NVL72: 360 PFLOPS sparse in 72 GPUs
    "B300": 2250e12,  # Blackwell Ultra data sheet, HGX B300: 36 PFLOPS sparse in 8 GPUs
    "B200": 2250e12,  # Blackwell data sheet, HGX B200: 4.5 PFLOPS sparse a GPU
}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, by the name CUDA gives it; None where it is not known (CPUs too)."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not there on Windows, where only GPUs are measured

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # macOS counts bytes, Linux KiB


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. ``samples`` and ``tokens`` count the global batch once, whatever the layout."""

    step: int
    """Optimizer steps done, this one included."""
    tokens: int
    """Tokens seen since the run began."""
    samples: int
    """Sequences seen since the run began."""
    loss: float
    """Mean loss over the valid tokens of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens_per_s: float
    """Tokens a second of the whole job since the line before."""
    tokens_per_s_per_device: float
    """The same, divided by the number of ranks."""
    mfu: float | None
    """Part of the device's dense bfloat16 peak that the model's FLOPs need; None where the peak is unknown."""
    memory_gib: float
    """Most memory a rank has held."""
    data_wait_s: float
    """Seconds a step spent waiting for data."""
    step_s: float
    """Seconds a step."""

    @classmethod
    def measured(
        cls, *, step_tokens: int, num_devices: int, flops_per_token: float, peak: float | None, **rest: Any
    ) -> Self:
        """Fill in the rates from what was measured.

        Args:
            step_tokens: tokens of one global batch.
            num_devices: ranks.
            flops_per_token: model FLOPs of a token, forward and backward, as the model's ``flops_per_token`` counts.
            peak: FLOP/s of one device, or None where unknown.
            rest: the fields that are not rates; ``step_s`` must be above 0.

        ``mfu = tokens_per_s_per_device * flops_per_token / peak`` (PaLM, Chowdhery et al., 2022, appendix B).
        """
        tokens_per_s = step_tokens / rest["step_s"]
        per_device = tokens_per_s / num_devices
        return cls(
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=per_device,
            mfu=per_device * flops_per_token / peak if peak else None,
            **rest,
        )

    def console_line(self, steps: int) -> str:
        """The line a person follows."""
        mfu = f"  mfu {self.mfu:5.1%}" if self.mfu is not None else ""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:7.4f}  grad_norm {self.grad_norm:8.3f}  "
            f"lr {self.lr:.2e}  {self.tokens_per_s:>9,.0f} tok/s{mfu}  {self.memory_gib:6.2f} GiB  "
            f"{self.step_s:.3f} s (data {self.data_wait_s:.3f} s)"
        )


class MetricsWriter:
    """Writes each logged step to the console, ``metrics.jsonl`` and whatever else was asked for; a context manager.

    Args:
        folder: the run's folder, which must exist.
        steps: steps of the whole run, for the console.
        resumed_step: step the run goes on from; what metrics.jsonl holds of later steps is dropped.
        wandb: "off", "offline" (needs no login) or "online".
        project: wandb's project.
        name: the run's name in wandb.
        tensorboard: whether to write TensorBoard files to ``folder/tensorboard``.
        config: the resolved recipe as plain values, for wandb.

    Raises:
        MeshtronError: wandb or TensorBoard was asked for and is not installed, or wandb refused to start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        resumed_step: int = 0,
        wandb: str = "off",
        project: str = "meshtron",
        name: str = "run",
        tensorboard: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._steps = steps
        self._wandb = _start_wandb(folder, wandb, project, name, config) if wandb != "off" else None
        self._tensorboard = _start_tensorboard(folder, resumed_step) if tensorboard else None
        self._path = folder / "metrics.jsonl"
        with writing(self._path):
            drop_later_steps(self._path, resumed_step)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: StepMetrics, **extra: float) -> None:
        """Write one step; ``extra`` figures (``val_loss=...``) go into the same line. A step is logged once."""
        values = asdict(metrics) | extra
        # JSON has no NaN: a loss that is not finite is null in the file, and nan on the console
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
        shown = "".join(
            f"  {key} {value:.4f}" if isinstance(value, float) else f"  {key} {value}" for key, value in extra.items()
        )
        print(metrics.console_line(self._steps) + shown, flush=True)
        numbers = {key: value for key, value in values.items() if value is not None}
        if self._wandb is not None:
            self._wandb.log(numbers, step=metrics.step)
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, metrics.step)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything; with ``failed`` wandb marks the run as failed."""
        with writing(self._path):  # what could not be written before is tried once more
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def drop_later_steps(path: Path, step: int) -> None:
    """Keep only the whole lines of steps up to ``step``, by one rename: a kill leaves the old file or the new one."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if 0 < _step_of(line) <= step]
    if kept == lines:
        return
    write_whole(path, "".join(kept))


def _step_of(line: str) -> int:
    """The step of a line of metrics.jsonl, or 0 for a line that a kill has cut short."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else 0
    except (ValueError, TypeError, KeyError):
        return 0


def _start_wandb(folder: Path, mode: str, project: str, name: str, config: Mapping[str, Any] | None) -> Any:
    try:
        import wandb
    except ImportError:
        raise MeshtronError(
            f'metrics.wandb = "{mode}" needs the wandb package: pip install "meshtron[wandb]", or set it to "off"'
        ) from None
    marker = folder / "wandb_id.txt"  # so that a resumed run goes on as the same run
    if not marker.exists():
        marker.write_text(secrets.token_hex(4), encoding="utf-8")
    try:
        return wandb.init(
            project=project,
            name=name,
            id=marker.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=folder,
            mode=mode,  # type: ignore[arg-type]  # the recipe has checked it
            config=dict(config or {}),
        )
    except wandb.Error as error:
        raise MeshtronError(f'metrics.wandb = "{mode}": {error}; "offline" needs no login') from None


def _start_tensorboard(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MeshtronError(
            'metrics.tensorboard = true needs the tensorboard package: pip install "meshtron[tensorboard]"'
        ) from None
    return SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=resumed_step + 1)
