"""SwiGLU in the place of SiTU-GLU (against Eq. 12).

Neither branch is capped. Look at the gradient norm beside the loss: the caps are there to bound
activations in long runs at large scale, not to lower the loss of a short one.

Command: python experiments/train.py --config=configs/ablations/swiglu.py
Hardware: 2 CPU cores, 6 GiB, as the tiny recipe.
Time: not measured; about the tiny recipe's.
Measured: not measured. Expect a loss within noise of the tiny recipe's.
"""

from configs import tiny
from k3jax.config import override
from k3jax.train.config import RunConfig

BASE = tiny.config
CHANGES = ("model.activation.kind=swiglu",)


def config() -> RunConfig:
    """The tiny recipe with one field replaced."""
    return override(BASE(), CHANGES)
