"""The metrics of a run as TensorBoard event files, by `train.tensorboard=true`."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

FOLDER = "tensorboard"  # inside a workdir

# Console matters, and numbers that the curves' own axes show.
_LEFT_OUT = ("kind", "step", "batch", "full", "seconds")


class TensorBoard:
    """Writes every number of a record as a scalar, lists as their largest entry."""

    def __init__(self, workdir: pathlib.Path, resume_step: int):
        """Opens a new event file; scalars past `resume_step` of earlier files are hidden by it.

        Raises:
          ValueError: tensorboardX is not installed.
        """
        try:
            import tensorboardX
        except ImportError as error:
            raise ValueError(
                "train.tensorboard=true needs tensorboardX, which is not installed; "
                "pip install 'k3jax[train]', or leave it false: metrics.jsonl has all numbers"
            ) from error
        self._writer = tensorboardX.SummaryWriter(
            str(workdir / FOLDER), purge_step=resume_step + 1, flush_secs=10
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one record of `metrics.jsonl`."""
        for name, value in _numbers(record):
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Writes out what is waiting."""
        self._writer.close()


def _numbers(record: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if not path and name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, list) and value and isinstance(value[0], int | float):
            yield f"{path}{name}_max", max(value)
        elif isinstance(value, int | float):
            yield path + name, value
