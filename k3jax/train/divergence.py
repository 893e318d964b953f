"""A loss or gradient that is no finite number: the report it leaves, and when skipping ends."""

import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.models.kimi_k3.loss import Batch
from k3jax.optim.muon import path_text
from k3jax.train.metrics import strict
from k3jax.train.workdir import write_whole

MAX_SKIPPED = 10  # updates dropped in a row; more is no outlier but a run that has diverged


class DivergedError(ValueError):
    """The loss or the gradient is no longer a finite number."""


def not_finite(values: Mapping[str, Any]) -> str | None:
    """Name and value of the first measure of a step that is not finite, or None."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(values[name]):
            return f"{name} is {values[name]}"
    return None


@jax.jit
def _finite(tree: Any) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]


def broken_leaves(tree: Any) -> list[str]:
    """Paths of the leaves with an entry that is not finite."""
    paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path for path, ok in zip(paths, _finite(tree), strict=True) if not ok]


class Watch:
    """Decides what a step that is not finite does, and writes its report.

    The decision follows from the loss and gradient of the whole batch, so it is the same on every
    device and process.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        skip: bool,
        latest: Callable[[], int | None],
        documents: Callable[[int], Sequence[Sequence[str]]],
        log: Callable[[str], None],
    ):
        """Prepares for a run.

        Args:
          workdir: Of the run; the folder `not_finite/step_<n>` in it receives reports.
          skip: Whether the step function itself drops such updates.
          latest: () -> newest checkpoint, for the message.
          documents: Batch number -> names of the documents in each of its rows.
          log: Told of every skipped update.
        """
        self._workdir, self._skip, self._latest = workdir, skip, latest
        self._documents, self._log = documents, log
        self._in_a_row = 0

    def check(self, step: int, values: Mapping[str, Any], pieces: Sequence[Batch]) -> None:
        """Looks at one step.

        Args:
          step: Updates done with it.
          values: Its measures, as Python numbers.
          pieces: Its micro-batches.

        Raises:
          DivergedError: the step is not finite and is not to be skipped, or too many were.
        """
        reason = not_finite(values)
        if reason is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        rows = self._documents(step - 1)
        folder = self._dump(step, {"reason": reason, **values}, pieces, rows)
        named = ", ".join(dict.fromkeys(name for row in rows for name in row))
        where = f"{reason} at step {step}, documents {_shortened(named)}, report in {folder}"
        if self._skip and self._in_a_row <= MAX_SKIPPED:
            self._log(f"warning: {where}; the update is skipped ({self._in_a_row} in a row)")
            return
        raise DivergedError(
            f"{where}: training has diverged; lower optimizer.peak_lr or optimizer.clip_norm and "
            f"start a new workdir, or go on with train.not_finite=skip, which drops such updates "
            f"({self._newest()})"
        )

    def require_finite(self, step: int, params: Any) -> None:
        """Refuses to save parameters that are not finite: the last good checkpoint must stay good.

        Raises:
          DivergedError: names the first such leaf.
        """
        broken = broken_leaves(params)
        if broken:
            raise DivergedError(
                f"{len(broken)} parameters are not finite after step {step}, first {broken[0]}; "
                f"nothing was saved; lower optimizer.peak_lr and start a new workdir "
                f"({self._newest()})"
            )

    def _newest(self) -> str:
        last = self._latest()
        return f"newest checkpoint of this one: {'none' if last is None else f'step {last}'}"

    def _dump(
        self,
        step: int,
        values: Mapping[str, Any],
        pieces: Sequence[Batch],
        rows: Sequence[Sequence[str]],
    ) -> pathlib.Path:
        """Writes the batch and what is known of the step."""
        folder = self._workdir / "not_finite" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        host = [{k: np.asarray(v) for k, v in jax.device_get(piece).items()} for piece in pieces]
        whole = {name: np.concatenate([piece[name] for piece in host]) for name in host[0]}
        np.savez(folder / "batch.npz", **whole)
        report = {
            "step": step,
            **{k: v for k, v in strict(values).items() if np.isscalar(v) or v is None},
            "documents": [list(row) for row in rows],
        }
        write_whole(folder / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
        return folder


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
