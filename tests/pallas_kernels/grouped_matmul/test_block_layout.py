"""Block layout and routes: a bijection of rows, whatever the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.blocked import multiply_blocks, outer_blocks
from pallas_kernels.grouped_matmul.layout import block_count, block_layout, default_block_size
from pallas_kernels.grouped_matmul.routes import block_routes, sort_routes

layout_of = jax.jit(block_layout, static_argnums=(1, 2))


@pytest.fixture(scope="module", autouse=True)
def module_mesh():
    """Hypothesis refuses fixtures that restart per test; one mesh serves all of its examples."""
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        yield


def check_layout(sizes, rows, block_size):
    """The properties that every layout must have."""
    group, row, slot = (
        np.asarray(a) for a in layout_of(jnp.array(sizes, jnp.int32), rows, block_size)
    )
    owned = sum(sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    assert row.shape == (block_count(rows, len(sizes), block_size), block_size)
    # Every owned row sits in one slot, of a block of its group, and slot and row are inverse.
    used = row[row < rows]
    np.testing.assert_array_equal(np.sort(used), np.arange(owned))
    np.testing.assert_array_equal(row.ravel()[slot[:owned]], np.arange(owned))
    np.testing.assert_array_equal(group[slot[:owned] // block_size], owner)
    np.testing.assert_array_equal(slot[owned:], row.size)
    assert (row[row >= rows] == rows).all() and (np.diff(group) >= 0).all()
    # A block without rows repeats a group that has some.
    if owned:
        assert set(group) <= {e for e, n in enumerate(sizes) if n}


@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 30]), min_size=4, max_size=4),
    block_size=st.sampled_from([1, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_a_layout_is_a_bijection_between_owned_rows_and_slots(sizes, block_size):
    check_layout(sizes, 120, block_size)


@pytest.mark.parametrize("sizes", [(0, 1, 63, 64, 65, 300), (493, 0, 0, 0, 0, 0), (0,) * 6])
def test_the_worst_distributions_fit_the_static_number_of_blocks(sizes):
    check_layout(sizes, 493, 64)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (4, 32), (64, 32), (4096, 16), (131072, 896)])
def test_the_default_block_is_a_power_of_two_within_bounds(rows, groups):
    size = default_block_size(rows, groups)
    assert size in (16, 32, 64, 128)
    if rows >= 64 * groups:
        assert block_count(rows, groups, size) * size <= 1.25 * rows


@pytest.mark.parametrize("arrange", [sort_routes, lambda e, n: block_routes(e, n, 4)])
def test_routes_are_inverse_of_each_other_and_leave_out_foreign_experts(rng, arrange):
    expert = rng.integers(-1, 6, (9, 3)).astype(np.int32)  # -1 and 5 belong to nobody
    routes = arrange(jnp.asarray(expert), 5)
    route, row = np.asarray(routes.route), np.asarray(routes.row)
    inside = (expert >= 0) & (expert < 5)
    np.testing.assert_array_equal(row[~inside], route.size)
    flat = np.arange(27).reshape(9, 3)
    np.testing.assert_array_equal(route[row[inside]], flat[inside])
    assert (route < 27).sum() == inside.sum()
    # Rows of one expert are together, in the order of their routes.
    order = expert.ravel()[route[route < 27]]
    assert (np.diff(order) >= 0).all()


def test_chunks_of_any_size_give_the_product_of_one_chunk(rng, monkeypatch):
    blocks = jnp.asarray(rng.standard_normal((7, 3, 5)), jnp.float32)
    right = jnp.asarray(rng.standard_normal((7, 3, 4)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((3, 5, 4)), jnp.float32)
    group = jnp.array([0, 0, 0, 2, 2, 2, 2], jnp.int32)
    whole = multiply_blocks(blocks, weights, group), outer_blocks(blocks, right, group, 3)
    for chunk in (1, 3):  # whole chunks only, and a rest of one block
        budget = chunk * 5 * 4 * 4
        monkeypatch.setattr("pallas_kernels.grouped_matmul.blocked.CHUNK_BYTES", budget)
        parts = multiply_blocks(blocks, weights, group), outer_blocks(blocks, right, group, 3)
        for a, e in zip(parts, whole, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
