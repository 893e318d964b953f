"""Next-token cross-entropy from hidden states and head, without an [N, V] array of logits.

| file | idea |
| --- | --- |
| `api.py` | the contract, its checks and the choice of implementation |
| `reference.py` | all logits at once, the oracle |
| `chunked.py` | rows a chunk at a time: values, or values and gradients in one pass |
| `vjp.py` | makes the gradient part of the forward pass |
"""

from pallas_kernels.cross_entropy.api import cross_entropy, token_nll, token_scores

__all__ = ["cross_entropy", "token_nll", "token_scores"]
