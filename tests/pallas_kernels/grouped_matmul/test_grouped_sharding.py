"""Grouped products inside shard_map with varying axes checked, and compiled once per shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from pallas_kernels.grouped_matmul import blocked, expert_ffn, grouped_matmul
from pallas_kernels.situ_glu import situ_glu

ROWS = jax.P(("data", "expert"))


@pytest.fixture
def eight(mesh):
    """Eight devices, two of the four axes in use."""
    return jax.make_mesh((1, 2, 4, 1), mesh.axis_names)


def expert_step(x, indices, p, w1, w2, du):
    """u and every gradient."""
    f = lambda x, p, w1, w2: expert_ffn(x, indices, p, w1, w2, activation=situ_glu)  # noqa: E731
    u, pull = jax.vjp(f, x, p, w1, w2)
    return u, *pull(du)


def expert_arrays(rng, S=32, k=2, E=4, L=8, F=6):
    """Operands of `expert_step`."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    indices = jnp.asarray(rng.integers(0, E, (S, k)), jnp.int32)
    return draw(S, L), indices, draw(S, k), draw(E, L, 2, F), draw(E, F, L), draw(S, L)


@pytest.mark.parametrize("chunk_bytes", [blocked.CHUNK_BYTES, 1], ids=["one_chunk", "scan"])
def test_tokens_split_over_eight_devices_give_the_gradients_of_one(
    rng, eight, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(blocked, "CHUNK_BYTES", chunk_bytes)
    operands = expert_arrays(rng)
    expected = jax.jit(expert_step)(*operands)
    whole = jax.P()
    specs = (ROWS, ROWS, ROWS, whole, whole, ROWS)
    with jax.set_mesh(eight):
        placed = [jax.device_put(a, s) for a, s in zip(operands, specs, strict=True)]
        mapped = jax.shard_map(
            expert_step, in_specs=specs, out_specs=(ROWS, ROWS, ROWS, whole, whole), check_vma=True
        )
        actual = jax.jit(mapped)(*placed)
        text = str(jax.make_jaxpr(mapped)(*placed))
    errors = numerics.tree_relative_error(jax.device_get(actual), expected)
    assert max(errors.values()) < 1e-5, errors
    # Nothing communicates but the sums of the two replicated weights' gradients.
    assert text.count("psum") == 2 and "all_gather" not in text and "all_to_all" not in text


def test_experts_split_over_eight_devices_need_only_the_callers_sum(rng, eight):
    operands = expert_arrays(rng, E=8)
    expected = jax.jit(expert_step)(*operands)

    def held(x, indices, p, w1, w2, du):
        first = jax.lax.axis_index(("data", "expert")) * w1.shape[0]
        u, dx, dp, *dw = expert_step(x, indices - first, p, w1, w2, du)
        return *(jax.lax.psum(a, ("data", "expert")) for a in (u, dx, dp)), *dw

    specs = (jax.P(), jax.P(), jax.P(), ROWS, ROWS, jax.P())
    with jax.set_mesh(eight):
        placed = [jax.device_put(a, s) for a, s in zip(operands, specs, strict=True)]
        mapped = jax.shard_map(
            held, in_specs=specs, out_specs=(jax.P(),) * 3 + (ROWS, ROWS), check_vma=False
        )
        actual = jax.jit(mapped)(*placed)
    errors = numerics.tree_relative_error(jax.device_get(actual), expected)
    assert max(errors.values()) < 1e-5, errors


def test_grouped_matmul_accepts_rows_that_vary_and_weights_that_do_not(rng, eight):
    lhs = jnp.asarray(rng.standard_normal((8, 10, 4)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((3, 4, 5)), jnp.float32)
    sizes = jnp.asarray(rng.integers(0, 4, (8, 3)), jnp.int32)

    def step(lhs, rhs, sizes):
        f = lambda a, b: grouped_matmul(a[0], b, sizes[0])[None]  # noqa: E731
        out, pull = jax.vjp(f, lhs, rhs)
        return out, *pull(jnp.ones_like(out))

    each = [jax.jit(step)(lhs[i : i + 1], rhs, sizes[i : i + 1]) for i in range(8)]
    with jax.set_mesh(eight):
        mapped = jax.shard_map(
            step, in_specs=(ROWS, jax.P(), ROWS), out_specs=(ROWS, ROWS, jax.P()), check_vma=True
        )
        out, d_lhs, d_rhs = jax.device_get(
            jax.jit(mapped)(
                jax.device_put(lhs, ROWS), jax.device_put(rhs, jax.P()), jax.device_put(sizes, ROWS)
            )
        )
    np.testing.assert_array_equal(out, np.concatenate([e[0] for e in each]))
    np.testing.assert_array_equal(d_lhs, np.concatenate([e[1] for e in each]))
    assert numerics.relative_error(d_rhs, sum(e[2] for e in each)) < 1e-6


def test_rows_split_outside_shard_map_are_refused_with_the_way_out(rng, eight):
    lhs, rhs, sizes = jnp.ones((8, 4)), jnp.ones((3, 4, 5)), jnp.array([3, 3, 2], jnp.int32)
    x, indices, p, w1, w2, _ = expert_arrays(rng)
    with jax.set_mesh(eight):
        with pytest.raises(ValueError, match="grouped_matmul: lhs .* inside jax.shard_map or resh"):
            grouped_matmul(jax.device_put(lhs, ROWS), rhs, sizes)
        with pytest.raises(ValueError, match="expert_ffn: x .* inside jax.shard_map or reshard x"):
            expert_ffn(jax.device_put(x, ROWS), indices, p, w1, w2, activation=situ_glu)


def test_one_compilation_serves_every_distribution_of_the_rows(rng):
    lhs = jnp.asarray(rng.standard_normal((30, 4)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((3, 4, 5)), jnp.float32)
    f = jax.jit(grouped_matmul)
    for sizes in ((10, 10, 10), (30, 0, 0), (0, 1, 2)):
        f(lhs, rhs, jnp.array(sizes, jnp.int32))
    assert f._cache_size() == 1
