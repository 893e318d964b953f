"""Signals: noted once, left to the system the second time."""

import os
import signal
import threading

from k3jax.train.interrupt import Interrupted, StopRequest


def test_the_first_signal_is_noted_and_the_old_handlers_are_back():
    seen = []
    old = signal.signal(signal.SIGTERM, lambda *_: seen.append("old"))
    try:
        with StopRequest() as request:
            assert request.name is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.name == "SIGTERM" and seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["old"]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_handlers_are_as_before_after_the_block():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_another_thread_trains_without_handlers():
    names = []

    def body():
        with StopRequest() as request:
            names.append(request.name)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert names == [None]


def test_the_exit_code_is_that_of_the_signal():
    assert Interrupted("SIGTERM", 3).code == 143 and Interrupted("SIGINT", 3).code == 130
