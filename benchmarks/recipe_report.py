"""One training run of a recipe as a result: what it reached, how fast, and its curves."""

import json
import pathlib
import shutil
import statistics

from k3jax.train.metrics import read_records


def check_new(workdir: pathlib.Path) -> None:
    """Refuses a folder that holds something: a resumed run's clock and machine are not one.

    Raises:
      ValueError: it does.
    """
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise ValueError(
            f"{workdir} is not an empty folder: a measurement is one whole run; "
            "give a new --workdir"
        )


def report(workdir: pathlib.Path, result: dict, environment: dict) -> dict:
    """Gathers the numbers of a finished run.

    Args:
      workdir: The run's folder.
      result: What `train` returned.
      environment: `benchmarks.environment.environment`.

    Returns:
      JSON values: the environment, the result, and from the metrics seconds (first step to the
      last, with compilation, validations and samples), step_seconds (median and quartiles of
      the wall time between neighbouring steps, those pauses included) and tokens trained.

    Raises:
      ValueError: the run has fewer than three steps.
    """
    steps = [r for r in read_records(workdir / "metrics.jsonl") if r["kind"] == "train"]
    clock = [r["seconds"] for r in steps]
    between = [b - a for a, b in zip(clock[:-1], clock[1:], strict=True)]
    if len(between) < 2:
        raise ValueError(f"{workdir} has {len(steps)} steps: a time needs three; train more")
    low, median, high = statistics.quantiles(between, n=4)
    return {
        **environment,
        **result,
        "tokens_trained": sum(r["tokens"] for r in steps),
        "seconds": clock[-1],
        "step_seconds": {"median": median, "quartiles": [low, high]},
    }


def save(workdir: pathlib.Path, values: dict, output: pathlib.Path) -> None:
    """Writes `output` (JSON) and, beside it, the run's plot under the same name."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    plot = workdir / "plot.png"
    if plot.exists():
        shutil.copyfile(plot, output.with_suffix(".png"))
