"""Being asked to stop: SIGTERM from a scheduler, Ctrl-C from a person."""

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SystemExit):
    """A run that stopped because it was asked to; its last step is saved.

    Ends the process with 128 + the signal's number, as the shell reports a signal, so that a
    scheduler does not take the run for finished.
    """

    def __init__(self, name: str, step: int):
        """Remembers the signal's `name` and the `step` that was saved."""
        super().__init__(128 + signal.Signals[name].value)
        self.signal, self.step = name, step


class StopRequest:
    """Context manager that notes the first signal and leaves the second to the system.

    `name` is the signal's name once it has come, else None. The loop asks between two updates; a
    second signal ends the process at once, because the old handlers are back by then. Outside the
    main thread Python delivers no signals: nothing is installed and `name` stays None.
    """

    def __init__(self):
        """Nothing is installed before the `with`."""
        self.name: str | None = None
        self._old = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._old.items():
            # None: a handler that was not set from Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old = {}
