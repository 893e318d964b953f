"""Trains a recipe: `python experiments/train.py --config=configs/tiny.py --set=train.steps=20`.

Run again with the same flags to resume; a finished run validates once more and prints its result
again.
"""

import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import ROOT, one_line_errors
from k3jax import config
from k3jax.train import loop

CONFIG = flags.DEFINE_string("config", str(ROOT / "configs" / "tiny.py"), "Recipe file.")
SET = flags.DEFINE_multi_string("set", [], "Field to replace, as train.steps=20. Repeatable.")
WORKDIR = flags.DEFINE_string("workdir", None, "Output folder; runs/<recipe name> by default.")
SEED = flags.DEFINE_integer("seed", None, "Replaces train.seed and data.seed.")


@one_line_errors
def main(argv):
    """Builds the run from flags and trains it."""
    changes = list(SET.value)
    if SEED.value is not None:
        changes += [f"train.seed={SEED.value}", f"data.seed={SEED.value}"]
    run = config.override(config.load_recipe(CONFIG.value), changes)
    workdir = WORKDIR.value or pathlib.Path("runs") / pathlib.Path(CONFIG.value).stem
    loop.train(run, workdir)


if __name__ == "__main__":
    app.run(main)
