"""Layers of Kimi K3. Generic: each takes its own small config and knows nothing of depth."""
