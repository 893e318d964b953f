"""k3jax: Kimi K3 in JAX and Flax, to train and to study."""
