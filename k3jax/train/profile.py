"""A profile of some steps, by `train.profile_steps=5,8`, for xprof or Perfetto."""

import pathlib
from collections.abc import Callable

import jax

FOLDER = "profile"  # inside a workdir


class Profiler:
    """Traces the steps `first` to `last`, both included; resumed runs trace them if they come."""

    def __init__(
        self, workdir: pathlib.Path, steps: tuple[int, int] | None, log: Callable[[str], None]
    ):
        """Prepares; `steps` None traces nothing."""
        self._folder, self._steps, self._log = workdir / FOLDER, steps, log
        self._running = False

    def before(self, step: int) -> None:
        """Starts at the first step of the range, just before it is dispatched."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, waited_for: object) -> None:
        """Stops behind the last step, once `waited_for`, its result, is there."""
        if self._running and step >= self._steps[1]:
            jax.block_until_ready(waited_for)
            self.close()
            self._log(f"steps {self._steps[0]} to {self._steps[1]} profiled in {self._folder}")

    def close(self) -> None:
        """Stops a trace in progress: a run that ends early keeps what it has."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
