"""Warm-up, stable, decay in the place of the cosine (§3.2).

The report found the cosine lower only after each schedule got its own search of rate and batch: at
the rate of the other, neither result says which is better.

Command: python experiments/train.py --config=configs/ablations/wsd.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: not measured. Expect nothing of this pair at one shared rate.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("optimizer.schedule=wsd",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
