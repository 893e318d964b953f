"""The op under vmap, an explicit mesh and shard_map, and in the dtypes and layouts of a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec, reshard

from k3jax.parallel.mesh import AXES
from pallas_kernels.kda import compose, kda, kda_segment
from pallas_kernels.numerics import relative_error, tree_relative_error

TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS = {"lower_bound": -5.0, "qk_l2norm": True}

# The same float32 program, compiled for other shapes: products and sums may take another order.
SAME_PROGRAM = 1e-6
# Eight devices: sums over the batch in another order, or eight maps composed instead of one row.
EIGHT_DEVICES = 1e-5
# Against the recurrence in float32: a state within rounding, gradients amplified by a decade.
RECURRENCE_STATE, RECURRENCE_GRADIENT = 1e-5, 1e-4
# A second derivative amplifies the gradient's error by another decade.
RECURRENCE_CURVATURE = 1e-3
# One rounding of 2^-9 to bfloat16 at the end; several in a gradient, which passes through more.
BFLOAT16_OUTPUT, BFLOAT16_GRADIENT = 2e-3, 5e-3


@pytest.fixture(scope="module")
def batch(draw):
    ids = np.zeros((8, 20), np.int32)
    ids[:, 1:9], ids[:, 11:20] = 1, 2
    return draw(20, B=8, states=(2,)), ids


def run(x, ids):
    return kda(
        **x, segment_ids=ids, num_segments=2, return_final_state=True, chunk_size=16, **OPTIONS
    )


def specs(x):
    """Batch over the data axis; weights on every device."""
    return {n: PartitionSpec("data" if n in (*TOKENS, "initial_state") else None) for n in x}


@pytest.mark.parametrize("manual", [False, True], ids=["explicit mesh", "shard_map"])
def test_a_batch_sharded_over_eight_devices_gives_the_same_values_and_gradients(
    manual, batch, evaluate, cotangent
):
    x, ids = batch
    options = {"num_segments": 2, "return_final_state": True, "chunk_size": 16}
    outputs, gradients = evaluate(x, segment_ids=ids, **options)
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Explicit,) * 4)
    rows = PartitionSpec("data")
    with jax.set_mesh(mesh):
        sharded = {n: reshard(a, specs(x)[n]) for n, a in x.items()}
        d_o, d_state = (reshard(cotangent(a.shape), rows) for a in (x["v"], x["initial_state"]))

        def total(x, ids):
            mapped = jax.shard_map(run, in_specs=(specs(x), rows), out_specs=rows)
            o, state = mapped(x, ids) if manual else run(x, ids)
            return jnp.sum(o * d_o) + jnp.sum(state * d_state), (o, state)

        grad = jax.jit(jax.grad(total, has_aux=True))
        got, (o, state) = grad(sharded, reshard(ids, rows))
        assert o.sharding.spec[0] == state.sharding.spec[0] == "data"
        assert got["q"].sharding.spec[0] == "data"
    assert relative_error(o, outputs["o"]) < EIGHT_DEVICES
    assert relative_error(state, outputs["state"]) < EIGHT_DEVICES
    assert max(tree_relative_error(got, gradients).values()) < EIGHT_DEVICES


def test_segment_maps_of_eight_context_shards_compose_to_the_map_of_the_row(draw):
    x = draw(40, B=1)
    x.pop("q")
    mesh = jax.make_mesh((1, 1, 1, 8), AXES, axis_types=(AxisType.Explicit,) * 4)
    row = PartitionSpec(None, "context")
    with jax.set_mesh(mesh):
        split = {n: row if n in TOKENS else PartitionSpec(None) for n in x}
        mapped = jax.shard_map(
            lambda x: kda_segment(**x, **OPTIONS),
            in_specs=(split,),
            out_specs=PartitionSpec("context"),
        )
        sharded = {n: reshard(a, split[n]) for n, a in x.items()}
        m, s = jax.tree.map(np.asarray, jax.jit(mapped)(sharded))
    whole = jax.jit(lambda x: kda_segment(**x, **OPTIONS))(x)
    parts = [(m[i : i + 1], s[i : i + 1]) for i in range(8)]
    for got, expected in zip(functools.reduce(compose, parts), whole, strict=True):
        assert relative_error(got, expected) < EIGHT_DEVICES


def test_vmap_over_rows_equals_one_batch(draw, evaluate):
    x = draw(17, states=())
    expected, _ = evaluate(x, return_final_state=True, chunk_size=16)
    rows = {n: a[:, None] for n, a in x.items() if n in (*TOKENS, "initial_state")}
    gate = {n: x[n] for n in ("a_log", "dt_bias")}
    mapped = jax.vmap(lambda row: kda(**row, **gate, **OPTIONS, return_final_state=True))
    o, state = jax.jit(mapped)(rows)
    assert relative_error(o[:, 0], expected["o"]) < SAME_PROGRAM
    assert relative_error(state[:, 0], expected["state"]) < SAME_PROGRAM


def test_slices_of_one_projection_have_the_gradient_of_separate_arrays(draw):
    x = draw(20, B=1, V=8)
    fused = np.concatenate([x["q"], x["k"], x["v"]], axis=-1)
    rest = {n: x[n] for n in ("g", "beta", "a_log", "dt_bias")}

    def total(q, k, v):
        o, _ = kda(q, k, v, **rest, **OPTIONS)
        # A strided cotangent, and a part of o that no cotangent reaches.
        return jnp.sum(jnp.swapaxes(o, 1, 3)[:, ::2] ** 2)

    apart = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    separate = apart(x["q"], x["k"], x["v"])
    together = jax.grad(lambda f: total(*jnp.split(f, 3, axis=-1)))
    joined = jax.jit(together)(fused)
    assert relative_error(joined, np.concatenate(separate, axis=-1)) < SAME_PROGRAM


def test_bfloat16_inputs_keep_their_dtype_and_a_float32_state(draw):
    x = {n: jnp.asarray(a, jnp.bfloat16) for n, a in draw(40).items()}

    def total(x, implementation):
        o, state = kda(**x, **OPTIONS, return_final_state=True, implementation=implementation)
        return jnp.sum(o.astype(jnp.float32) ** 2), (o, state)

    grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    gradients, (o, state) = grad(x, "chunked")
    wanted, (expected, final) = grad(x, "reference")
    assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # Both compute in float32 from the same inputs: only the last rounding to bfloat16 differs.
    assert relative_error(o, expected) < BFLOAT16_OUTPUT
    assert relative_error(state, final) < RECURRENCE_STATE
    for name, value in wanted.items():
        assert gradients[name].dtype == jnp.bfloat16
        assert relative_error(gradients[name], value) < BFLOAT16_GRADIENT, name


def test_gradients_flow_through_both_halves_of_the_segment_map(draw):
    x = draw(20, B=1)

    def total(x, implementation):
        m, s = kda_segment(**x, **OPTIONS, implementation=implementation)
        return jnp.sum(m**2) + jnp.sum(jnp.sin(s))

    x.pop("q")
    grad = jax.jit(jax.grad(total), static_argnums=1)
    errors = tree_relative_error(grad(x, "chunked"), grad(x, "reference"))
    assert max(errors.values()) < RECURRENCE_GRADIENT, errors


@pytest.mark.slow
def test_second_derivatives_equal_those_of_the_recurrence(draw):
    x = draw(20, B=1, H=1, K=4, V=4)

    def curvature(x, implementation):
        def total(x):
            return jnp.sum(kda(**x, **OPTIONS, implementation=implementation)[0] ** 2)

        return jax.jvp(jax.grad(total), (x,), (jax.tree.map(jnp.ones_like, x),))[1]

    run = jax.jit(curvature, static_argnums=1)
    errors = tree_relative_error(run(x, "chunked"), run(x, "reference"))
    assert max(errors.values()) < RECURRENCE_CURVATURE, errors
