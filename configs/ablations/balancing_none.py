"""No balancing at all (against §2.3.3).

Look at dead_experts and at the balance map of the plot: experts that fall behind stay behind.

Command: python experiments/train.py --config=configs/ablations/balancing_none.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: max violation 1.73 at step 40 of 8 rows (histogram rule 0.83), one seed
  (benchmarks/results/balancing_cpu.json); the whole run is not measured.
  Expect dead experts and a higher loss.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.balancing=none",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
