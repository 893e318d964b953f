"""The sign rule of loss-free balancing in the place of Quantile Balancing (§2.3.3).

The bias moves by a fixed rate a step, so it follows a drifting router slowly: look at max_violation
in the first hundred steps.

Command: python experiments/train.py --config=configs/ablations/balancing_sign.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: max violation 2.51 at step 40 of 8 rows (histogram rule 0.83), one seed
  (benchmarks/results/balancing_cpu.json); the whole run is not measured.
  Expect a higher max_violation for most of the run.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.balancing=sign",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
