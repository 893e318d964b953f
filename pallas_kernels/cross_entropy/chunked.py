"""Cross-entropy over rows a chunk at a time: XLA only, one chunk of logits alive.

With z = x w, P = softmax(z) and Y the targets one-hot, for a chunk of rows:

    nll = logsumexp(z) - z_target     dz = weights (P - Y)     dx = dz wᵀ     dw += xᵀ dz

The loss is linear in its cotangent, so dx and dw can be made while the chunk's z is at hand: three
products in all, where remat of the logits would take four.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.precision import dot

# Logits in one chunk. On CPU 8 MiB of float32 measured fastest: larger chunks leave the cache,
# smaller ones read and write the sum of dw too often. Elsewhere a chunk has to fill the device.
_CPU_LOGITS = 2**21
_LOGITS = 2**26


def default_chunk(vocabulary: int) -> int:
    """Rows per chunk: a power of two, at least 64 so that the products keep their shape."""
    budget = _CPU_LOGITS if jax.default_backend() == "cpu" else _LOGITS
    return max(1 << (max(budget // vocabulary, 1).bit_length() - 1), 64)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product accumulated in float32."""
    return dot(a, b, preferred_element_type=jnp.float32)


def _transposed(a: jax.Array) -> jax.Array:
    """A copy of aᵀ: XLA's CPU products read a transposed left operand at 40 % of their speed."""
    return jax.lax.optimization_barrier(a.T)


def _logits(x, w, targets):
    """Of one chunk: logits [C, V], their logsumexp [C, 1] and the targets' nll [C], float32."""
    z = _product(x, w)
    top = jnp.max(z, axis=-1, keepdims=True)
    logsumexp = top + jnp.log(jnp.sum(jnp.exp(z - top), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(z, targets[:, None], axis=-1, mode="clip")
    return z, logsumexp, (logsumexp - chosen)[:, 0]


def _scan_rows(body: Callable, carry, rows: tuple[jax.Array, ...], chunk: int):
    """Scans `body(carry, chunk of every array of rows)`; the last chunk is filled up with zeros.

    Chunks are of one length as nearly equal as can be, so that little is filled up. Outputs keep
    the rows' order and come without the filling.
    """
    length = rows[0].shape[0]
    parts = -(-length // chunk)
    size = -(-length // parts)
    rows = jax.tree.map(
        lambda a: jnp.pad(a, ((0, parts * size - length),) + ((0, 0),) * (a.ndim - 1)), rows
    )
    rows = jax.tree.map(lambda a: a.reshape(parts, size, *a.shape[1:]), rows)
    carry, out = jax.lax.scan(lambda c, r: body(c, *r), carry, rows)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:length], out)


def _drop_unweighted(x, weights):
    """Clears rows that do not count: their NaN times a weight of 0 would still be NaN."""
    return jnp.where(weights[:, None] != 0, x, jnp.zeros((), x.dtype))


def value(
    x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int
) -> jax.Array:
    """The loss alone, float32; arguments as `cross_entropy`, `chunk` rows at a time."""

    def body(loss, x, targets, weights):
        _, _, nll = _logits(_drop_unweighted(x, weights), w, targets)
        return loss + jnp.sum(weights * nll), None

    zero = jnp.zeros_like(weights[0] * w[0, 0], dtype=jnp.float32)
    return _scan_rows(body, zero, (x, targets, weights), chunk)[0]


def value_and_gradients(
    x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss [], its gradients [N, D] in x's dtype and [D, V] in w's; arguments as `value`.

    dz is rounded to the operands' dtype before a product; dw is summed over chunks in float32.
    """

    def body(carry, x, targets, weights):
        loss, dw = carry
        x = _drop_unweighted(x, weights)
        z, logsumexp, nll = _logits(x, w, targets)
        hit = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
        dz = weights[:, None] * (jnp.exp(z - logsumexp) - hit)
        dz = dz.astype(w.dtype)
        dx = _product(dz, w.T).astype(x.dtype)
        return (loss + jnp.sum(weights * nll), dw + _product(_transposed(x), dz)), dx

    zero = jnp.zeros_like(weights[0] * w[0, 0], dtype=jnp.float32)
    carry = (zero, jnp.zeros_like(w, dtype=jnp.float32))
    (loss, dw), dx = _scan_rows(body, carry, (x, targets, weights), chunk)
    return loss, dx, dw.astype(w.dtype)


def scores(
    x: jax.Array, w: jax.Array, targets: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """-log p(targets_i | x_i) [N] float32 and argmax p [N] int32; arguments as `value`."""

    def body(carry, x, targets):
        z, _, nll = _logits(x, w, targets)
        return carry, (nll, jnp.argmax(z, axis=-1).astype(jnp.int32))

    return _scan_rows(body, None, (x, targets), chunk)[1]
