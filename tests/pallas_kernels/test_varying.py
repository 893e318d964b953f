"""match_varying: operands of a custom VJP end up varying over the same manual axes."""

import jax
import jax.numpy as jnp

from pallas_kernels.varying import match_varying


def varying(a):
    """The manual axes that `a` varies over."""
    return jax.typeof(a).mat.varying


def test_outside_shard_map_operands_pass_unchanged():
    a, b, none = match_varying(x := jnp.ones(3), y := jnp.ones(2), None)
    assert a is x and b is y and none is None


def test_inside_shard_map_each_operand_varies_over_the_union_and_the_transpose_sums(mesh):
    seen = []

    def step(a, b, c):
        a, b, c = match_varying(a, b, c)
        seen.append([varying(v) for v in (a, b, c)])
        return a * b * c

    specs = jax.P("data"), jax.P("expert"), jax.P()
    with jax.set_mesh(jax.make_mesh((1, 2, 4, 1), mesh.axis_names)):
        a, b = (jax.device_put(jnp.ones(n), s) for n, s in zip((2, 4), specs, strict=False))
        mapped = jax.shard_map(
            step, in_specs=specs, out_specs=jax.P(("data", "expert")), check_vma=True
        )
        gradient = jax.jit(jax.grad(lambda c: mapped(a, b, c).sum()))(jnp.ones(1))
    assert all(axes == {"data", "expert"} for axes in seen[0])
    assert jax.device_get(gradient) == 8.0  # once per device
