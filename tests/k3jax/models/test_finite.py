"""Weights that are not numbers are found before the first step."""

import jax
import numpy as np
import pytest

from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.finite import check_finite


@pytest.fixture(scope="module")
def variables(tiny_config, draw):
    return draw(tiny_config)


def spoiled(variables, path, index, value=np.nan):
    """A copy of `variables` with one number replaced."""
    old = variables
    for key in path:
        old = old[key]
    new = np.array(old)
    new[index] = value
    new = jax.device_put(new, old.sharding)
    return jax.tree_util.tree_map_with_path(
        lambda p, leaf: new if tuple(k.key for k in p) == tuple(path) else leaf, variables
    )


def test_finite_weights_pass(tiny_config, variables):
    assert check_finite(tiny_config, variables) is None


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_first_layer_with_a_number_that_is_none_is_named(tiny_config, variables, value):
    for layer in (4, 1):  # the later one first: both are wrong in the second round
        _, _, module, copy = list(depth.layer_paths(tiny_config))[layer]
        path = ("params", "backbone", *module, "mixer", "w_o")
        variables = spoiled(variables, path, (copy, 0, 0, 0), value)
        rule = rf"parameter mixer/w_o of layer {layer} \(from 0\) holds 1 numbers"
        with pytest.raises(ValueError, match=rule):
            check_finite(tiny_config, variables)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (("params", "embedding"), "embedding of the embedding"),
        (("params", "lm_head"), "lm_head of the model's end"),
        (("params", "backbone", "output_res", "query"), "output_res/query of the model's end"),
        (("router", "backbone", "bias"), "backbone/bias of the router"),
    ],
)
def test_weights_outside_the_layers_are_named_too(tiny_config, variables, path, where):
    with pytest.raises(ValueError, match=where):
        check_finite(tiny_config, spoiled(variables, path, 0))
