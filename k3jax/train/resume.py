"""Going on with an earlier run: what must agree, and in what order it is checked."""

from collections.abc import Callable
from typing import Any

from k3jax.train.checkpoint import CheckpointError, Checkpoints, read_records
from k3jax.train.config import RunConfig, resume_differences
from k3jax.train.state import TrainState
from k3jax.train.task import Task


class ResumeError(ValueError):
    """A workdir holds another run than the one that is to go on in it."""


def restore(
    checkpoints: Checkpoints,
    abstract: TrainState,
    cfg: RunConfig,
    task: Task,
    log: Callable[[str], None],
) -> tuple[int, TrainState] | None:
    """Restores the newest readable step and puts `task.batches` where it was.

    A step that cannot be read is set aside under another name, and said so, once an older one has
    been read; where none can, all stay as they are and the newest one's error is raised.

    Args:
      checkpoints: Of the workdir.
      abstract: Shapes and shardings of the state under the current mesh.
      cfg: Of the run that goes on; must equal the stored one in all that decides what is learnt.
      task: Of the same; its text must be the stored one, byte for byte.
      log: Told of what cannot be read, and of a mesh that has changed.

    Returns:
      The step and its state; None where there is no checkpoint.

    Raises:
      ResumeError: another configuration.
      ValueError: another text (`k3jax.data.manifest`), or no checkpoint that can be read.
    """
    failures: dict[int, CheckpointError] = {}
    for step in reversed(checkpoints.steps()):
        try:
            records = read_records(checkpoints.folder / str(step))
            _require_same_run(records, step, checkpoints, cfg, task, log)
            state = checkpoints.restore(step, abstract)
        except CheckpointError as error:
            failures[step] = error
            continue
        for bad, error in failures.items():
            log(f"warning: {error}; kept as {checkpoints.set_aside(bad)}, going on from {step}")
        task.batches.set_state(records["data"])
        return step, state
    for error in failures.values():
        raise error
    return None


def _require_same_run(
    records: dict[str, Any],
    step: int,
    checkpoints: Checkpoints,
    cfg: RunConfig,
    task: Task,
    log: Callable[[str], None],
) -> None:
    refused, moved = resume_differences(records["config"], cfg)
    if refused:
        way_out = "take the stored values, or another --workdir"
        if any(line.startswith("train.steps:") for line in refused):
            way_out += "; more steps than planned need train.extend=true"
        raise ResumeError(
            f"{checkpoints.folder / str(step)} belongs to a run with another configuration "
            f"(stored != asked): {'; '.join(refused)}; {way_out}"
        )
    if moved:
        log(f"another mesh ({'; '.join(moved)}): equal up to rounding, not bit for bit")
    task.verify(records["manifest"])
