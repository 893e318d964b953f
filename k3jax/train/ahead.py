"""A thread that takes items from a source before they are asked for."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Calls `build` in a thread, up to `depth` times ahead of `take`, always in the same order."""

    def __init__(self, build: Callable[[], Item], depth: int):
        """Starts the thread."""
        self._build, self._ready = build, queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed, self._error = False, None
        self._thread = threading.Thread(target=self._run, name="batches-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item; waits for it.

        Raises:
          BaseException: what `build` raised in place of this item, the same object; the thread
            has ended then, and every later call raises it again.
        """
        if self._error is None:
            item, self._error = self._ready.get()
        if self._error is not None:
            raise self._error
        self._room.release()
        return item

    def close(self) -> None:
        """Ends the thread; waits for a call of `build` in progress."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        error = None
        while error is None:
            self._room.acquire()
            if self._closed:
                return
            item = None
            try:
                item = self._build()
            except BaseException as caught:  # whatever it is, the main thread must see it
                error = caught
            self._ready.put((item, error))
