"""Says what a run needs before it runs: `python experiments/plan.py --config=configs/kimi_k3.py`.

Prints parameters, FLOPs and the memory of each device on any mesh, e.g. `--mesh=data=8,expert=16`;
no device need exist and nothing is allocated.
"""

import json
import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import ROOT, one_line_errors
from k3jax import config
from k3jax.train import plan
from k3jax.train.utilisation import memory_bytes

CONFIG = flags.DEFINE_string("config", str(ROOT / "configs" / "tiny.py"), "Recipe file.")
SET = flags.DEFINE_multi_string("set", [], "Field to replace, as model.remat=true. Repeatable.")
MESH = flags.DEFINE_string("mesh", "", "Axis lengths, as data=8,expert=16; the recipe's if empty.")
BATCH = flags.DEFINE_integer("batch", None, "Rows of an update, over all devices.")
SEQUENCE = flags.DEFINE_integer("sequence", None, "Tokens in a row.")
MEMORY = flags.DEFINE_string("device_memory", "H200", "GiB of a device, or a device's name.")
JSON = flags.DEFINE_string("json", None, "Also write everything to this file.")


@one_line_errors
def main(argv):
    """Plans the run and prints it."""
    run = config.load_recipe(CONFIG.value)
    run = plan.adapt(run, SET.value, MESH.value, BATCH.value, SEQUENCE.value)
    found = plan.make_plan(run, memory_bytes(MEMORY.value))
    print(plan.table(found))
    if JSON.value:
        text = json.dumps(plan.values(found), indent=1)
        pathlib.Path(JSON.value).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
