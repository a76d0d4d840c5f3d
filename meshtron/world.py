"""This process among the others: torchrun's environment, the process group, the device."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from meshtron.errors import LayoutError

_TIMEOUT = timedelta(minutes=10)
WAIT = timedelta(days=365)
"""As good as no time limit."""
DEBUG_RANK = "MESHTRON_DEBUG_RANK"
"""Environment variable: the rank that somebody wants to look at (``inspect_rank``)."""


def world_size() -> int:
    """Ranks that torchrun started; 1 without torchrun. Known before there is a process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's rank; 0 without torchrun. Known before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def warning_once() -> int:
    """Level for a warning that every rank would give in the same words: rank 0 gives it."""
    return logging.WARNING if rank() == 0 else logging.DEBUG


def debug_rank() -> int | None:
    """The rank in ``MESHTRON_DEBUG_RANK``, or None.

    Raises:
        LayoutError: it is not a whole number.
    """
    text = os.environ.get(DEBUG_RANK, "")
    if text and not text.isdecimal():
        raise LayoutError(f"{DEBUG_RANK} = {text!r}: expected the number of a rank")
    return int(text) if text else None


def pick_device(name: str) -> torch.device:
    """The device of this rank: ``auto`` takes a GPU where there is one.

    Raises:
        LayoutError: the device asked for is not there, or this node has fewer GPUs than ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        local_rank, present = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if not present:
            raise LayoutError('run.device = "cuda", but torch finds no GPU: use "cpu" or "auto"')
        if local_rank >= present:
            raise LayoutError(
                f"this node has {present} GPU{'s' * (present != 1)} and at least {local_rank + 1} ranks: start one "
                f'rank a GPU, or use run.device = "cpu"'
            )
        return torch.device("cuda", local_rank)
    if name == "mps" and (not torch.backends.mps.is_available() or world_size() > 1):
        raise LayoutError('run.device = "mps" needs an Apple GPU and a single rank: use "cpu"')
    return torch.device(name)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The default process group while the body runs: gloo for CPU tensors, NCCL besides for those on GPUs."""
    if dist.is_initialized():  # the caller's own, as in tests
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield
        return
    start_process_group(device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def start_process_group(device: torch.device) -> None:
    """Make the default process group of torchrun's ranks, or of this process alone, and choose its GPU.

    Ranks wait for each other ten minutes at most, or as long as it takes where one of them is to be debugged.
    """
    timeout = _TIMEOUT if debug_rank() is None else WAIT
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if world_size() == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
        )
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
