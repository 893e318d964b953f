"""What a recipe reads, without training: `python experiments/data.py --config=configs/tiny.py`.

Prints the report that begins a run: for each source documents, bytes, tokens, duplicates dropped,
the longest document and its share of the rows.
"""

import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import ROOT, one_line_errors
from k3jax import config
from k3jax.train.task import make_task

CONFIG = flags.DEFINE_string("config", str(ROOT / "configs" / "tiny.py"), "Recipe file.")
SET = flags.DEFINE_multi_string("set", [], "Field to replace, as data.source=DIR. Repeatable.")
OUTPUT = flags.DEFINE_string("output", None, "File for the report as JSON.")


@one_line_errors
def main(argv):
    """Loads the data of a run and prints what it is."""
    task = make_task(config.override(config.load_recipe(CONFIG.value), SET.value), print)
    if OUTPUT.value:
        task.save_report(pathlib.Path(OUTPUT.value))


if __name__ == "__main__":
    app.run(main)
