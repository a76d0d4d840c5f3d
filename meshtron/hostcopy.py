"""Reading a device scalar without waiting for what was queued after it."""

import torch
from torch import Tensor


class HostCopy:
    """A scalar on its way from a device to the host."""

    def __init__(self, scalar: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = scalar.detach()
        if scalar.is_cuda:
            self._value = torch.empty((), dtype=scalar.dtype, pin_memory=True)
            self._value.copy_(scalar.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def item(self) -> float:
        """The value; waits for the work that computes it and for nothing later."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()
