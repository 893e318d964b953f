"""The only custom VJPs of cross-entropy. The gradient is made in the forward pass, then scaled.

Kept: dx, as large as x, and dw, as large as w. Without differentiation neither is computed.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import chunked


def chunked_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk_size: int | None = None,
) -> jax.Array:
    """The loss by chunks of rows; arguments as `cross_entropy`."""
    return _loss(chunk_size or chunked.default_chunk(w.shape[1]), x, w, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(chunk, x, w, targets, weights):
    return chunked.value(x, w, targets, weights, chunk)


def _loss_forward(chunk, x, w, targets, weights):
    loss, dx, dw = chunked.value_and_gradients(x, w, targets, weights, chunk)
    return loss, (dx, dw)


def _loss_backward(chunk, gradients, scale):
    dx, dw = jax.tree.map(lambda g: (scale * g.astype(jnp.float32)).astype(g.dtype), gradients)
    return dx, dw, None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def undifferentiable_scores(
    chunk: int, x: jax.Array, w: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`chunked.scores`, refusing differentiation, which would keep all logits.

    Raises:
      ValueError: it is differentiated.
    """
    return chunked.scores(x, w, targets, chunk)


def _refuse(chunk, x, w, targets):
    raise ValueError(
        f"a token's score of x {x.shape} and w {w.shape} has no gradient; use cross_entropy, whose "
        f"weights may be any signed coefficients, or stop_gradient x and w"
    )


undifferentiable_scores.defvjp(_refuse, lambda *_: (None, None, None))
