"""No Attention Residuals: the plain residual stream (against §2.2).

What the tiny recipe gains from reading over depth, and what the reads cost.

Command: python experiments/train.py --config=configs/ablations/attn_res_none.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; less than the tiny recipe's, which has 11 reads over depth more.
Measured: not measured. Expect a somewhat higher loss; whether five layers show it is open.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.attn_res_block=none",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
