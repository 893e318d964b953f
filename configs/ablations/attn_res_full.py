"""Full Attention Residuals: every sublayer reads a mixture of all sublayers before it (§2.2).

The tiny recipe freezes a row every 2 layers; here each of the 10 sublayer outputs is a source. The
form that the block one saves memory and reads against.

Command: python experiments/train.py --config=configs/ablations/attn_res_full.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; more than the tiny recipe's: no two layers share a program, and reads grow with
  the square of depth.
Measured: not measured. Expect a loss close to the tiny recipe's: five layers are too few to
  tell the two forms apart.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.attn_res_block=full",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
