"""Trains a recipe and keeps what it reached: `python benchmarks/train_recipe.py`.

A run that has finished in the workdir is not trained again, only validated.
"""

import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import recipe_report
from benchmarks.environment import environment
from k3jax import config
from k3jax.parallel import host
from k3jax.train import loop

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "Recipe file.")
WORKDIR = flags.DEFINE_string("workdir", "runs/tiny", "Output folder of the run.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/train_tiny_cpu.json", "Result file.")


def main(argv):
    """Trains, then writes the result and the plot."""
    host.prepare()
    workdir = pathlib.Path(WORKDIR.value)
    result = loop.train(config.load_recipe(CONFIG.value), workdir)
    values = recipe_report.report(workdir, result, environment(sys.argv))
    recipe_report.save(workdir, values, pathlib.Path(OUTPUT.value))


if __name__ == "__main__":
    app.run(main)
