"""Draws runs over each other: `python experiments/plot.py --runs=runs/a,runs/b --output=both.png`.

A run that ends draws its own `plot.png`; this one compares, or looks at a run in progress.
"""

import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import one_line_errors
from k3jax.train.plot import plot_runs

RUNS = flags.DEFINE_list("runs", None, "Workdirs, separated by commas.", required=True)
NAMES = flags.DEFINE_list("names", None, "Names in the legend; the folders' names by default.")
OUTPUT = flags.DEFINE_string("output", "plot.png", "PNG to write.")


@one_line_errors
def main(argv):
    """Reads the runs' metrics and draws them."""
    names = NAMES.value or [pathlib.Path(run).name for run in RUNS.value]
    if len(set(names)) != len(RUNS.value):
        raise ValueError(f"names {names} for {len(RUNS.value)} runs: give one of its own to each")
    files = {n: pathlib.Path(r) / "metrics.jsonl" for n, r in zip(names, RUNS.value, strict=True)}
    if not plot_runs(files, OUTPUT.value):
        raise ValueError("matplotlib is not installed; pip install 'k3jax[train]'")
    print(f"plot written to {OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
