"""Permutations are complete, named by their key, and look random."""

import numpy as np

from k3jax.data.ordering import permutation


def test_a_permutation_holds_every_index_once():
    for length in (0, 1, 2, 1000):
        assert sorted(permutation(length, "x", 1).tolist()) == list(range(length))


def test_the_key_names_the_permutation():
    # Pinned: a run must resume in the same order on every version of numpy.
    assert permutation(8, "rows", 0, 0).tolist() == [2, 0, 3, 7, 6, 5, 4, 1]
    one = permutation(100, "rows", 0, 0).tolist()
    assert one == permutation(100, "rows", 0, 0).tolist()
    others = [permutation(100, *key).tolist() for key in (("rows", 0, 1), ("rows", 1, 0), ("x", 0))]
    assert all(one != other for other in others)


def test_no_place_is_preferred_over_many_keys():
    # 2000 draws of the first place among 10: standard deviation 13, five of them allowed.
    first = [permutation(10, "fair", seed)[0] for seed in range(2000)]
    assert np.all(np.abs(np.bincount(first, minlength=10) - 200) < 67)
