"""Attention Residuals: every sublayer reads a learned mixture over depth (§2.2)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.parallel import specs
from pallas_kernels.precision import einsum


def mixing_scores(
    sources: Sequence[jax.Array], query: jax.Array, key_norm: jax.Array, eps: float
) -> list[jax.Array]:
    """s_j = Σ_d γ_d w_d v_j[d] · rsqrt(mean_d v_j² + eps), float32; no 1/√d, no temperature.

    Args:
      sources: n arrays [B, T, D], the same tokens at different depths.
      query: pseudo-query w [D]; it does not depend on the token.
      key_norm: γ [D].
      eps: inside the root.

    Returns:
      n scores [B, T], float32.
    """
    direction = query.astype(jnp.float32) * key_norm.astype(jnp.float32)

    def score(v: jax.Array) -> jax.Array:
        wide = v.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + eps)
        return einsum("btd,d->bt", wide, direction) * inverse_rms

    return [score(v) for v in sources]


def mix(sources: Sequence[jax.Array], scores: Sequence[jax.Array]) -> jax.Array:
    """h = Σ_j softmax_j(s)_j v_j over the raw, un-normalised sources; float32 sum, source dtype."""
    p = jax.nn.softmax(jnp.stack(scores), axis=0)
    mixed = sum(p[j][..., None] * v.astype(jnp.float32) for j, v in enumerate(sources))
    return mixed.astype(sources[0].dtype)


class DepthMixture(nn.Module):
    """One read site: a pseudo-query and a key norm.

    Pseudo-queries start at zero, so training starts from the plain mean of the sources.
    """

    eps: float
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, bank: Sequence[jax.Array], prefix: jax.Array, prefix_is_empty: jax.Array | bool
    ) -> jax.Array:
        """Mixes the frozen rows with the running sum.

        Args:
          bank: frozen rows, each [B, T, D].
          prefix: sum of sublayer outputs since the last row was frozen, [B, T, D].
          prefix_is_empty: scalar; True right after a row was frozen. The prefix is then no
            source at all (weight exactly zero), not a source of zeros.
        """
        d = prefix.shape[-1]
        zeros, ones = (initializers.constant(c, specs.VECTOR) for c in (0.0, 1.0))
        query = self.param("query", zeros, (d,), self.param_dtype)
        key_norm = self.param("key_norm", ones, (d,), self.param_dtype)
        sources = [*bank, prefix]
        *frozen, running = mixing_scores(sources, query, key_norm, self.eps)
        shut = jnp.where(prefix_is_empty, -jnp.inf, 0.0)
        return mix(sources, [*frozen, running + shut])
