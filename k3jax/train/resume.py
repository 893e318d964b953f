"""Going on with an earlier run: what must agree, and in what order it is checked."""

from k3jax.train.checkpoint import Checkpoints, read_records
from k3jax.train.config import RunConfig, resume_differences
from k3jax.train.state import TrainState
from k3jax.train.task import Task


class ResumeError(ValueError):
    """A workdir holds another run than the one that is to go on in it."""


def restore(
    checkpoints: Checkpoints, step: int, abstract: TrainState, cfg: RunConfig, task: Task
) -> TrainState:
    """Restores the state and puts `task.batches` where it was.

    Args:
      checkpoints: Of the workdir.
      step: To restore.
      abstract: Shapes and shardings of the state under the current mesh.
      cfg: Of the run that goes on; must equal the stored one but for what only prints.
      task: Of the same; its text must be the stored one, byte for byte.

    Raises:
      ResumeError: another configuration.
      ValueError: another text (`k3jax.data.manifest`), or an unreadable checkpoint.
    """
    folder = checkpoints.folder / str(step)
    records = read_records(folder)
    changed = resume_differences(records["config"], cfg)
    if changed:
        raise ResumeError(
            f"{folder} belongs to a run with another configuration (stored != asked): "
            f"{'; '.join(changed)}; take the stored values, or another --workdir"
        )
    task.verify(records["manifest"])
    state = checkpoints.restore(step, abstract)
    task.batches.set_state(records["data"])
    return state
