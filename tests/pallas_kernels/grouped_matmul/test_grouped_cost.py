"""What the blocked products cost: FLOPs counted in the program, memory counted by the compiler."""

import math

import jax
import jax.numpy as jnp
import pytest
from jaxprs import runs

from pallas_kernels.grouped_matmul import expert_ffn, grouped_matmul
from pallas_kernels.situ_glu import situ_glu


def dot_flops(jaxpr):
    """FLOPs of every dot_general in `jaxpr`, those in the body of a scan times its length."""
    total = 0
    for eqn, times in runs(jaxpr):
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += times * 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contract)
        assert not eqn.primitive.name.startswith("ragged"), "the masked dense lowering"
    return total


def abstract(*shape, dtype=jnp.float32):
    """An array that is never made."""
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("experts", [16, 64])
def test_forward_and_backward_do_at_most_one_and_a_half_times_the_active_flops(experts):
    S, k, L, F = 4096, 4, 96, 64
    operands = (abstract(S, L), abstract(S, k))
    weights = (abstract(experts, L, 2, F), abstract(experts, F, L))

    def loss(x, p, w1, w2, indices):
        return jnp.sum(expert_ffn(x, indices, p, w1, w2, activation=situ_glu))

    indices = abstract(S, k, dtype=jnp.int32)
    active = 2 * S * k * (L * 2 * F + F * L)
    forward = dot_flops(jax.make_jaxpr(loss)(*operands, *weights, indices).jaxpr)
    assert active <= forward <= 1.5 * active
    step = jax.grad(loss, argnums=(0, 1, 2, 3))
    both = dot_flops(jax.make_jaxpr(step)(*operands, *weights, indices).jaxpr)
    assert 3 * active <= both <= 1.5 * 3 * active


@pytest.mark.parametrize(("rows", "experts"), [(8192, 16), (8192, 64), (4096, 64), (65536, 896)])
def test_a_grouped_product_does_at_most_one_and_a_half_times_the_useful_flops(rows, experts):
    f = lambda a, b, n: jax.vjp(lambda a, b: grouped_matmul(a, b, n), a, b)[1](a)  # noqa: E731
    operands = abstract(rows, 8), abstract(experts, 8, 8), abstract(experts, dtype=jnp.int32)
    useful = 3 * 2 * rows * 8 * 8
    assert useful <= dot_flops(jax.make_jaxpr(f)(*operands).jaxpr) <= 1.5 * useful


def test_memory_stays_within_three_matrices_at_the_released_size():
    # Latent 3584, width 3072: one gate-up matrix is 88 MB in float32, all gathered at once for
    # 39 blocks would be 3.4 GB. Compiled, never run.
    E, M, L, F = 8, 512, 3584, 3072
    matrix = L * 2 * F * 4

    @jax.jit
    def step(lhs, rhs, sizes, d_out):
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)
        return out, *pull(d_out)

    compiled = step.lower(
        abstract(M, L), abstract(E, L, 2 * F), abstract(E, dtype=jnp.int32), abstract(M, 2 * F)
    ).compile()
    # One matrix in flight and the rows in block space; the gradient itself is an output.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * matrix
