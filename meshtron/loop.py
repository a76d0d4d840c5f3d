"""The training loop: batches in, steps, and what is written down about them."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from meshtron import world
from meshtron.build import Job, build_job, model_section, norm_type_of
from meshtron.checkpoint import Checkpointer
from meshtron.checkpoint.ranks import on_first_rank
from meshtron.data import TrainStream, ValidationSet
from meshtron.durable import make_folder, write_whole
from meshtron.errors import MeshtronError
from meshtron.feed import check_tokenizer, data_state, describe_stage, open_training, open_validation
from meshtron.hf.recipe import fill_from_hf
from meshtron.hostcopy import HostCopy
from meshtron.inspecting import inspect_rank
from meshtron.metrics import MetricsWriter, StepMetrics, memory_gib, peak_flops
from meshtron.models.spec import flops_of
from meshtron.optim import set_learning_rate
from meshtron.passes import forward_backward, validate
from meshtron.recipe import Recipe, dump_recipe
from meshtron.resume import Progress, resume, save, seed_rng
from meshtron.run_lock import only_run
from meshtron.stopping import StopRequests
from meshtron.timing import Stopwatch, profiler, scheduled_garbage_collection

log = logging.getLogger(__name__)


def train(recipe: Recipe) -> Progress:
    """Run a recipe to its last step, from its newest checkpoint if it says so; every rank makes the call.

    Raises:
        MeshtronError: the recipe does not fit the world, the data, or the checkpoint.
    """
    recipe = fill_from_hf(recipe).resolve(world.world_size())
    check_tokenizer(recipe)
    device = world.pick_device(recipe.run.device)
    with world.process_group(device):
        job = build_job(recipe, device)
        seed_rng(job, 0)
        folder = Path(recipe.run.dir)
        on_first_rank(f"creating {folder}", lambda: make_folder(folder))
        with (
            only_run(folder) if world.rank() == 0 else nullcontext(),
            StopRequests(folder / "STOP") as stop,
            Checkpointer(
                folder / "checkpoints",
                keep_last=recipe.checkpoint.keep_last,
                keep_every=recipe.checkpoint.keep_every,
                async_save=recipe.checkpoint.async_save,
            ) as checkpointer,
        ):
            progress = resume(job, checkpointer)
            recipe_file = folder / "recipe.toml"
            on_first_rank(f"writing {recipe_file}", lambda: write_whole(recipe_file, dump_recipe(recipe)))
            if progress.step >= recipe.training.steps:
                log.info("nothing is left to do: %d of %d steps are done", progress.step, recipe.training.steps)
            done = progress.step, progress.samples
            inspect_rank()  # only where MESHTRON_DEBUG_RANK names one
            with open_training(recipe, job.mesh, device, *done, saved=progress.data) as stream:
                run_steps(job, stream, checkpointer, progress, stop)
    return progress


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step gives; what the device computes is waited for only when it is read."""

    step: int
    loss: HostCopy
    """Mean loss over the valid tokens of the global batch."""
    grad_norm: HostCopy
    """Global gradient norm before clipping."""
    finite: HostCopy
    """Whether both are finite; if not, the step was skipped."""
    lr: float
    seq_len: int
    data_wait_s: float


def run_steps(
    job: Job, stream: TrainStream, checkpointer: Checkpointer, progress: Progress, stop: StopRequests
) -> None:
    """Take every step that is left, or until asked to stop, logging, validating and saving as the recipe says.

    Raises:
        CheckpointError: a checkpoint could not be written.
        MeshtronError: too many steps in a row had a loss or gradient that is not finite.
    """
    recipe, last = job.recipe, job.recipe.training.steps
    held_out = open_validation(recipe, job.mesh, job.device) if recipe.validation.interval else None
    stopwatch, unchecked, stage = Stopwatch(), deque[Outcome](), None
    with (
        open_metrics(job, progress) as metrics,
        scheduled_garbage_collection() as collect,
        profiler(recipe.profile.steps, Path(recipe.run.dir)) as profile,
    ):
        while progress.step < last:
            profile(progress.step + 1)
            if stage != (stage := recipe.data_stage(progress.step)):
                log.info("step %d: %s", progress.step + 1, describe_stage(recipe, progress.step))
            outcome = train_step(job, stream, progress, lambda: stop.ask(checkpointer.failed))
            stopwatch.count(outcome.data_wait_s)
            unchecked.append(outcome)
            # A GPU's finding is looked at while it works on the next step, so that it need not stand still.
            check_steps(job, unchecked, progress, checkpointer, leave=int(job.device.type == "cuda"))
            write_down(job, outcome, progress, stopwatch, held_out, metrics)
            agreed = stop.agreed()
            if agreed.save_failed:
                checkpointer.wait()
            stopping = agreed.stop and progress.step < last
            if save_due(recipe, progress.step) or (stopping and recipe.checkpoint.save_on_exit):
                check_steps(job, unchecked, progress, checkpointer)
                progress.data = data_state(stream, progress.samples)
                with stopwatch.stopped(job.device):
                    save(job, checkpointer, progress)
            if stopping:
                log.info("stopped as asked, after step %d of %d", progress.step, last)
                return
            collect(progress.step)


def write_down(
    job: Job,
    outcome: Outcome,
    progress: Progress,
    stopwatch: Stopwatch,
    held_out: ValidationSet | None,
    metrics: MetricsWriter | None,
) -> None:
    """Validate and log as the recipe says for the step that was taken last."""
    recipe, step = job.recipe, progress.step
    extra: dict[str, float] = {"data_stage": recipe.data_stage(step - 1) + 1} if recipe.data.stages else {}
    if held_out is not None and step % recipe.validation.interval == 0:
        with stopwatch.stopped(job.device):
            extra["val_loss"] = validate(job, held_out)
    if metrics is not None and (step % recipe.metrics.log_interval == 0 or step == recipe.training.steps):
        metrics.log(measure(job, outcome, progress, stopwatch), **extra)


def save_due(recipe: Recipe, step: int) -> bool:
    """Whether a checkpoint is written after ``step``."""
    interval = recipe.checkpoint.interval
    return step == recipe.training.steps or (interval > 0 and step % interval == 0)


def check_steps(
    job: Job, unchecked: deque[Outcome], progress: Progress, checkpointer: Checkpointer, *, leave: int = 0
) -> None:
    """Look at what steps have found, oldest first, until ``leave`` of them are left."""
    while len(unchecked) > leave:
        check_skipped(job, unchecked.popleft(), progress, checkpointer)


def check_skipped(job: Job, outcome: Outcome, progress: Progress, checkpointer: Checkpointer) -> None:
    """Log a step that was skipped; end the run after ``training.max_skipped_steps`` in a row."""
    if outcome.finite.item():
        progress.skipped = 0
        if outcome.grad_norm.item() == 0:
            log.info("step %d: no token of the batch has a loss, so weights stay as they are", outcome.step)
        return
    progress.skipped += 1
    most = job.recipe.training.max_skipped_steps
    found = f"step {outcome.step}: loss {outcome.loss.item()}, gradient norm {outcome.grad_norm.item()}"
    log.info("%s: skipped (%d in a row, %d end the run)", found, progress.skipped, most)
    if progress.skipped >= most:
        checkpointer.wait()
        raise MeshtronError(
            f"{found}; {progress.skipped} steps in a row were skipped (training.max_skipped_steps = {most}); the "
            f"last whole checkpoint is {checkpointer.newest() or 'none'}"
        )


def train_step(
    job: Job, stream: TrainStream, progress: Progress, after_backward: Callable[[], None] = lambda: None
) -> Outcome:
    """One optimizer step.

    A step whose loss or gradient norm is not finite leaves weights and optimizer as they are, and so does one that
    has nothing to learn from (no token of the global batch has a loss): weight decay would still move weights. Loss
    and norm are the same on every rank, so all ranks skip it.
    """
    training = job.recipe.training
    batch = stream.batch(progress.samples)

    rate = job.learning_rate.at(progress.step)
    set_learning_rate(job.optimizer.param_groups, rate)
    loss = forward_backward(job, batch)
    after_backward()
    norm = job.optimizer.clip_grad_norm(job.recipe.optimizer.grad_clip or None, norm_type_of(job.recipe))
    finite = torch.isfinite(loss + norm)
    job.optimizer.step(only_if=finite & (norm != 0))

    progress.step += 1
    progress.samples += training.global_batch_size
    progress.tokens += training.global_batch_size * batch.tokens.shape[1]
    return Outcome(
        step=progress.step,
        loss=HostCopy(loss),
        grad_norm=HostCopy(norm),
        finite=HostCopy(finite),
        lr=rate,
        seq_len=batch.tokens.shape[1],
        data_wait_s=stream.wait_s,
    )


def measure(job: Job, outcome: Outcome, progress: Progress, stopwatch: Stopwatch) -> StepMetrics:
    """What the log says about the steps since it was last asked: the last one's loss, and means of times."""
    loss, norm = outcome.loss.item(), outcome.grad_norm.item()
    step_s, data_wait_s = stopwatch.lap()
    return StepMetrics.measured(
        step_tokens=job.recipe.training.global_batch_size * outcome.seq_len,
        num_devices=world.world_size(),
        flops_per_token=flops_of(job.model.spec, model_section(job.recipe), outcome.seq_len),
        peak=device_peak(job),
        step=progress.step,
        tokens=progress.tokens,
        samples=progress.samples,
        loss=loss,
        grad_norm=norm,
        lr=outcome.lr,
        memory_gib=memory_gib(job.device),
        data_wait_s=data_wait_s,
        step_s=step_s,
    )


def device_peak(job: Job) -> float | None:
    """FLOP/s that mfu is a part of: what the recipe states, else what is known of the device."""
    if job.recipe.metrics.peak_tflops:
        return job.recipe.metrics.peak_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(job.device)) if job.device.type == "cuda" else None


def open_metrics(job: Job, progress: Progress) -> "MetricsWriter | nullcontext[None]":
    """The run's log on rank 0, nothing on the others."""
    if dist.get_rank() != 0:
        return nullcontext()
    recipe = job.recipe
    return MetricsWriter(
        Path(recipe.run.dir),
        steps=recipe.training.steps,
        resumed_step=progress.step,
        wandb=recipe.metrics.wandb,
        project=recipe.metrics.wandb_project,
        name=recipe.run.name,
        tensorboard=recipe.metrics.tensorboard,
        config=recipe.model_dump(mode="json"),
    )
