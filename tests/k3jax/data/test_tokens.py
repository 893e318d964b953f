"""Ids survive storage whatever the vocabulary."""

import numpy as np
import pytest

from k3jax.data.tokens import TokenArrays, token_dtype


def test_ids_of_the_released_vocabulary_do_not_wrap(tmp_path):
    # uint16 would give 163585 - 2 * 65536 = 32513.
    arrays = TokenArrays.from_documents([np.array([163585, 0]), np.array([65536])], 163840)
    assert arrays.tokens.dtype == np.uint32
    arrays.save(tmp_path / "x.npy")
    loaded = TokenArrays.load(tmp_path / "x.npy")
    assert loaded.document(0).tolist() == [163585, 0]
    assert loaded.document(1).tolist() == [65536]
    assert loaded.fingerprint == arrays.fingerprint


def test_the_dtype_is_the_smallest_that_holds_the_last_id():
    assert token_dtype(65536) is np.uint16
    assert token_dtype(65537) is np.uint32


@pytest.mark.parametrize("bad", [-1, 300])
def test_an_id_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(ValueError, match=rf"token id {bad} lies outside \[0, 300\)"):
        TokenArrays.from_documents([np.array([1, bad])], 300)


def test_documents_may_be_empty_and_boundaries_count_in_the_fingerprint():
    one = TokenArrays.from_documents([np.array([1, 2]), np.array([], int)], 300)
    other = TokenArrays.from_documents([np.array([1]), np.array([2])], 300)
    assert len(one) == len(other) == 2
    assert one.document(1).size == 0
    assert one.fingerprint != other.fingerprint


def test_a_damaged_file_is_refused(tmp_path):
    arrays = TokenArrays.from_documents([np.arange(10)], 300)
    TokenArrays(arrays.tokens[:5], arrays.offsets).save(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="5 tokens, offsets end at 10; delete the file"):
        TokenArrays.load(tmp_path / "x.npy")
