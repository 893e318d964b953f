"""(M, S̃) of a span applied to a state equals running the span, and spans compose."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.kda import compose, kda_segment
from pallas_kernels.numerics import det, relative_error

TOKENS = ("k", "v", "g", "beta")

# float64 over six tokens: some roundings of 1.1e-16 in numbers below one.
EXACT = 1e-15
# float32 over 50 tokens, a product of maps instead of steps: 3e-6 for a rounding of 6e-8 in each.
MAPS = 1e-5


@functools.cache
def span(implementation, **options):
    call = functools.partial(kda_segment, implementation=implementation, **options)
    return jax.jit(call)


def run(x, ids, implementation):
    gate = {"a_log": x["a_log"], "dt_bias": x["dt_bias"]}
    call = span(implementation, lower_bound=-5.0, qk_l2norm=True)
    return call(*(x[n] for n in TOKENS), segment_ids=ids, **gate)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_composed_halves_equal_the_whole_in_float64(implementation):
    with jax.enable_x64(True):
        k = det((6, 4), 1.3, 0.5)[None, :, None]
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v = det((6, 3), 0.9, -0.3)[None, :, None]
        g = -np.exp(det((6, 4), 0.37, 1.0))[None, :, None]
        beta = 1 / (1 + np.exp(-det((6,), 2.1, 0.2)))[None, :, None]
        call = span(implementation, lower_bound=None, qk_l2norm=False)
        halves = [call(*(x[:, part] for x in (k, v, g, beta))) for part in (np.s_[:3], np.s_[3:])]
        m, s = compose(*halves)
        whole_m, whole_s = call(k, v, g, beta)
        np.testing.assert_allclose(m, whole_m, atol=EXACT)
        np.testing.assert_allclose(s, whole_s, atol=EXACT)
        # M as the product of the one-token transitions, later ones on the left.
        transition = np.eye(4)
        for t in range(6):
            k_t = k[0, t, 0]
            one = (np.eye(4) - beta[0, t, 0] * np.outer(k_t, k_t)) @ np.diag(np.exp(g[0, t, 0]))
            transition = one @ transition
        np.testing.assert_allclose(whole_m[0, 0], transition, atol=EXACT)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_the_map_of_the_last_document_carries_any_state_to_its_end(implementation, draw, evaluate):
    x = draw(50, B=4, states=())
    ids = np.zeros((4, 50), np.int32)
    ids[0] = 1  # one document
    ids[1, :20], ids[1, 20:45] = 1, 2  # the last one starts inside, padding behind
    ids[2, 3:10], ids[2, 12:50] = 4, 4  # padding in front and inside
    m, s = run(x, ids, implementation)
    mapped = np.einsum("bhij,bhjv->bhiv", m, x["initial_state"]) + s
    last = ids.max(axis=1, keepdims=True)
    expected, _ = evaluate(
        x | {"initial_state": x["initial_state"][:, None]},
        segment_ids=((ids == last) & (ids > 0)).astype(np.int32),
        num_segments=1,
        return_final_state=True,
        implementation="reference",
    )
    assert relative_error(mapped, expected["state"][:, 0]) < MAPS
    # A row of padding is the identity, exactly.
    np.testing.assert_array_equal(m[3], np.broadcast_to(np.eye(8), (2, 8, 8)))
    assert np.all(s[3] == 0)


def test_composition_is_associative(draw):
    x = draw(50, B=4)
    place = np.broadcast_to(np.arange(50), (4, 50))
    edges = (0, 16, 31, 50)
    parts = []
    for start, stop in zip(edges, edges[1:], strict=False):
        ids = ((place >= start) & (place < stop)).astype(np.int32)
        parts.append(run(x, ids, "chunked"))
    left = compose(compose(parts[0], parts[1]), parts[2])
    right = compose(parts[0], compose(parts[1], parts[2]))
    whole = run(x, np.ones((4, 50), np.int32), "chunked")
    for a, b, c in zip(left, right, whole, strict=True):
        assert relative_error(a, b) < MAPS and relative_error(a, c) < MAPS
