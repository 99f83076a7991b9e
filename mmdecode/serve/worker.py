"""`Worker`: a thread that owns a model, and works while there is work."""

from __future__ import annotations

import threading


class Worker:
    """Base of the workers; a subclass calls `start` once it is ready.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()  # held while what waits is read or changed
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def has_work(self) -> bool:
        """Returns whether there is work."""
        raise NotImplementedError

    def work(self) -> None:
        """Does some of the work; called again while there is any."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread after the work at hand; what waits is not done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.has_work())
                if self._closed:
                    return
            self.work()
