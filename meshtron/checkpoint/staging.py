"""Copies of tensors that training may not change: what an async save writes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from meshtron.checkpoint.files import memory_of


class Staging:
    """One host buffer, laid out like the tensor file, page-locked where the tensors are on a CUDA device.

    The buffer is kept from save to save: page faults, or page-locking, cost more than the copy itself. It is as
    large as this rank's part of a checkpoint.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]]) -> memoryview:
        """Copy ``tensors`` to the host, each to its begin and end in bytes, and return all bytes.

        The view stays as it is until the next call. CUDA tensors are read in the order of the current stream.
        """
        size = max((end for _, end in spans.values()), default=0)
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        if self._buffer.numel() < size or (on_cuda and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let the old one go before the new one is made
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        for key, (begin, end) in spans.items():
            tensor = tensors[key].detach()
            home = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            home.copy_(tensor, non_blocking=tensor.is_cuda)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return memory_of(self._buffer)[:size]
