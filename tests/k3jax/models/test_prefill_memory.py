"""Memory of reading a long prompt: linear in its length, no logits but the last (case M2)."""

import jax
import jax.numpy as jnp
from small_runs import MODEL

from k3jax.models.kimi_k3 import cache, model


def read(length):
    """(temporary bytes, cache, text) of the compiled prefill of one prompt."""
    variables = model.abstract(MODEL)
    empty = jax.eval_shape(lambda: cache.init_cache(MODEL, 1, length))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    run = jax.jit(lambda v, t, c: cache.prefill(MODEL, v, t, None, c))
    program = run.lower(variables, ids, empty).compile()
    return program.memory_analysis().temp_size_in_bytes, empty, program.as_text()


def test_a_prompt_of_four_times_the_length_needs_at_most_four_times_the_memory():
    short, small, _ = read(4096)
    long, large, text = read(16384)
    assert long < 4.2 * short
    # The state of KDA does not grow, the latents grow with the tokens.
    assert [a.shape for a in jax.tree.leaves(small.kda)] == [
        a.shape for a in jax.tree.leaves(large.kda)
    ]
    latents = sum(a.size for a in jax.tree.leaves(large.mla))
    assert latents == 4 * sum(a.size for a in jax.tree.leaves(small.mla))
    # No array over all positions and the vocabulary.
    assert f"16384,{MODEL.vocab_size}]" not in text
