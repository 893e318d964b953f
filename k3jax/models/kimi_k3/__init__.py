"""Kimi K3: configuration, depth layout, forward pass, decoding state, published names."""
