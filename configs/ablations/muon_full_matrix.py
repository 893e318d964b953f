"""Muon on whole query, key and value matrices in the place of one block a head (against §2.5).

Heads whose gradients are small get small updates; look at the spread over heads, and at the largest
logits.

Command: python experiments/train.py --config=configs/ablations/muon_full_matrix.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: not measured. Expect a loss within noise of the tiny recipe's: it has two heads.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("optimizer.per_head=false",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
