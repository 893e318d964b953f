"""The recall task asks what was told, weighs only answers, and resumes."""

import itertools
import json

import numpy as np
import pytest

from k3jax.data.packing import check_segment_ids
from k3jax.data.synthetic import RecallBatches


def test_every_answer_is_the_value_told_for_its_key():
    batches = RecallBatches(vocab=35, batch_size=8, sequence_length=32, num_pairs=5, seed=1)
    for batch in itertools.islice(batches, 10):
        check_segment_ids(batch["segment_ids"])
        for b in range(8):
            tokens, targets, weights = (batch[n][b] for n in ("tokens", "targets", "weights"))
            told = dict(zip(tokens[1:11:2].tolist(), tokens[2:11:2].tolist(), strict=True))
            assert len(told) == 5
            asked = np.flatnonzero(weights)
            assert asked.tolist() == list(range(11, 31, 2))
            assert [told[k] for k in tokens[asked].tolist()] == targets[asked].tolist()
            np.testing.assert_array_equal(targets[:30], tokens[1:31])
            assert batch["segment_ids"][b].tolist() == [1] * 31 + [0]


def test_keys_and_values_come_from_separate_halves_behind_the_special_ids():
    batch = next(RecallBatches(vocab=35, batch_size=64, sequence_length=35, num_pairs=16))
    keys, values = batch["tokens"][:, 1::2], batch["tokens"][:, 2::2]
    assert keys.min() == 3 and keys.max() == 18
    assert values.min() == 19 and values.max() == 34


def test_the_task_resumes_exactly():
    batches = RecallBatches(35, 2, 16, 4, seed=5)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    resumed = RecallBatches(35, 2, 16, 4, seed=5)
    resumed.set_state(state)
    for _ in range(5):
        np.testing.assert_array_equal(next(batches)["tokens"], next(resumed)["tokens"])
    with pytest.raises(ValueError, match="state has num_pairs=4, this run has 3"):
        RecallBatches(35, 2, 16, 3, seed=5).set_state(state)


def test_tasks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_pairs=17.*16"):
        RecallBatches(35, 2, 64, 17)
    with pytest.raises(ValueError, match="sequence_length=12.*13"):
        RecallBatches(35, 2, 12, 5)
