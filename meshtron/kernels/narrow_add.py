"""Adding a low-precision tensor to float32 rows, in Triton: torch's own mixed add is not vectorised.

For 1.2 billion weights on an H200 torch's takes 5.4 ms, at 2.3 TB/s; the device moves 4.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add(total, added, row_stride, row_elements, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < row_elements
    rows = total + row * row_stride
    sum_ = tl.load(rows + at, mask=inside) + tl.load(added + row * row_elements + at, mask=inside).to(tl.float32)
    tl.store(rows + at, sum_, mask=inside)


def narrow_add(total: Tensor, added: Tensor) -> None:
    """``total += added``: (rows, elements) in float32, each row contiguous, and a contiguous tensor of that size."""
    rows, elements = total.shape
    with torch.cuda.device_of(total):
        _add[(triton.cdiv(elements, _BLOCK), rows)](total, added, total.stride(0), elements, BLOCK=_BLOCK)
