"""Softmax attention over packed documents without a [T, S] array (Gated MLA, §2.1.2).

| file | idea |
| --- | --- |
| `api.py` | the contract, its checks and the choice of implementation |
| `reference.py` | dense softmax, the oracle |
| `tiles.py` | which tiles of the score matrix exist, and what a tile may see |
| `chunked.py` | online softmax over tiles, forward and backward |
| `vjp.py` | pairs the two and lists what is kept between them |
"""

from pallas_kernels.attention.api import attention

__all__ = ["attention"]
