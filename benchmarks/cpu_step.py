"""Times a recipe's step beside its references: `python benchmarks/cpu_step.py`.

Rows of --lengths tokens, each with the recipe's tokens in a batch; --each adds one arm per op.
"""

import json
import pathlib
import sys

from absl import app, flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import step_comparison
from benchmarks.environment import environment
from k3jax import config
from k3jax.parallel import host

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "Recipe file.")
SET = flags.DEFINE_multi_string("set", [], "Field to replace, as data.source=DIR. Repeatable.")
LENGTHS = flags.DEFINE_list("lengths", ["128", "512", "1024"], "Tokens in a row.")
ROUNDS = flags.DEFINE_integer("rounds", 20, "Updates of every arm that count.", lower_bound=3)
EACH = flags.DEFINE_bool("each", False, "Also one arm per op that alone uses its reference.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/cpu_step.json", "Result file.")


def main(argv):
    """Compares the arms at every length and writes the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
    host.prepare()
    logging.set_verbosity(logging.ERROR)  # the libraries log every file they write
    run = config.override(config.load_recipe(CONFIG.value), SET.value)
    arms = step_comparison.ARMS | (step_comparison.EACH if EACH.value else {})
    rows = [
        step_comparison.compare(
            step_comparison.with_row_length(run, int(length)), arms, rounds=ROUNDS.value
        )
        for length in LENGTHS.value
    ]
    values = {**environment(sys.argv), "recipe": CONFIG.value, "rows": rows}
    output = pathlib.Path(OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
