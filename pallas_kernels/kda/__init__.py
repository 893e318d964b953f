"""Kimi Delta Attention (§2.1.1): the op, its decoding step and its segment map.

The same ideas in FLA (files of `fla/ops/kda`) and FlashKDA (its forward kernels 1 and 2 are
`csrc/smxx/fwd_kernel1.cuh` and `fwd_kernel2.cuh`):

| here | FLA | FlashKDA |
| --- | --- | --- |
| `api.py`: `kda` | `chunk.py`: `chunk_kda` | `flash_kda/__init__.py` |
| `inputs.py`: padding, norms, scale | `use_qk_l2norm_in_kernel` | kernel 1 |
| `gate.py`: Eq. 5 | `gate.py`, `safe_gate`, `lower_bound` | kernel 1 |
| `documents.py`: segment ids | `cu_seqlens`, `chunk_indices` | `cu_seqlens` |
| `reference.py`: Eq. 1 | `naive.py`: `naive_recurrent_kda` | gold recurrence of its tests |
| `decayed_products.py`: L and A of Eq. 3 | `chunk_intra.py`: `Akk`, `Aqk` | kernel 1 |
| `triangular.py`: (I + L)^-1 | `solve_tril` | kernel 1, a Neumann product |
| `chunked.py`: Eq. 4 and the state | `chunk_fwd.py`, `wy_fast.py` | kernel 2 |
| `decode.py`: `kda_decode` | `fused_recurrent.py`: `fused_recurrent_kda` | none |
| `segment.py`: local half of Eq. 17 | `fla/ops/cp` | `flash_kda/cp.py` |

`checks.py` refuses calls that do not fit; `check_chunk_size` and `check_lower_bound` are public for
configurations, which refuse a value before there is an array. States are key-first here,
[.., K, V], which is FLA's default; FlashKDA keeps [.., V, K].
"""

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.checks import check_chunk_size
from pallas_kernels.kda.decode import POOL_LAYOUT, kda_decode
from pallas_kernels.kda.gate import check_lower_bound
from pallas_kernels.kda.segment import compose, kda_segment

__all__ = [
    "POOL_LAYOUT",
    "check_chunk_size",
    "check_lower_bound",
    "compose",
    "kda",
    "kda_decode",
    "kda_segment",
]
