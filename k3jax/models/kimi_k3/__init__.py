"""Kimi K3: configuration, depth, forward pass, loss, decoding and generation, published names."""
