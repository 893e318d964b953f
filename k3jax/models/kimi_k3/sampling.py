"""From logits to the next token: greedy, temperature, top-k and top-p (nucleus).

The filters compose in the usual order: divide by the temperature, keep the k largest, then keep
the smallest set whose probability (renormalised after top-k) reaches p. All settings but the
shapes are traced, so one compiled step serves every setting.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp

# A float32 sum over a vocabulary is off by less than this share of itself.
_MASS_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        """Refuses settings that have no meaning."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature {self.temperature} must be a finite number >= 0; 0 is greedy"
            )
        try:
            whole = operator.index(self.top_k) >= 0 and not isinstance(self.top_k, bool)
        except TypeError:
            whole = False
        if not whole:
            raise ValueError(f"top_k {self.top_k!r} must be an integer >= 0; 0 keeps every token")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1]; 1 keeps every token")


def filtered_logits(logits: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Scales logits and sets those of excluded tokens to -inf.

    Exactly min(top_k, V) tokens survive top-k: ties go to the lower id. At least one token
    always survives, and top_p = 1 drops none. The mass is summed in float32: what lies within a
    millionth of p counts as p, so that ten tokens of 0.01 reach 0.1. Temperatures below 1e-6 are
    treated as 1e-6 here; `sample` takes the argmax.

    Args:
      logits: [B, V].
      temperature: Scalar > 0.
      top_k: Scalar int, 0 for all.
      top_p: Scalar in (0, 1].

    Returns:
      [B, V] float32.
    """
    scaled = logits.astype(jnp.float32) / jnp.maximum(temperature, 1e-6)
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    in_top_k = rank < jnp.where(top_k > 0, top_k, logits.shape[-1])
    probability = jax.nn.softmax(jnp.where(in_top_k, scaled, -jnp.inf), axis=-1)
    by_rank = jnp.take_along_axis(probability, order, axis=-1)
    # Mass of the tokens that come before: the token that crosses p is still kept. A sum of its own
    # terms, because the inclusive sum less the last term has lost that term's digits.
    before = jnp.pad(jnp.cumsum(by_rank, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    reaches = before < top_p * (1.0 - _MASS_ROUNDING)
    nucleus = jnp.take_along_axis(reaches, rank, axis=-1) | (top_p >= 1.0)
    return jnp.where(in_top_k & (nucleus | (rank == 0)), scaled, -jnp.inf)


def sample(logits: jax.Array, key: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Draws one token per row; temperature 0 takes the first largest logit.

    Row b uses `fold_in(key, b)`, so a row's draw does not depend on the batch around it.

    Args:
      logits: [B, V], unsharded (the caller reshards: sorting needs whole rows).
      key: A typed PRNG key.
      temperature: Scalar >= 0.
      top_k: Scalar int, 0 for all.
      top_p: Scalar in (0, 1].

    Returns:
      [B] int32.
    """
    kept = filtered_logits(logits, temperature, top_k, top_p)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    drawn = jax.vmap(jax.random.categorical)(keys, kept)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
