"""Outside compiled functions the model refuses what it would silently compute nonsense for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.models.kimi_k3 import cache, model


@pytest.fixture(scope="module")
def small(tiny_config):
    """Two layers, one of each mixer: nothing here needs more."""
    return dataclasses.replace(tiny_config, num_layers=2, mla_layers=(1,))


@pytest.fixture(scope="module")
def variables(small):
    """Shapes only: a refusal comes before the first product."""
    return model.abstract(small)


IDS = {
    "padding inside": ([0, 1, 0, 1, 1], r"segment_ids\[0, 3\] = 1: padding must not stand inside"),
    "falling": ([2, 2, 1, 1, 0], r"segment_ids\[0, 2\] = 1: ids must not decrease"),
    "negative": ([-1, 1, 1, 1, 1], r"segment_ids\[0, 0\] = -1: ids are 0"),
}


@pytest.mark.parametrize(("ids", "message"), IDS.values(), ids=IDS.keys())
def test_segment_ids_without_a_meaning_are_refused_by_every_entry(small, variables, ids, message):
    tokens, ids = np.zeros((1, 5), np.int32), np.array([ids], np.int32)
    empty = cache.init_cache(small, 1, 8)
    for call in (
        lambda: model.forward(small, variables, tokens, ids),
        lambda: model.logits(small, variables, tokens, jnp.asarray(ids)),
        lambda: cache.prefill(small, variables, tokens, jnp.asarray(ids), empty),
    ):
        with pytest.raises(ValueError, match=message) as refusal:
            call()
        assert "\n" not in str(refusal.value)


def test_a_second_document_in_a_prompt_is_refused(small, variables):
    tokens, ids = np.zeros((1, 3), np.int32), np.array([[1, 1, 2]], np.int32)
    with pytest.raises(ValueError, match=r"segment_ids\[0, 2\] = 2: ids reach at most"):
        cache.prefill(small, variables, tokens, ids, cache.init_cache(small, 1, 8))


def test_a_prompt_into_a_cache_in_use_is_refused(small, variables):
    used = cache.init_cache(small, 2, 8)._replace(lengths=np.array([0, 3], np.int32))
    with pytest.raises(ValueError, match=r"cache.lengths\[1\] = 3: .*empty cache.*init_cache"):
        cache.prefill(small, variables, np.zeros((2, 4), np.int32), None, used)


def test_a_prompt_longer_than_its_cache_is_refused_even_in_a_compiled_function(small, variables):
    prefill = lambda v, t, c: cache.prefill(small, v, t, None, c)  # noqa: E731
    empty = jax.eval_shape(lambda: cache.init_cache(small, 1, 4))
    with pytest.raises(ValueError, match="5 tokens in a cache of 4 rows.*max_length"):
        jax.eval_shape(prefill, variables, jax.ShapeDtypeStruct((1, 5), jnp.int32), empty)
    tokens, ids = np.zeros((1, 6), np.int32), np.array([[0, 1, 1, 1, 1, 1]], np.int32)
    with pytest.raises(ValueError, match="5 tokens in a cache of 4 rows"):
        cache.prefill(small, variables, tokens, ids, cache.init_cache(small, 1, 4))


def test_a_step_with_a_full_cache_is_refused_and_with_a_free_row_is_not(small, variables):
    token = np.zeros(2, np.int32)
    full = cache.init_cache(small, 2, 4)._replace(lengths=np.array([3, 4], np.int32))
    with pytest.raises(ValueError, match=r"cache.lengths\[1\] = 4 of 4 rows: the cache is full"):
        cache.decode_step(small, variables, token, full)
    free = jnp.array([3, 2], jnp.int32)
    logits, after = jax.eval_shape(
        lambda v, c: cache.decode_step(small, v, token, c._replace(lengths=free)), variables, full
    )
    assert logits.shape == (2, small.vocab_size) and after.lengths.shape == (2,)


def test_states_alone_hold_any_number_of_tokens(small):
    only_states = dataclasses.replace(small, mla_layers=())
    state = cache.init_cache(only_states, 1, 4)._replace(lengths=np.array([9], np.int32))
    token, variables = np.zeros(1, np.int32), model.abstract(only_states)
    logits, _ = jax.eval_shape(lambda v: cache.decode_step(only_states, v, token, state), variables)
    assert logits.shape == (1, small.vocab_size)
