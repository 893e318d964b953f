"""What a run tells: records to `metrics.jsonl` and TensorBoard, lines to the console."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from k3jax.models.kimi_k3 import counting
from k3jax.train import metrics
from k3jax.train.config import RunConfig
from k3jax.train.tensorboard import TensorBoard
from k3jax.train.utilisation import peak_flops, utilisation


class Reporter:
    """Receives what a run measures; nothing in training reads anything back."""

    def __init__(
        self, cfg: RunConfig, workdir: pathlib.Path, resume_step: int, log: Callable[[str], None]
    ):
        """Opens the files, which keep what is no later than `resume_step`.

        Raises:
          ValueError: train.tensorboard is true and the package is missing.
        """
        self._cfg, self._log = cfg, log
        board = TensorBoard(workdir, resume_step) if cfg.train.tensorboard else None
        self._file = metrics.MetricsFile(workdir / "metrics.jsonl", resume_step)
        self._board = board
        self._progress = metrics.Progress(cfg.train.steps, resume_step)
        self._flops = counting.flops_per_token(cfg.model, cfg.data.sequence_length)
        self._peak: float | None = None

    def find_peak(self) -> None:
        """Finds what utilisation is a share of, and says so; on a CPU that is measured."""
        peak, source = peak_flops()
        devices = jax.sharding.get_mesh().devices
        if peak is not None and devices.flat[0].platform != "cpu":
            peak *= devices.size
        self._peak = peak
        each = f"{self._flops / 1e6:,.1f} MFLOP/token"
        known = "unknown" if peak is None else f"{peak / 1e12:,.3f} TFLOP/s"
        self._log(f"{each}; utilisation is of a peak of {known} ({source})")
        self._progress.pause()

    def step(self, step: int, values: Mapping[str, Any], batch: str) -> None:
        """One update: a record, and a console line at every `train.log_every`-th.

        Args:
          step: Updates done with it.
          values: Its measures as Python values; `load` goes to the records of `balance` only.
          batch: Fingerprint of its tokens.
        """
        each = self._progress.tick(step)
        shown = {k: v for k, v in values.items() if k != "load"}
        record = {"kind": "train", "step": step, **shown, "batch": batch}
        speed = record["tokens_per_second"] = values["tokens"] / each if each else None
        if speed and self._peak:
            record["utilisation"] = utilisation(speed, self._flops, self._peak)
        record["seconds"] = round(self._progress.seconds(), 3)
        self.write(record)
        if step % self._cfg.train.log_every == 0 or step == self._cfg.train.steps:
            self._log(self._progress.line(record))
            self._warn_of_dead(step, values)

    def balance(self, step: int, values: Mapping[str, Any]) -> None:
        """Tokens of each expert in this step, [L_moe][E]: too much for every record."""
        if values.get("load") is not None:
            self.write({"kind": "balance", "step": step, "load": values["load"]})

    def write(self, record: Mapping[str, Any]) -> None:
        """Any record with `kind` and `step`."""
        self._file.write(record)
        if self._board is not None:
            self._board.write(record)

    def pause(self) -> None:
        """Leaves the time since the last step out of the average."""
        self._progress.pause()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _warn_of_dead(self, step: int, values: Mapping[str, Any]) -> None:
        if "dead_experts" in values:
            experts = self._cfg.model.moe.experts
            text = metrics.dead_warning(values["dead_experts"], values["max_violation"], experts)
            if text:
                self._log(f"step {step}  warning: {text}")
