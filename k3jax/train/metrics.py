"""What a run reports: one JSON line per record, and one console line with the time that is left.

Records carry `kind` ("train", "validation", "balance") and `step`, the number of optimizer updates
done. A resumed run first drops every record past the step it restored, so the file reads as if the
run had never stopped. Only the clock's fields differ between two equal runs: `seconds`,
`tokens_per_second` and `utilisation`.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.train.workdir import write_whole

DEAD_LIMIT = 0.25  # share of a layer's experts without a token above which the log says so


class MetricsFile:
    """Appends records to a JSON-lines file that stays ordered by step across resumes."""

    def __init__(self, path: os.PathLike, resume_step: int = 0):
        """Opens `path`, keeping whole records with `step` <= `resume_step`.

        The full validation at the end of a run is dropped too: every start makes it anew.
        """
        self.path = pathlib.Path(path)
        old = read_records(self.path)
        kept = [r for r in old if r["step"] <= resume_step and not r.get("full")]
        write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping) -> None:
        """Writes one record and flushes it, so that a killed run keeps what it printed.

        Raises:
          OSError: the file cannot be written, with its name (a full disk has none by itself).
        """
        try:
            self._file.write(json.dumps(strict(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Closes the file; what a full disk did not take is lost, as `write` has said."""
        with contextlib.suppress(OSError):
            self._file.close()


def strict(value: Any) -> Any:
    """`value` as JSON knows it: a number that is not finite is None there."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def read_records(path: os.PathLike) -> Iterator[dict]:
    """Yields the records of a JSON-lines file, ending at the first line that a kill cut short."""
    path = pathlib.Path(path)
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


class Progress:
    """Formats the console line; owns the clock, which nothing in training reads.

    The step time is an exponential average. The first step after a start compiles and is left
    out of it, otherwise the estimate would stay wrong for minutes.
    """

    def __init__(self, steps: int, start: int = 0, clock=time.perf_counter):
        """Counts from step `start` to `steps`; `clock` returns seconds."""
        self.steps, self.start, self._clock = steps, start, clock
        self._begin = self._last = clock()
        self._step_seconds = None

    def seconds(self) -> float:
        """Seconds since this process began to train."""
        return self._clock() - self._begin

    def tick(self, step: int) -> float | None:
        """Notes that `step` is done; returns the averaged seconds of a step, None at first."""
        now = self._clock()
        took, self._last = now - self._last, now
        if step <= self.start + 1:
            return None
        old = self._step_seconds
        self._step_seconds = took if old is None else 0.9 * old + 0.1 * took
        return self._step_seconds

    def pause(self) -> None:
        """Leaves the time since the last step (validation, samples, saving) out of the average."""
        self._last = self._clock()

    def line(self, record: Mapping) -> str:
        """One line for a train record: progress, loss, speed, router health, time left."""
        step, each = record["step"], self._step_seconds
        left = "?" if each is None else duration(each * (self.steps - step))
        speed = record.get("tokens_per_second")
        parts = [
            f"step {step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {record['loss']:.4f}",
            f"grad {record['grad_norm']:.3f}",
            f"lr {record['learning_rate']:.2e}",
            f"{speed:,.0f} tok/s" if speed else "- tok/s",
        ]
        if record.get("max_violation"):
            parts.append(f"max vio {max(record['max_violation']):.2f}")
            parts.append(f"dead {sum(record['dead_experts'])}")
        return "  ".join([*parts, f"eta {left}"])


def duration(seconds: float) -> str:
    """Formats a time as 42s, 3m05s or 2h10m."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def dead_warning(dead: Sequence[int], max_violation: Sequence[float], experts: int) -> str | None:
    """Names the layers whose router has collapsed, or returns None.

    Entropy hides this failure: a router that spreads evenly over few experts looks fine by it.

    Args:
      dead: Experts without a token in the step, per MoE layer.
      max_violation: max load / mean load - 1, per MoE layer.
      experts: Routed experts of a layer.
    """
    named = [
        f"MoE layer {layer}: {count / experts:.1%} of {experts} experts got no token, "
        f"max/mean load {violation + 1:.1f}"
        for layer, (count, violation) in enumerate(zip(dead, max_violation, strict=True))
        if count > DEAD_LIMIT * experts
    ]
    return "; ".join(named) or None
