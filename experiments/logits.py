"""Writes logits: `python experiments/logits.py --checkpoint=DIR --input=FILE --output=FILE`.

FILE is safetensors: `input_ids` [B, T] (and optional `segment_ids`) in, float32 `logits` out. DIR
is a workdir or step folder of experiments/train.py, or a released-layout folder.
"""

import pathlib
import sys

import jax
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import one_line_errors
from k3jax.eval.logits import write_logits
from k3jax.parallel.mesh import make_mesh
from k3jax.train.restore import load_model

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Checkpoint folder.", required=True)
INPUT = flags.DEFINE_string("input", None, "Safetensors file to read.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Safetensors file to write.", required=True)


@one_line_errors
def main(argv):
    """Loads the model and runs the file through it."""
    with jax.set_mesh(make_mesh()):
        loaded = load_model(CHECKPOINT.value)
        write_logits(loaded.cfg, loaded.variables, INPUT.value, OUTPUT.value)
    print(f"logits written to {OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
