"""Locks of folders and files among processes; each ends with the process that has it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from mmdecode.errors import InputError, OptionError

PATIENCE_S = 600.0
"""Seconds that a process waits for another one of the same job."""


class Claim:
    """A lock on a folder, which ends with the process.

    Args:
        handle: The open folder.
        folder: Its path.

    Attributes:
        first: Whether no other process has the folder; always so for a claim that is not shared.
    """

    def __init__(self, handle: int, folder: Path) -> None:
        self._handle, self._folder, self.first = handle, folder, True

    def join(self) -> None:
        """Takes the lock alone, or shares it with the processes that have it.

        While one of them has it alone, to prepare or to merge the results, it is waited for.
        """
        until = time.monotonic() + PATIENCE_S
        while not self.alone():
            with contextlib.suppress(OptionError):
                lock(self._handle, self._folder, share=True)
                self.first = False
                return
            if time.monotonic() > until:
                lock(self._handle, self._folder)  # which says what is wrong
            time.sleep(0.1)

    def share(self) -> None:
        """Lets others join, after the first one has prepared the folder."""
        lock(self._handle, self._folder, PATIENCE_S, share=True)

    def alone(self) -> bool:
        """Takes the lock alone, if no other process shares it; returns whether it did."""
        with contextlib.suppress(OptionError):
            lock(self._handle, self._folder)
            return True
        return False


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False, shared: bool = False) -> Iterator[Claim]:
    """Locks a folder inside the context.

    Args:
        folder: The folder, which exists.
        wait: Whether to wait for another process that has it.
        shared: Whether processes of one job share it, see `Claim.join`.

    Raises:
        OptionError: Another run has it.
        InputError: Its file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    claim = Claim(handle, folder)
    try:
        if shared:
            claim.join()
        else:
            lock(handle, folder, math.inf if wait else 0.0)
        yield claim
    finally:
        os.close(handle)


def lock(handle: int, path: Path, wait_s: float = 0.0, share: bool = False) -> None:
    """Locks an open file or folder until it is closed.

    Args:
        handle: The file or folder.
        path: Its path, for the message.
        wait_s: Seconds to wait for another run.
        share: Whether others may share the lock.

    Raises:
        OptionError: Another run has locked it.
        InputError: Its file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    kind = fcntl.LOCK_SH if share else fcntl.LOCK_EX
    until = time.monotonic() + wait_s
    try:
        while True:
            try:
                return fcntl.flock(handle, kind | fcntl.LOCK_NB * (wait_s < math.inf))
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
    except BlockingIOError:
        raise OptionError(
            f"another run is writing to {path}; wait for it, or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        raise InputError(
            f"the file system of {path} has no locks ({error.strerror}), so nothing keeps two runs "
            "apart; choose another --out, on a file system with POSIX locks, such as NFS 4"
        ) from error
