"""An auxiliary loss in the place of Quantile Balancing (§2.3.3).

Its gradient pulls at the router beside that of the language loss; `aux_loss` in the metrics is what
it adds.

Command: python experiments/train.py --config=configs/ablations/balancing_aux_loss.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: max violation 1.46 at step 40 of 8 rows (histogram rule 0.83), one seed
  (benchmarks/results/balancing_cpu.json); the whole run is not measured.
  Expect a higher max_violation; the weight trades it against the loss.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.moe.balancing=aux_loss",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
