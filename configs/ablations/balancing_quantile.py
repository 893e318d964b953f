"""The exact quantile in the place of its histogram estimate (§2.3.3, App. C).

Gathers every margin of the step on every device, 4·L·E bytes a token: an oracle, not a way to
train at scale.

Command: python experiments/train.py --config=configs/ablations/balancing_quantile.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: max violation 0.66 at step 40 of 8 rows (histogram rule 0.83), one seed
  (benchmarks/results/balancing_cpu.json); the whole run is not measured.
  Expect loads and loss within noise of the histogram rule's.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.balancing=quantile",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
