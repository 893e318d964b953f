"""The training loop: steps, and on the way validation, samples, checkpoints and metrics.

A workdir holds `config.txt`, `data.json` (what the text is), `parameters.txt` (shapes and what the
optimizer does to each), `metrics.jsonl`, `samples.txt`, `checkpoints/`, and after the last step
`result.json` and `plot.png`; `.lock` keeps a second run out. Starting in a workdir with checkpoints
resumes it. On the CPU a resumed run equals one that never stopped, bit for bit: parameters and
metrics, however and whenever it was stopped.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Sequence

import jax

from k3jax.config import to_dict, to_text
from k3jax.models.kimi_k3.evaluate import Evaluation, compiled_eval, evaluate
from k3jax.models.kimi_k3.loss import Batch
from k3jax.optim import optimizer
from k3jax.parallel.mesh import make_mesh
from k3jax.train import resume
from k3jax.train.checkpoint import Checkpoints, SaveError
from k3jax.train.config import RunConfig
from k3jax.train.divergence import Watch
from k3jax.train.feed import Feed
from k3jax.train.initialise import load_weights, starting_tokenizer
from k3jax.train.interrupt import Interrupted, StopRequest
from k3jax.train.profile import Profiler
from k3jax.train.report import Reporter
from k3jax.train.result import finish
from k3jax.train.samples import SampleFile
from k3jax.train.state import TrainState, create_state, initial_state, state_from
from k3jax.train.step import StepMetrics, compiled_step, run_optimizer
from k3jax.train.task import Task, make_task
from k3jax.train.workdir import opened, write_whole


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
        run, does not fit `cfg`; the last checkpoint cannot be written (`SaveError`); or the loss
        is not finite (`DivergedError`).
      Interrupted: SIGTERM or Ctrl-C came; the step in hand was finished and saved.
    """
    with jax.set_mesh(make_mesh(cfg.train.mesh)), contextlib.ExitStack() as closing:
        workdir = closing.enter_context(opened(workdir, log))
        task = make_task(cfg, log, starting_tokenizer(cfg, workdir, log))
        task.save_report(workdir / "data.json")
        checkpoints = Checkpoints(workdir, cfg.train.keep, cfg.train.keep_every)
        closing.push(checkpoints.leave)
        run = Run(cfg, workdir, task, checkpoints, log)
        closing.callback(run.close)
        run.advance(cfg.train.steps if until is None else min(until, cfg.train.steps))
        checkpoints.wait()
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
        self.step, self.state = self._restored() or (0, self._initial())
        self._feed = Feed(task.batches, cfg.train.micro_batches, cfg.data.prefetch)
        skip = cfg.train.not_finite == "skip"
        self._update = compiled_step(cfg.model, cfg.optimizer, cfg.train.steps, skip)
        self._watch = Watch(workdir, skip, checkpoints.settled, task.documents, log)
        self._eval = compiled_eval(cfg.model)
        write_whole(workdir / "config.txt", to_text(cfg) + "\n")
        table = optimizer.format_rows(optimizer.describe(self.state.params, cfg.optimizer))
        write_whole(workdir / "parameters.txt", table + "\n")
        self._reporter = Reporter(cfg, workdir, self.step, log)
        self._profiler = Profiler(workdir, cfg.train.profile_steps, log)
        self._samples = None  # a task without text has none
        if task.tokenizer is not None:
            self._samples = SampleFile(workdir / "samples.txt", cfg, task.tokenizer, self.step)
        if self.step < cfg.train.steps:
            count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
            devices = jax.sharding.get_mesh().devices
            log(
                f"{count:,} parameters on {devices.size} {devices.flat[0].device_kind} device(s); "
                "the first step compiles, which takes a minute or two"
            )
            self._reporter.find_peak()

    def _restored(self) -> tuple[int, TrainState] | None:
        cfg = self.cfg
        tx = run_optimizer(cfg.optimizer, cfg.train.steps)
        abstract = jax.eval_shape(lambda: create_state(cfg.model, tx, cfg.train.seed))
        found = resume.restore(self._checkpoints, abstract, cfg, self.task, self.log)
        if found is not None:
            self.log(f"resumed {self.workdir} at step {found[0]} of {cfg.train.steps}")
        return found

    def _initial(self) -> TrainState:
        cfg = self.cfg
        tx = run_optimizer(cfg.optimizer, cfg.train.steps)
        if not cfg.train.init_from:
            return initial_state(cfg.model, tx, cfg.train.seed)
        weights = load_weights(cfg.train.init_from, cfg.model, self.log)
        self.log(f"parameters and router bias from {cfg.train.init_from}; the optimizer is new")
        return state_from(weights, tx, cfg.train.seed)

    def advance(self, until: int) -> None:
        """Trains up to step `until` and leaves a checkpoint there.

        Raises:
          Interrupted: a signal came; the run is saved at `step`.
        """
        waiting = None
        with StopRequest() as request:
            while self.step < until:
                pieces, batch = self._feed.take()
                self._profiler.before(self.step + 1)
                self.state, measured = self._update(self.state, pieces)
                self.step += 1
                self._profiler.after(self.step, measured)
                # The device now works on this step: meanwhile build the next batch, and only then
                # wait for the numbers of the step before.
                if self.step < until:
                    self._feed.prefetch()
                if waiting is not None:
                    self._report(*waiting)
                waiting = (self.step, measured, batch, pieces)
                stop = request.name  # read once: one that comes later waits for the next step
                if self._stops_here(until) or stop:
                    self._report(*waiting)
                    waiting = None
                    self._pause(last=self.step == until or stop is not None)
                if stop:
                    self._stop(stop)
            if request.name:  # it came while the last step was saved
                self._stop(request.name)

    def validate(self, full: bool) -> Evaluation:
        """Validates on everything or on the fixed part, and records it."""
        parts = self.task.validation if full else self.task.probe
        variables = {"params": self.state.params, "router": self.state.router}
        result = evaluate(self._eval, variables, parts)
        record = {"kind": "validation", "step": self.step, "full": full, **result.record()}
        self._reporter.write({**record, **self.task.mix(self.step)})
        self.log(f"step {self.step}  {result.line()}  ({'all' if full else 'a part'} of it)")
        return result

    def close(self) -> None:
        """Closes files and a profile in progress, and ends the thread that builds batches."""
        self._feed.close()
        self._profiler.close()
        self._reporter.close()

    def _stops_here(self, until: int) -> bool:
        return self.step == until or any(map(self._due, ("eval", "sample", "checkpoint")))

    def _due(self, what: str, step: int | None = None) -> bool:
        every = getattr(self.cfg.train, f"{what}_every")
        return every > 0 and (self.step if step is None else step) % every == 0

    def _pause(self, last: bool) -> None:
        """Validation, samples and checkpoint of this step, off the progress clock.

        The checkpoint comes last: a run that resumes from it finds the rest written. So a signal
        at a step that validates takes as long as the validation.
        """
        if self._due("eval"):
            self.validate(full=False)
        if self._due("sample") and self._samples is not None:
            self.log(self._samples.write(self.step, self.state))
        if self._due("checkpoint") or last:
            self._save(last)
        self._reporter.pause()

    def _save(self, last: bool) -> None:
        """Starts a checkpoint; one that fails is announced, and only the last one ends the run."""
        self._watch.require_finite(self.step, self.state.params)
        records = {**self._records, "data": self._feed.state()}
        try:
            self._checkpoints.wait()
        except SaveError as error:  # of the save before: this one may find room again
            self.log(f"step {self.step}  warning: {error}; training goes on")
        try:
            self._checkpoints.save(self.step, self.state, records)
            if last:
                self._checkpoints.wait()
        except SaveError as error:
            if last:
                raise
            self.log(f"step {self.step}  warning: {error}; training goes on")

    def _stop(self, name: str) -> None:
        self.log(f"{name}: stopped and saved at step {self.step}; the same command resumes it")
        raise Interrupted(name, self.step)

    def _report(
        self, step: int, measured: StepMetrics, batch: str, pieces: Sequence[Batch]
    ) -> None:
        """Writes one step's record; waits for the device to have finished that step."""
        values = {
            name: jax.tree.map(lambda a: a.tolist(), value)
            for name, value in jax.device_get(measured)._asdict().items()
            if value is not None
        }
        self._watch.check(step, values, pieces)
        self._reporter.step(step, values, batch)
        if step == self.cfg.train.steps or self._due("eval", step):
            self._reporter.balance(step, values)
