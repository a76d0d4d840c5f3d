"""What a GPU's kernels are for, and when communication is all that runs."""

from collections.abc import Sequence


def exposed(spans: Sequence[tuple[str, float, float]]) -> float:
    """Time in which kernels (name, start, end) of NCCL run and no others, in the unit of the times."""
    points = []
    for name, start, end in spans:
        kind = int("nccl" in name.lower())
        points += [(start, kind, 1), (end, kind, -1)]
    running, total, before = [0, 0], 0.0, 0.0
    for at, kind, change in sorted(points):
        if running[1] and not running[0]:
            total += at - before
        running[kind] += change
        before = at
    return total


KINDS = {
    "communication": ("nccl",),
    "matrix products": ("gemm", "nvjet", "cutlass_80", "cutlass_90", "splitK", "scaled_mm", "wgrad"),
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn"),
    "optimizer": ("_adamw", "_squares"),
    "loss": ("_rows", "_scale_unless_one"),
    "embedding": ("embedding", "radix", "DeviceRadixSort", "krn_partial", "compute_grad_weight", "index"),
    "copies": ("memcpy", "Memcpy", "Memset", "copy_kernel"),
    "compiled element-wise": ("triton_",),
}


def kind_of(kernel: str) -> str:
    """The first kind of ``KINDS`` that a kernel's name fits."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "other")
