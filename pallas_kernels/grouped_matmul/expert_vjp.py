"""The routed expert FFN and its gradient, without keeping the experts' outputs (§5.2.2).

Row r of expert e with activation a_r, output o_r = a_r W2_e, weight p_r and upstream dy_r:

    t_r = dy_r W2_eᵀ     da_r = p_r t_r     dp_r = <a_r, t_r>     dW2_e = sum_r (p_r a_r)ᵀ dy_r

`o` is absent, and t is needed for da anyway. Nothing divides by p, so p = 0 is exact.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import ragged
from pallas_kernels.grouped_matmul.blocked import multiply_blocks, outer_blocks
from pallas_kernels.grouped_matmul.layout import take_rows
from pallas_kernels.grouped_matmul.routes import Routes, block_routes, sort_routes

Activation = Callable[[jax.Array, jax.Array], jax.Array]


class Engine(NamedTuple):
    """How rows are arranged and multiplied; rows are flat, [R, K].

    Attributes:
      arrange: (expert [S, k], E, block_size) -> Routes.
      multiply: (rows [R, K], weights [E, K, C], routes, transpose=, out_dtype=) -> [R, C].
      outer: (left [R, K], right [R, C], routes, E) -> [E, K, C] float32.
    """

    arrange: Callable[..., Routes]
    multiply: Callable[..., jax.Array]
    outer: Callable[..., jax.Array]


def _in_blocks(rows, routes):
    return rows.reshape(routes.owner.shape[0], -1, rows.shape[-1])


def _multiply_in_blocks(rows, weights, routes, **options):
    y = multiply_blocks(_in_blocks(rows, routes), weights, routes.owner, **options)
    return y.reshape(-1, y.shape[-1])


def _outer_in_blocks(left, right, routes, experts):
    return outer_blocks(_in_blocks(left, routes), _in_blocks(right, routes), routes.owner, experts)


BLOCKED = Engine(block_routes, _multiply_in_blocks, _outer_in_blocks)
RAGGED = Engine(
    lambda expert, experts, block_size: sort_routes(expert, experts),
    lambda rows, weights, routes, **options: ragged.ragged_multiply(
        rows, weights, routes.owner, **options
    ),
    lambda left, right, routes, experts: ragged.ragged_outer(left, right, routes.owner),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def routed_ffn(
    engine: Engine,
    activation: Activation,
    block_size: int | None,
    x: jax.Array,
    expert: jax.Array,
    p: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
) -> jax.Array:
    """Σ_i p_i e_i(x); operands as `expert_ffn`'s, varying over the same manual axes.

    Residuals: x, p and the weights, the pre-activations [R, 2, F] and the routes (int32).
    """
    return _forward(engine, activation, block_size, x, expert, p, w_gate_up, w_down)[0]


def _forward(engine, activation, block_size, x, expert, p, w_gate_up, w_down):
    E, L, _, F = w_gate_up.shape
    routes = engine.arrange(expert, E, block_size)
    h = engine.multiply(routes.gather(x), w_gate_up.reshape(E, L, 2 * F), routes)
    o = engine.multiply(activation(h[:, :F], h[:, F:]), w_down, routes)
    return routes.combine(o, p), (x, p, w_gate_up, w_down, h, routes)


def _backward(engine, activation, _, residuals, du):
    x, p, w_gate_up, w_down, h, routes = residuals
    E, L, _, F = w_gate_up.shape
    a, activation_vjp = jax.vjp(activation, h[:, :F], h[:, F:])
    p_rows = take_rows(p.ravel(), routes.route)[:, None]

    dy = routes.gather(du.astype(x.dtype))
    t = engine.multiply(dy, w_down, routes, transpose=True, out_dtype=jnp.float32)
    dp = take_rows(jnp.sum(a.astype(jnp.float32) * t, axis=-1), routes.row)
    dw_down = engine.outer((p_rows * a).astype(x.dtype), dy, routes, E)

    dh = jnp.concatenate(activation_vjp((p_rows * t).astype(a.dtype)), axis=-1)
    dw_gate_up = engine.outer(routes.gather(x), dh, routes, E)
    weights = w_gate_up.reshape(E, L, 2 * F)
    dx = routes.combine(engine.multiply(dh, weights, routes, transpose=True))
    return (
        dx.astype(x.dtype),
        None,
        dp.astype(p.dtype),
        dw_gate_up.reshape(w_gate_up.shape).astype(w_gate_up.dtype),
        dw_down.astype(w_down.dtype),
    )


routed_ffn.defvjp(_forward, _backward)
