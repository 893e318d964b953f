"""Dense gated feed-forward layer, also the shared experts (§2.3)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.activations import ActivationConfig, gated
from k3jax.parallel import specs
from pallas_kernels.precision import einsum


class FeedForward(nn.Module):
    """down(act(gate x, up x)). `x` and the result are [B, T, D].

    Several shared experts are one such layer of their summed width: a sum of gated layers is the
    gated layer of the concatenated columns.
    """

    width: int
    activation: ActivationConfig
    init_std: float | None = 0.02
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d, f = x.shape[-1], self.width
        into = initializers.normal(self.init_std, specs.IN_HEADS, d)
        back = initializers.normal(self.init_std, specs.OUT_MATRIX, f)
        w_gate_up = self.param("w_gate_up", into, (d, 2, f), self.param_dtype)
        w_down = self.param("w_down", back, (f, d), self.param_dtype)
        both = einsum("btd,dgf->btgf", x, w_gate_up.astype(x.dtype))
        hidden = gated(self.activation)(both[..., 0, :], both[..., 1, :])
        return einsum("btf,fd->btd", hidden, w_down.astype(x.dtype), out_sharding=specs.ACTIVATION)
