"""Times a recipe's first steps: `python benchmarks/first_steps.py --config=configs/small.py`.

Writes `benchmarks/results/first_steps_<recipe>_<device>.json`. `--data=task` trains on the
recipe's own data; the default needs no corpus and no tokenizer.
"""

import json
import pathlib
import sys

import jax
from absl import app, flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import step_timing
from benchmarks.environment import environment
from k3jax import config
from k3jax.parallel import host

CONFIG = flags.DEFINE_string("config", "configs/small.py", "Recipe file.")
STEPS = flags.DEFINE_integer("steps", 20, "Steps to run, the first of them off the clock.")
SET = flags.DEFINE_multi_string("set", [], "Field to replace, as train.batch_size=8. Repeatable.")
DATA = flags.DEFINE_string("data", "synthetic", "synthetic, or task: the recipe's own data.")
OUTPUT = flags.DEFINE_string("output", None, "Result file; named after recipe and device if none.")


def main(argv):
    """Measures, prints and writes the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
    host.prepare()
    logging.set_verbosity(logging.ERROR)
    cfg = config.override(config.load_recipe(CONFIG.value), SET.value)
    measured = step_timing.measure(cfg, step_timing.source(cfg, DATA.value), STEPS.value)
    values = {**environment(sys.argv), "data": DATA.value, **measured}
    recipe = pathlib.Path(CONFIG.value).stem
    name = f"first_steps_{recipe}_{step_timing.device_name(jax.devices()[0])}.json"
    output = pathlib.Path(OUTPUT.value or pathlib.Path("benchmarks/results") / name)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1), f"\nwritten to {output}")


if __name__ == "__main__":
    app.run(main)
