"""Trains a recipe and keeps what it reached: `python benchmarks/train_recipe.py --workdir=DIR`."""

import pathlib
import sys

from absl import app, flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import recipe_report
from benchmarks.environment import environment
from k3jax import config
from k3jax.parallel import host
from k3jax.train import loop

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "Recipe file.")
WORKDIR = flags.DEFINE_string("workdir", None, "New folder for the run.", required=True)
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/train_tiny_cpu.json", "Result file.")


def main(argv):
    """Trains, then writes the result and the plot."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
    host.prepare()
    logging.set_verbosity(logging.ERROR)  # the libraries log every file they write
    workdir = pathlib.Path(WORKDIR.value)
    recipe_report.check_new(workdir)
    result = loop.train(config.load_recipe(CONFIG.value), workdir)
    values = recipe_report.report(workdir, result, environment(sys.argv))
    recipe_report.save(workdir, values, pathlib.Path(OUTPUT.value))


if __name__ == "__main__":
    app.run(main)
