"""Inputs, a float64 oracle in numpy, and one compiled function per static choice, for KDA's tests.

Compiling is what these tests spend their time on: `evaluate` keeps its jitted functions for the
whole session, so tests that share shapes and options share the program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda


def _draw(T, *, B=2, H=2, K=8, V=12, seed=0, states=None):
    """float32 inputs with slow gates, so that a state survives a few hundred tokens."""
    normal = np.random.default_rng(seed).standard_normal
    drawn = {
        "q": normal((B, T, H, K)),
        "k": normal((B, T, H, K)),
        "v": normal((B, T, H, V)),
        "g": normal((B, T, H, K)),
        "beta": 1 / (1 + np.exp(-normal((B, T, H)))),
        "a_log": 0.2 * normal(H),
        "dt_bias": 0.5 * normal((H, K)) - 4,
    }
    if states is not None:
        drawn["initial_state"] = normal((B, *states, H, K, V))
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def _oracle(q, k, v, g, beta, ids=None, states=None, scale=None):
    """Eq. 1 in float64, one row, head and token at a time, written without the product's code.

    ids [B, T]; states {(row, id): [H, K, V]}. Returns (o, {(row, id): final state}).
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = k.shape
    scale = K**-0.5 if scale is None else scale
    o, final = (
        np.zeros(v.shape),
        {key: np.array(s, np.float64) for key, s in (states or {}).items()},
    )
    for b in range(B):
        for t in range(T):
            key = (b, 1 if ids is None else int(ids[b, t]))
            if key[1] == 0:
                continue
            state = final.setdefault(key, np.zeros((H, K, v.shape[-1])))
            for h in range(H):
                s = np.exp(g[b, t, h])[:, None] * state[h]
                s += beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - s.T @ k[b, t, h])
                state[h] = s
                o[b, t, h] = scale * s.T @ q[b, t, h]
    return o, final


def weights(shape):
    """Fixed cotangents of order one; those of a row's first tokens do not depend on its length."""
    row = np.arange(np.prod(shape[1:]), dtype=np.float32).reshape(shape[1:])
    return np.cos(1.3 * row + np.arange(shape[0], dtype=np.float32).reshape(-1, *[1] * row.ndim))


@functools.cache
def _compiled(options):
    def loss(arrays, segment_ids, segment_base, cotangents):
        o, state = kda(
            **arrays, segment_ids=segment_ids, segment_base=segment_base, **dict(options)
        )
        total = jnp.sum(o * cotangents[0])
        if state is not None:
            total += jnp.sum(state * cotangents[1])
        return total, (o, state)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def _evaluate(inputs, *, segment_ids=None, segment_base=0, d_o=None, d_state=None, **options):
    """(outputs {"o", "state"}, gradients by input name) for the given or fixed cotangents."""
    options = {"qk_l2norm": True, "lower_bound": -5.0, "implementation": "chunked"} | options
    if "a_log" not in inputs:
        options.pop("lower_bound")
    K, V = inputs["k"].shape[-1], inputs["v"].shape[-1]
    B, _, H = inputs["beta"].shape
    slots = () if segment_ids is None else (options.get("num_segments"),)
    d_o = weights(inputs["v"].shape) if d_o is None else d_o
    if options.get("return_final_state") and d_state is None:
        d_state = weights((B, *slots, H, K, V))
    run = _compiled(tuple(sorted(options.items())))
    (_, (o, state)), gradients = run(inputs, segment_ids, segment_base, (d_o, d_state))
    outputs = {"o": o} if state is None else {"o": o, "state": state}
    return jax.tree.map(np.asarray, (outputs, gradients))


@pytest.fixture(scope="session")
def draw():
    return _draw


@pytest.fixture(scope="session")
def oracle():
    return _oracle


@pytest.fixture(scope="session")
def cotangent():
    return weights


@pytest.fixture(scope="session")
def evaluate():
    return _evaluate
