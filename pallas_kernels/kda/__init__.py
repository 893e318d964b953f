"""Kimi Delta Attention (§2.1.1): the op, its decoding step and its segment map.

Where the names of FLA (`fla.ops.kda`) and FlashKDA are found here:

| file | FLA | FlashKDA |
| --- | --- | --- |
| `api.py` | `chunk_kda`, `fused_recurrent_kda` | `flash_kda` forward entry |
| `inputs.py` | `l2norm_fwd`, `use_qk_l2norm_in_kernel` | L2 norm of kernel 1 |
| `gate.py` | `kda_gate_fwd`, `safe_gate`, `lower_bound` | gate of kernel 1 |
| `reference.py` | `naive_recurrent_kda` | float64 recurrent gold |
| `chunked.py` | `chunk_kda_fwd`, `recompute_w_u_fwd`, `chunk_gated_delta_rule_fwd_h` | kernel 2 |
| `decayed_products.py` | `chunk_kda_fwd_intra` (A_qk, A_kk) | kernel 1, Q_d K_i^T and K_d K_i^T |
| `triangular.py` | `solve_tril` | Neumann inverse of kernel 1 |
| `documents.py` | `cu_seqlens`, `chunk_indices` | `cu_seqlens` |
| `decode.py` | `fused_recurrent_kda` with state indices | none |
| `segment.py` | context-parallel pre-pass (`fla.ops.cp`) | none |
"""

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.decode import POOL_LAYOUT, kda_decode
from pallas_kernels.kda.segment import compose, kda_segment

__all__ = ["POOL_LAYOUT", "compose", "kda", "kda_decode", "kda_segment"]
