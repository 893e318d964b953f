"""lm-eval on our checkpoints, with tasks from local files.

lm-eval is an extra, imported when tasks are asked for. Nothing is downloaded: its libraries are
told to stay offline unless the environment says otherwise.
"""

import contextlib
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from k3jax.eval.text_model import TextModel, read_generation

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def load_tasks(files: Sequence[str | os.PathLike]) -> list[Any]:
    """Reads lm-eval tasks and their data.

    Args:
      files: YAML files in lm-eval's format; `dataset_path: json` with `data_files` names local
        data. Relative paths in a file start from the file's own folder.

    Returns:
      lm-eval's task objects.

    Raises:
      ValueError: lm-eval is not installed, or a file is no task.
    """
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            f"tasks need lm-eval, which is not installed ({error}); "
            "make setup EXTRAS=train,dev,eval installs it"
        ) from error
    manager = TaskManager(include_defaults=False)
    tasks = []
    for file in map(pathlib.Path, files):
        if not file.is_file() or file.suffix not in (".yaml", ".yml"):
            raise ValueError(f"task {str(file)!r} is no YAML file; give a local lm-eval task file")
        try:
            with contextlib.chdir(file.parent):
                tasks += manager.load([str(file.absolute())])["tasks"].values()
        except Exception as error:  # whatever lm-eval, YAML or the data's reader find wrong
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"task {str(file)!r} cannot be loaded ({type(error).__name__}: {reason}); correct "
                "the file or the data it names"
            ) from error
    return tasks


def run(model: TextModel, tasks: Sequence[Any]) -> dict[str, dict[str, float | None]]:
    """Evaluates a model.

    Args:
      model: The checkpoint.
      tasks: From `load_tasks`.

    Returns:
      Task -> metric -> value, None where it is not finite; standard errors are left out where
      lm-eval has none.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Its own manager would first read the thousands of tasks that lm-eval ships.
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(
        model=adapter(model), tasks=list(tasks), log_samples=False, task_manager=manager
    )
    return {
        task: {
            name.removesuffix(",none"): value if math.isfinite(value) else None
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }
        for task, metrics in found["results"].items()
    }


def adapter(model: TextModel) -> Any:
    """The model as an `lm_eval.api.model.LM`."""
    from lm_eval.api.model import LM

    class Adapter(LM):
        """Requests of lm-eval, answered by `TextModel`."""

        def loglikelihood(self, requests) -> list[tuple[float, bool]]:
            return model.log_likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests) -> list[float]:
            return model.rolling([request.args[0] for request in requests])

        def generate_until(self, requests) -> list[str]:
            return model.continue_texts(
                [(request.args[0], read_generation(request.args[1])) for request in requests]
            )

    return Adapter()


def format_results(results: Mapping[str, Mapping[str, float | None]]) -> str:
    """A line per task and metric, for the console."""
    lines = ((task, *entry) for task, each in results.items() for entry in each.items())
    return "\n".join(
        f"{task}: {name} {'not finite' if value is None else format(value, '.4f')}"
        for task, name, value in lines
    )
