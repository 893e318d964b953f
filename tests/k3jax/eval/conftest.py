"""The least model with every mechanism, a tokenizer with merges, and a NumPy judge of logits."""

import jax
import numpy as np
import pytest
from small_runs import MODEL

from k3jax.data.tokenizer import Tokenizer
from k3jax.models.kimi_k3 import model

TEXT = "state decay gate router expert token value query layer block norm head\n" * 3


@pytest.fixture(scope="session")
def tokenizer():
    """29 merges fill the model's vocabulary of 288 ids."""
    made = Tokenizer.train([TEXT], 288)
    assert made.vocab_size == 288
    return made


@pytest.fixture(scope="session")
def variables(draw):
    return draw(MODEL, seed=5)


@pytest.fixture(scope="session")
def log_probabilities(variables):
    """Ids of one row -> log p [T, V] of the token after each place, float64, from all logits."""
    length = 128
    run = jax.jit(lambda t, s: model.logits(MODEL, variables, t, s))

    def of(ids):
        tokens, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
        logits = np.asarray(run(tokens, segments), np.float64)[0, : len(ids)]
        top = logits.max(axis=-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

    return of
