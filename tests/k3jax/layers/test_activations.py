"""The activation that a configuration names."""

from k3jax.layers.activations import ActivationConfig, gated


def test_equal_configurations_name_one_function_object():
    assert gated(ActivationConfig("situ", 4.0, 25.0)) is gated(ActivationConfig())
    assert gated(ActivationConfig(beta=3.0)) is not gated(ActivationConfig())
