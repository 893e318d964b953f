"""Per-device mathematics of Kimi K3: kernels and their XLA fallbacks. No mesh, no collective."""
