"""Multi-token prediction: a sixth layer guesses the token after the next one (§2, Table 1).

Its mean loss, `mtp_loss` in metrics.jsonl, is added with a weight of 0.3, a value that the report
does not give. Validation and samples are those of the main head alone.

Command: python experiments/train.py --config=configs/ablations/mtp.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; more than the tiny recipe's by one layer with experts and a second head.
Measured: not measured. Expect `mtp_loss` above the main loss throughout; whether the main
  loss gains in 460 steps is open.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.mtp_layers=1",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
