"""Float32 products ask for full float32, and narrower ones are left alone, in every op."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxprs import equations

from pallas_kernels.attention import attention
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.grouped_matmul import expert_ffn, grouped_matmul
from pallas_kernels.grouped_matmul.expert_vjp import RAGGED, routed_ffn
from pallas_kernels.grouped_matmul.ragged import ragged_matmul
from pallas_kernels.kda import kda
from pallas_kernels.precision import dot, einsum
from pallas_kernels.short_conv import short_conv
from pallas_kernels.situ_glu import situ_glu

HIGHEST = jax.lax.Precision.HIGHEST


def products(f, *operands):
    """(dtypes of the operands, precision) of every product in the gradient of f."""

    def total(*operands):
        leaves = jax.tree.leaves(f(*operands))
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    grad = jax.grad(total, tuple(range(len(operands))))
    found = [
        ({str(v.aval.dtype) for v in equation.invars[:2]}, equation.params["precision"])
        for equation in equations(jax.make_jaxpr(grad)(*operands).jaxpr)
        if equation.primitive.name in ("dot_general", "ragged_dot_general")
    ]
    assert found  # the walk did reach the products
    return found


def is_full(precision):
    return precision in (HIGHEST, (HIGHEST, HIGHEST))


def one_device(op):
    """Inside a shard_map of everything: ragged_dot has no rule for the tests' explicit mesh."""
    return jax.shard_map(op, in_specs=jax.P(), out_specs=jax.P())


def calls(dtype):
    """Every op and implementation that multiplies matrices, with its differentiable operands."""
    ones = lambda *shape: jnp.ones(shape, dtype)  # noqa: E731
    ids, p, sizes = jnp.zeros((8, 2), jnp.int32), jnp.ones((8, 2)), jnp.array([3, 5], jnp.int32)
    rows, layer = (ones(8, 4), ones(2, 4, 3)), (ones(8, 4), ones(2, 4, 2, 3), ones(2, 3, 4))
    heads = (ones(1, 8, 2, 4),) * 3
    tokens = (*heads, -heads[0], ones(1, 8, 2))
    ragged_ffn = functools.partial(routed_ffn, RAGGED, situ_glu, None)
    table = {
        "grouped_matmul ragged_dot": (lambda a, b: one_device(ragged_matmul)(a, b, sizes), rows),
        "expert_ffn ragged_dot": (lambda x, *w: one_device(ragged_ffn)(x, ids, p, *w), layer),
    }

    def add(op, names, f, operands):
        for name in names:
            table[f"{op} {name}"] = functools.partial(f, implementation=name), operands

    add("attention", ("chunked", "reference"), attention, heads)
    loss = functools.partial(cross_entropy, targets=ids[:, 0], weights=p[:, 0])
    add("cross_entropy", ("chunked", "reference"), loss, (ones(8, 4), ones(4, 5)))
    grouped = functools.partial(grouped_matmul, group_sizes=sizes)
    add("grouped_matmul", ("blocked", "reference"), grouped, rows)
    experts = functools.partial(expert_ffn, activation=situ_glu)
    routed = lambda x, *w, **options: experts(x, ids, p, *w, **options)  # noqa: E731
    add("expert_ffn", ("blocked", "reference"), routed, layer)
    add("kda", ("chunked", "reference"), kda, tokens)
    add("short_conv", ("reference",), short_conv, (ones(1, 8, 4), ones(4, 3)))
    return table


@pytest.mark.parametrize("name", calls(jnp.float32))
def test_every_float32_product_and_its_gradient_is_full_float32(name):
    f, operands = calls(jnp.float32)[name]
    found = products(f, *operands)
    assert all(is_full(precision) for _, precision in found), found


@pytest.mark.parametrize("name", calls(jnp.bfloat16))
def test_products_of_bfloat16_keep_the_default_precision(name):
    f, operands = calls(jnp.bfloat16)[name]
    found = products(f, *operands)
    assert not any(is_full(precision) for dtypes, precision in found if "bfloat16" in dtypes), found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_result_is_that_of_jax_on_cpu(dtype, rng):
    a, b = (jnp.asarray(rng.normal(size=(7, 7)), dtype) for _ in range(2))
    assert jnp.array_equal(einsum("ij,jk->ik", a, b), jnp.einsum("ij,jk->ik", a, b))
    assert jnp.array_equal(dot(a, b), jnp.dot(a, b))
