"""Batches built ahead change no batch and no checkpoint; what goes wrong there is seen here."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

from k3jax.data.synthetic import RecallBatches
from k3jax.train.feed import FIELDS, Feed, fingerprint


def lists():
    return RecallBatches(vocab=35, batch_size=4, sequence_length=16, num_pairs=4, seed=2)


MARKS = [fingerprint(batch) for batch in itertools.islice(lists(), 12)]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "batches-ahead"]


@pytest.fixture(params=[0, 1, 3])
def ahead(request):
    yield request.param
    assert not threads()


def take(fed, count):
    """Marks of `count` batches, the next one placed early as the training loop does."""
    marks = []
    for _ in range(count):
        marks.append(fed.take()[1])
        fed.prefetch()
    return marks


@pytest.mark.parametrize("used", [0, 1, 5])
@pytest.mark.parametrize("later", [0, 2])
def test_a_state_taken_while_batches_wait_goes_on_after_the_last_one_used(ahead, used, later):
    fed = Feed(lists(), 2, ahead)
    assert take(fed, used) == MARKS[:used]
    fed.prefetch()
    if ahead:
        settle(fed, used + 1 + ahead)  # the source itself is this far now
    state = json.loads(json.dumps(fed.state()))
    # The run goes on after the checkpoint, and is killed later.
    assert take(fed, 3) == MARKS[used : used + 3]
    fed.close()
    source = lists()
    source.set_state(state)
    resumed = Feed(source, 2, later)
    assert take(resumed, 12 - used) == MARKS[used:]
    resumed.close()


def settle(fed, position):
    """Waits until the thread has built all that it may."""
    end = time.monotonic() + 30
    while fed._source.get_state()["position"]["next_index"] < position:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_thread_builds_as_many_batches_as_it_may_and_no_more():
    fed = Feed(lists(), 1, 3)
    fed.take()
    settle(fed, 4)
    time.sleep(0.05)
    assert fed._source.get_state()["position"]["next_index"] == 4
    fed.close()
    assert not threads()


def test_the_arrays_placed_are_those_of_the_batch(ahead):
    fed = Feed(lists(), 2, ahead)
    for batch in itertools.islice(lists(), 3):
        pieces, _ = fed.take()
        for name in FIELDS:
            whole = np.concatenate([piece[name] for piece in pieces])
            np.testing.assert_array_equal(whole, batch[name])
    fed.close()


class Breaks:
    """A source whose third batch fails."""

    def __init__(self, error):
        self._lists, self._left, self._error = lists(), 2, error

    def __next__(self):
        if not self._left:
            raise self._error
        self._left -= 1
        return next(self._lists)

    def get_state(self):
        return self._lists.get_state()


@pytest.mark.parametrize("error", [ValueError("no such row"), KeyboardInterrupt()])
def test_an_exception_reaches_the_run_unchanged_and_only_in_place_of_its_batch(ahead, error):
    fed = Feed(Breaks(error), 1, ahead)
    assert [fed.take()[1] for _ in range(2)] == MARKS[:2]
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            fed.take()
        assert caught.value is error
        names = [frame.name for frame in caught.traceback]
        assert names[-1] == "__next__"  # where it was raised, also from the thread
    assert fed.state()["position"] == {"next_index": 2}
    fed.close()


def test_a_feed_may_be_closed_before_between_and_after_its_batches():
    for used in (0, 1, 4):
        fed = Feed(lists(), 1, 2)
        assert take(fed, used) == MARKS[:used]
        fed.close()
        assert not threads()
