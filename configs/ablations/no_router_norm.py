"""Routing weights are the bare scores, not divided by their sum (against Eq. 13).

The latent norm behind the expert sum removes a common factor of a token's weights, so that only
their ratios and the gradient differ.

Command: python experiments/train.py --config=configs/ablations/no_router_norm.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: not measured. Expect a loss within noise of the tiny recipe's; without the latent
  norm the two would differ more.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.renormalize=false",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
