"""One launch over many tensors: AdamW with everything that belongs to it, and the global sum of squares.

The tensors' addresses travel in a table, and a map cuts all of them into chunks of equal size, one program each;
so the number of launches does not grow with the number of parameters.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of one program. AdamW's four streams in and four out are fastest with one short block each (10.3 ms for
# 1.5 billion weights on an H200, 12.0 with sixteen blocks); a sum should end in few partial sums.
_UPDATE_CHUNK = 1024
_SUM_CHUNK, _SUM_BLOCK = 16384, 2048
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class ChunkMap:
    """Which program works on which part of which tensor; on the device, built once for given sizes."""

    def __init__(self, sizes: Sequence[int], chunk: int, device: torch.device) -> None:
        counts = torch.tensor([-(-size // chunk) for size in sizes])
        tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        firsts = torch.cumsum(counts, 0) - counts
        starts = (torch.arange(len(tensors)) - firsts[tensors]) * chunk
        self.num_chunks = len(tensors)
        self.tensors = tensors.to(torch.int32).to(device)
        self.starts = starts.to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=64)
def _map_of(sizes: tuple[int, ...], chunk: int, device: torch.device) -> ChunkMap:
    return ChunkMap(sizes, chunk, device)


def address_table(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, bool]:
    """Addresses of ``columns[i][j]`` as an int64 tensor on the device, and whether all are 16-byte aligned.

    The copy is asynchronous; the pinned buffer it comes from is kept by torch's allocator until it is done.
    """
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    aligned = all(address % 16 == 0 for column in addresses for address in column)
    table = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), aligned


@triton.jit
def _pointer(table, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table + index)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(TYPE))


@triton.jit
def _adamw(
    table,
    num_tensors,
    chunk_tensors,
    chunk_starts,
    sizes,
    clip,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    correction1,
    correction2_root,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    OUTPUT: tl.constexpr,
    WRITE_OUTPUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensors + program)
    start = tl.multiple_of(tl.load(chunk_starts + program), 16)
    size = tl.load(sizes + tensor)
    grads = _pointer(table, tensor, GRAD, ALIGNED)
    masters = _pointer(table, num_tensors + tensor, tl.float32, ALIGNED)
    averages = _pointer(table, 2 * num_tensors + tensor, MOMENT, ALIGNED)
    squares = _pointer(table, 3 * num_tensors + tensor, MOMENT, ALIGNED)
    factor = tl.load(clip)
    at = start + tl.arange(0, CHUNK)
    inside = (at < size) & (factor == factor)
    grad = tl.load(grads + at, mask=inside).to(tl.float32) * factor
    master = tl.load(masters + at, mask=inside)
    average = tl.load(averages + at, mask=inside).to(tl.float32)
    square = tl.load(squares + at, mask=inside).to(tl.float32)
    average += (grad - average) * (1 - beta1)
    square = square * beta2 + grad * grad * (1 - beta2)
    master -= master * (lr * weight_decay)
    master -= (lr / correction1) * average / (tl.sqrt_rn(square) / correction2_root + eps)
    tl.store(masters + at, master, mask=inside)
    tl.store(averages + at, average.to(MOMENT), mask=inside)
    tl.store(squares + at, square.to(MOMENT), mask=inside)
    if WRITE_OUTPUT:
        outputs = _pointer(table, 4 * num_tensors + tensor, OUTPUT, ALIGNED)
        tl.store(outputs + at, master.to(OUTPUT), mask=inside)


def adamw(
    columns: Sequence[Sequence[Tensor]],
    clip: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update float32 masters and their moments in place, and write low-precision copies of the masters.

    Args:
        columns: gradients, masters, first moments, second moments and, optionally, outputs: lists of contiguous
            tensors, alike in sizes. Gradients, moments and outputs have one dtype each.
        clip: float32 scalar on the device that gradients are multiplied by; with NaN nothing is changed.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW`` (Loshchilov & Hutter, 2019).
        step: 1 at the first update.
    """
    grads, masters = columns[0], columns[1]
    device = masters[0].device
    table, aligned = address_table(columns, device)
    chunks = _map_of(tuple(master.numel() for master in masters), _UPDATE_CHUNK, device)
    output = columns[4][0].dtype if len(columns) == 5 else torch.float32
    _adamw[(chunks.num_chunks,)](
        table,
        len(masters),
        chunks.tensors,
        chunks.starts,
        chunks.sizes,
        clip,
        lr,
        betas[0],
        betas[1],
        eps,
        weight_decay,
        1 - betas[0] ** step,
        (1 - betas[1] ** step) ** 0.5,
        GRAD=_TYPES[grads[0].dtype],
        MOMENT=_TYPES[columns[2][0].dtype],
        OUTPUT=_TYPES[output],
        WRITE_OUTPUT=len(columns) == 5,
        ALIGNED=aligned,
        CHUNK=_UPDATE_CHUNK,
    )


@triton.jit
def _squares(
    table, chunk_tensors, chunk_starts, sizes, partial_sums,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensors + program)
    start = tl.multiple_of(tl.load(chunk_starts + program), 16)
    size = tl.load(sizes + tensor)
    values = _pointer(table, tensor, TYPE, ALIGNED)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(0, CHUNK, BLOCK):
        at = start + step + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_sums + program, tl.sum(total))


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares over contiguous tensors of one dtype, as a float64 scalar on the device.

    Each chunk is summed in float32, the chunks' sums in float64, always in the same order.
    """
    device = tensors[0].device
    table, aligned = address_table([tensors], device)
    chunks = _map_of(tuple(tensor.numel() for tensor in tensors), _SUM_CHUNK, device)
    partial_sums = torch.empty(chunks.num_chunks, device=device)
    _squares[(chunks.num_chunks,)](
        table, chunks.tensors, chunks.starts, chunks.sizes, partial_sums,
        TYPE=_TYPES[tensors[0].dtype], ALIGNED=aligned, CHUNK=_SUM_CHUNK, BLOCK=_SUM_BLOCK,
    )  # fmt: skip
    return partial_sums.sum(dtype=torch.float64)
