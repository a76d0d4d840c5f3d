"""Pipeline schedules: their names, which rank holds which stage, and what each of them cannot run."""

from meshtron.errors import LayoutError

# The recipe's name of each schedule -> torch's.
SCHEDULES = {
    "AFAB": "GPipe",
    "1F1B": "1F1B",
    "Interleaved1F1B": "Interleaved1F1B",
    "LoopedBFS": "LoopedBFS",
    "InterleavedZeroBubble": "InterleavedZeroBubble",
    "ZBVZeroBubble": "ZBVZeroBubble",
    "DualPipeV": "DualPipeV",
}
ONE_STAGE = ("AFAB", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Gradients of weights may have a pass of their own, later than those of inputs.
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def stage_indices(schedule: str, pp: int, rank: int, stages_per_rank: int) -> list[int]:
    """Numbers of the stages that pipeline rank ``rank`` of ``pp`` holds, in model order.

    Interleaved schedules deal stages out round and round (rank, rank + pp, ...), V-shaped ones there and back
    (rank, 2 * pp - 1 - rank).

    Raises:
        LayoutError: unknown schedule.
    """
    check_known(schedule)
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + turn * pp for turn in range(stages_per_rank)]


def default_stages(schedule: str) -> int:
    """Stages on each rank where nobody says how many."""
    return 1 if schedule in ONE_STAGE else 2


def check_known(schedule: str) -> None:
    """Raise LayoutError for a schedule that there is not."""
    if schedule not in SCHEDULES:
        raise LayoutError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")


def check_stages(schedule: str, stages_per_rank: int) -> None:
    """Raise LayoutError for an unknown schedule, or a number of stages a rank that it does not run."""
    check_known(schedule)
    if schedule in ONE_STAGE and stages_per_rank != 1:
        raise LayoutError(f"schedule {schedule} runs one stage a rank, found stages_per_rank = {stages_per_rank}")
    if schedule not in ONE_STAGE and stages_per_rank < 2:
        raise LayoutError(f"schedule {schedule} needs at least 2 stages a rank, found {stages_per_rank}")
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise LayoutError(f"schedule {schedule} runs 2 stages a rank, found {stages_per_rank}")


def check_schedule(schedule: str, pp: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Refuse what a schedule cannot run.

    Raises:
        LayoutError: unknown schedule, wrong number of stages a rank, or a number of micro-batches that is too small,
            or cannot be divided into rounds.
    """
    check_stages(schedule, stages_per_rank)
    needed = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
    if num_microbatches < needed:
        raise LayoutError(
            f"schedule {schedule} with pp = {pp} needs at least {needed} micro-batches a step, found "
            f"{num_microbatches}: raise global_batch_size or lower micro_batch_size"
        )
    rounds = max(1, num_microbatches // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and num_microbatches % rounds:
        raise LayoutError(
            f"schedule {schedule} works through micro-batches in rounds of equal size over pp = {pp}, found "
            f"{num_microbatches} micro-batches: use a multiple of {pp}"
        )
