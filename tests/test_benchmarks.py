"""What the benchmarks compute from what they measure."""

from benchmarks.kernel_times import exposed
from benchmarks.layout_rows import Row, layouts, rows


def test_communication_is_exposed_where_no_other_kernel_runs():
    alone, beside = ("ncclAllReduce", 20.0, 25.0), ("ncclAllGather", 5.0, 15.0)
    assert exposed([("gemm", 0.0, 10.0), beside, ("add", 12.0, 13.0), alone, ("nccl", 24.0, 30.0)]) == 4 + 10
    assert exposed([("gemm", 0.0, 10.0)]) == 0


def test_layouts_fill_the_ranks_and_bubbles_are_those_of_1f1b():
    assert list(layouts(4)) == ["1x1x4", "1x2x2", "1x4x1", "2x1x2", "2x2x1", "4x1x1"]
    assert all(row.ranks in (1, 8) for row in rows(["1b", "8b"], 8))
    four_stages = Row(shape="1b", pp=4)
    assert four_stages.bubble(gpus=4) == 8 / (8 + 3)
    assert Row(shape="1b", pp=4, schedule="Interleaved1F1B").bubble(gpus=4) == 16 / (16 + 3)
