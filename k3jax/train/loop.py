"""The training loop: steps, and on the way validation, samples, checkpoints and metrics.

A workdir holds `config.txt`, `parameters.txt` (shapes and what the optimizer does to each),
`metrics.jsonl`, `samples.txt`, `checkpoints/`, and after the last step `result.json` and
`plot.png`; `.lock` keeps a second run out. Starting in a workdir with checkpoints resumes it. On
the CPU a resumed run equals one that never stopped, bit for bit: parameters and metrics.
"""

import contextlib
import math
import os
import pathlib
from collections.abc import Callable

import jax

from k3jax.config import to_dict, to_text
from k3jax.optim import optimizer
from k3jax.parallel.mesh import make_mesh
from k3jax.train import metrics, resume
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.config import RunConfig
from k3jax.train.evaluate import Evaluation, compiled_eval, evaluate
from k3jax.train.feed import Feed
from k3jax.train.result import finish
from k3jax.train.samples import SampleFile
from k3jax.train.state import create_state, initial_state
from k3jax.train.step import StepMetrics, compiled_step, run_optimizer
from k3jax.train.task import Task, make_task
from k3jax.train.workdir import opened


class DivergedError(ValueError):
    """The loss or the gradient is no longer a finite number."""


def train(
    cfg: RunConfig,
    workdir: str | os.PathLike,
    *,
    until: int | None = None,
    log: Callable[[str], None] = print,
) -> dict:
    """Trains a run to its last step, from its newest checkpoint if it has one.

    Args:
      cfg: The run.
      workdir: Output folder, made if need be.
      until: Stop after this step with a checkpoint; the schedule stays that of all steps.
      log: Receives every console line.

    Returns:
      What `result.json` holds, or {"step": until} for a run that stopped early.

    Raises:
      ValueError: the workdir cannot be written or is in use; the corpus, or the workdir's earlier
        run, does not fit `cfg`; or the loss is not finite (`DivergedError`).
    """
    with jax.set_mesh(make_mesh(cfg.train.mesh)), contextlib.ExitStack() as closing:
        workdir = closing.enter_context(opened(workdir, log))
        task = make_task(cfg, log)
        checkpoints = Checkpoints(workdir, cfg.train.keep)
        closing.callback(checkpoints.close)
        run = Run(cfg, workdir, task, checkpoints, log)
        closing.callback(run.close)
        run.advance(min(until or cfg.train.steps, cfg.train.steps))
        if run.step < cfg.train.steps:
            return {"step": run.step}
        return finish(cfg, workdir, task, run.validate(full=True), log)


class Run:
    """A run in progress. `step` counts the updates done, as every file of the workdir does."""

    def __init__(
        self,
        cfg: RunConfig,
        workdir: pathlib.Path,
        task: Task,
        checkpoints: Checkpoints,
        log: Callable[[str], None],
    ):
        """Creates the state, or restores it with everything else from the newest checkpoint."""
        self.cfg, self.workdir, self.task, self.log = cfg, workdir, task, log
        self._checkpoints = checkpoints
        self._records = {"config": to_dict(cfg), **task.records()}
        tx = run_optimizer(cfg.optimizer, cfg.train.steps)
        self.step = checkpoints.latest() or 0
        if self.step:
            abstract = jax.eval_shape(lambda: create_state(cfg.model, tx, cfg.train.seed))
            self.state = resume.restore(checkpoints, self.step, abstract, cfg, task)
            log(f"resumed {workdir} at step {self.step} of {cfg.train.steps}")
        else:
            self.state = initial_state(cfg.model, tx, cfg.train.seed)
        self._feed = Feed(task.batches, cfg.train.micro_batches)
        self._update = compiled_step(cfg.model, cfg.optimizer, cfg.train.steps)
        self._eval = compiled_eval(cfg.model)
        (workdir / "config.txt").write_text(to_text(cfg) + "\n", encoding="utf-8")
        table = optimizer.format_rows(optimizer.describe(self.state.params, cfg.optimizer))
        (workdir / "parameters.txt").write_text(table + "\n", encoding="utf-8")
        self._metrics = metrics.MetricsFile(workdir / "metrics.jsonl", self.step)
        self._samples = None  # a task without text has none
        if task.tokenizer is not None:
            self._samples = SampleFile(workdir / "samples.txt", cfg, task.tokenizer, self.step)
        self._progress = metrics.Progress(cfg.train.steps, self.step)
        if self.step < cfg.train.steps:
            count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
            devices = jax.sharding.get_mesh().devices
            log(
                f"{count:,} parameters on {devices.size} {devices.flat[0].device_kind} device(s); "
                "the first step compiles, which takes a minute or two"
            )

    def advance(self, until: int) -> None:
        """Trains up to step `until` and leaves a checkpoint there."""
        waiting = None
        while self.step < until:
            pieces, batch = self._feed.take()
            self.state, measured = self._update(self.state, pieces)
            self.step += 1
            # The device now works on this step: meanwhile build the next batch, and only then
            # wait for the numbers of the step before.
            if self.step < until:
                self._feed.prefetch()
            if waiting is not None:
                self._report(*waiting)
            waiting = (self.step, measured, batch)
            if self._stops_here(until):
                self._report(*waiting)
                waiting = None
                self._pause(until)

    def validate(self, full: bool) -> Evaluation:
        """Validates on everything or on the fixed part, and records it."""
        part = self.task.validation if full else self.task.probe
        result = evaluate(self._eval, self.state, part.batches(), part.size)
        record = {"kind": "validation", "step": self.step, "full": full, "loss": result.loss}
        text = f"validation loss {result.loss:.4f}"
        if result.bits_per_byte is not None:
            record["bits_per_byte"] = result.bits_per_byte
            text += f"  bits per byte {result.bits_per_byte:.4f}"
        self._metrics.write(record)
        self.log(f"step {self.step}  {text}  ({'all' if full else 'a part'} of it)")
        return result

    def close(self) -> None:
        """Closes the metrics file."""
        self._metrics.close()

    def _stops_here(self, until: int) -> bool:
        return self.step == until or any(map(self._due, ("eval", "sample", "checkpoint")))

    def _due(self, what: str) -> bool:
        every = getattr(self.cfg.train, f"{what}_every")
        return every > 0 and self.step % every == 0

    def _pause(self, until: int) -> None:
        """Validation, samples and checkpoint of this step, off the progress clock."""
        if self._due("eval"):
            self.validate(full=False)
        if self._due("sample") and self._samples is not None:
            self.log(self._samples.write(self.step, self.state))
        if self._due("checkpoint") or self.step == until:
            records = {**self._records, "data": self._feed.state()}
            self._checkpoints.save(self.step, self.state, records)
        self._progress.pause()

    def _report(self, step: int, measured: StepMetrics, batch: str) -> None:
        """Writes one step's record; waits for the device to have finished that step."""
        values = {
            k: v.tolist() for k, v in jax.device_get(measured)._asdict().items() if v is not None
        }
        self._refuse_not_finite(step, values)
        each = self._progress.tick(step)
        record = {"kind": "train", "step": step, **values, "batch": batch}
        record["tokens_per_second"] = values["tokens"] / each if each else None
        record["seconds"] = round(self._progress.seconds(), 3)
        self._metrics.write(record)
        if step % self.cfg.train.log_every == 0 or step == self.cfg.train.steps:
            self.log(self._progress.line(record))
            self._warn_of_dead(step, values)

    def _warn_of_dead(self, step: int, values: dict) -> None:
        if "dead_experts" in values:
            experts = self.cfg.model.moe.experts
            text = metrics.dead_warning(values["dead_experts"], values["max_violation"], experts)
            if text:
                self.log(f"step {step}  warning: {text}")

    def _refuse_not_finite(self, step: int, values: dict) -> None:
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                last = self._checkpoints.latest()
                raise DivergedError(
                    f"{name} is {values[name]} at step {step}: training has diverged; lower "
                    "optimizer.peak_lr or optimizer.clip_norm and start a new workdir "
                    f"(newest checkpoint of this one: {'none' if last is None else f'step {last}'})"
                )
