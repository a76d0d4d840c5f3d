"""The harness: ranks stay alive, results come back in rank order, a failing rank ends the call."""

import os
import time

import pytest
import torch

from meshtron.testing import RankFailure, run_ranks


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(total)
    return os.getpid(), total.item()


def fail_on_last_rank() -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        raise ValueError("planted")
    torch.distributed.barrier()


def test_ranks_reduce_and_stay_alive():
    first, again = run_ranks(sum_of_ranks, 4), run_ranks(sum_of_ranks, 4)
    assert [total for _, total in first] == [6.0] * 4
    assert [pid for pid, _ in first] == [pid for pid, _ in again]


def test_one_failing_rank_ends_the_call_with_its_traceback():
    started = time.monotonic()
    with pytest.raises(RankFailure, match="planted"):
        run_ranks(fail_on_last_rank, 2)
    assert time.monotonic() - started < 20
    assert [total for _, total in run_ranks(sum_of_ranks, 2)] == [1.0, 1.0]
