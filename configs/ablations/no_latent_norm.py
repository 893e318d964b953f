"""No norm between the expert sum and the latent up-projection (against §2.3, Eq. 11).

The routed experts' share of a layer then has the scale that training gives it.

Command: python experiments/train.py --config=configs/ablations/no_latent_norm.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: not measured. Expect a higher loss; look at the gradient norm too.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.latent_norm=false",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
