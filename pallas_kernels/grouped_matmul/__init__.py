"""Grouped matrix products: rows sorted by group, one matrix per group (§2.3, §5.2).

| file | idea |
| --- | --- |
| `api.py` | `grouped_matmul`: the contract, its checks and the choice of implementation |
| `expert_ffn.py` | `expert_ffn`: the same for a whole routed feed-forward layer |
| `reference.py` | masked dense products, the oracles |
| `layout.py` | rows dealt into blocks of one group each, with static shapes |
| `blocked.py` | products over blocks and their gradients |
| `ragged.py` | the same products through `jax.lax.ragged_dot` |
| `routes.py` | a router's choices to rows and back, by gathers |
| `expert_vjp.py` | the gradient of the routed layer, and what is kept for it |
"""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.expert_ffn import expert_ffn

__all__ = ["expert_ffn", "grouped_matmul"]
