"""Continues a text: `python experiments/sample.py --checkpoint=runs/tiny --prompt="def "`."""

import pathlib
import sys

import jax
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.entry import one_line_errors
from k3jax.data.prompt import encode_prompt, text_pieces
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling
from k3jax.parallel.mesh import make_mesh
from k3jax.train.restore import load_model

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir or step folder.", required=True)
PROMPT = flags.DEFINE_string("prompt", "", "Text to continue; empty begins a document.")
TOKENS = flags.DEFINE_integer("tokens", 200, "Tokens at most; the document may end before.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 is greedy.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from the k likeliest tokens; 0 for all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the likeliest tokens of this total mass.")
GREEDY = flags.DEFINE_bool("greedy", False, "The likeliest token always; same as temperature 0.")
SEED = flags.DEFINE_integer("seed", 0, "Equal seeds write equal texts.")


@one_line_errors
def main(argv):
    """Loads the model and streams the continuation to stdout."""
    sampling = Sampling(0.0 if GREEDY.value else TEMPERATURE.value, TOP_K.value, TOP_P.value)
    with jax.set_mesh(make_mesh()):
        loaded = load_model(CHECKPOINT.value)
        tokenizer = loaded.require_tokenizer()
        stream = Generator(loaded.cfg, tokenizer.vocab_size).stream(
            loaded.variables, [encode_prompt(tokenizer, PROMPT.value)], TOKENS.value, sampling,
            jax.random.key(SEED.value),
        )  # fmt: skip
        print(PROMPT.value, end="", flush=True)
        for piece in text_pieces(tokenizer, stream):
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    app.run(main)
