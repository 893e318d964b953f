"""Per-device mathematics of Kimi K3: each op in XLA, beside a reference. No mesh, no collective.

Mosaic GPU kernels of the same ops are planned; none is here yet.
"""
