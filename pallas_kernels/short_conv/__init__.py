"""Short causal depthwise convolution before KDA (§2.1.1).

| file | idea |
| --- | --- |
| `api.py` | `short_conv`: the contract, its checks and the choice of implementation |
| `reference.py` | token by token, the oracle |
| `taps.py` | the sum over taps and its gradient, documents as masks |
| `history.py` | the inputs that a row carries from piece to piece |
"""

from pallas_kernels.short_conv.api import short_conv

__all__ = ["short_conv"]
