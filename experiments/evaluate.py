"""Judges a checkpoint: `python experiments/evaluate.py --checkpoint=DIR --data="texts/*.txt"`.

Perplexity and bits per byte of a text (--data) or of token ids (--tokens), needle retrieval
(--needle_lengths=256,1024) and local lm-eval tasks (--tasks=task.yaml), in one call or several.
"""

import pathlib
import sys

import jax
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import one_line_errors
from k3jax import config
from k3jax.eval import suite
from k3jax.parallel.mesh import make_mesh
from k3jax.train.restore import load_model

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir, step or released.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Folder for evaluation.json and needle.png.")
SETTINGS = [
    flags.DEFINE_string("data", None, "Text: a file, a directory, a glob or 'stdlib'."),
    flags.DEFINE_string("tokens", None, "Safetensors file with input_ids [B, T]."),
    flags.DEFINE_string("needle_lengths", None, "Prompt lengths in tokens, as 256,1024."),
    flags.DEFINE_string("needle_depths", None, "Where needles stand, as 0,0.5,1."),
    flags.DEFINE_string("needle_trials", None, "Prompts per length and depth."),
    flags.DEFINE_string("needle_keys", None, "Keys in a prompt of ids (no tokenizer)."),
    flags.DEFINE_string("tasks", None, "lm-eval task files, as a.yaml,b.yaml."),
    flags.DEFINE_string("sequence_length", None, "Tokens in a row of text; 1024 by default."),
    flags.DEFINE_string("batch_size", None, "Rows that run together; 8 by default."),
    flags.DEFINE_string("seed", None, "Of the needles."),
]


@one_line_errors
def main(argv):
    """Loads the model and measures what the flags name."""
    given = [f"{flag.name}={flag.value}" for flag in SETTINGS if flag.value is not None]
    wanted = config.override(suite.EvalConfig(), given)
    output = pathlib.Path(OUTPUT.value) if OUTPUT.value else None
    with jax.set_mesh(make_mesh()):
        loaded = load_model(CHECKPOINT.value)
        suite.run(loaded.cfg, loaded.variables, loaded.tokenizer, wanted, output)


if __name__ == "__main__":
    app.run(main)
