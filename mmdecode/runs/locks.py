"""Locks of folders and files among processes; each ends with the process that has it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from mmdecode.errors import InputError, OptionError

LOCK = ".mmdecode-lock"
"""Name of the file that is locked for its folder: NFS does not carry locks of folders."""
PATIENCE_S = 600.0
"""Seconds that a process waits for another one of the same job."""


class Claim:
    """A lock on a folder, which ends with the process.

    Args:
        folder: The folder; it is made again if another process removes it as empty.

    Attributes:
        first: Whether no other process has the folder; always so for a claim that is not shared.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._handle, self.first = folder, -1, True
        self._only = False

    def take(self, wait_s: float = 0.0, share: bool = False) -> None:
        """Takes the lock in place of the one that it has; see `lock`."""
        self.close()
        path = self._folder / LOCK
        until = time.monotonic() + wait_s
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                make_folder(self._folder)
                continue
            try:
                lock(handle, self._folder, max(until - time.monotonic(), 0.0), share)
                if _is(handle, path):  # not one that another process has removed since
                    self._handle, handle, self._only = handle, -1, not share
                    return
            finally:
                if handle >= 0:
                    os.close(handle)

    def join(self) -> None:
        """Takes the lock alone, or shares it with the processes that have it.

        While one of them has it alone, to prepare or to merge the results, it is waited for.
        """
        until = time.monotonic() + PATIENCE_S
        while not self.alone():
            with contextlib.suppress(OptionError):
                self.take(share=True)
                self.first = False
                return
            if time.monotonic() > until:
                self.take()  # which says what is wrong
            time.sleep(0.1)

    def share(self) -> None:
        """Lets others join, after the first one has prepared the folder."""
        self.take(PATIENCE_S, share=True)

    @property
    def held(self) -> bool:
        """Whether this claim has the lock, alone or shared."""
        return self._handle >= 0

    def alone(self) -> bool:
        """Takes the lock alone, if no other process shares it, else gives it back.

        The last process of several takes it at its end; so one that has given it back may not call
        this again, which could take it from the last one for a moment.

        Returns:
            Whether this claim now has it alone.
        """
        if self.held and self._only:
            return True
        with contextlib.suppress(OptionError):
            self.take()
            return True
        return False

    def close(self) -> None:
        """Gives the lock back."""
        if self._handle >= 0:
            if self._only:
                with contextlib.suppress(PermissionError):  # of Windows, where it is open
                    (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._handle)
        self._handle = -1


def make_folder(folder: Path) -> None:
    """Creates a folder, also while other processes remove it and its parents as empty."""
    for _ in range(99):
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # it went in between
            return folder.mkdir(parents=True, exist_ok=True)
    return folder.mkdir(parents=True, exist_ok=True)


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
    claim = Claim(folder)
    try:
        if shared:
            claim.join()
        else:
            claim.take(math.inf if wait else 0.0)
        yield claim
    finally:
        claim.close()


def is_locked(folder: Path) -> bool:
    """Returns whether another process has a folder, as seen from this machine."""
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:
            return False
        stack.callback(os.close, handle)
        try:
            lock(handle, folder)
        except OptionError:
            return True
    return False


def lock(handle: int, path: Path, wait_s: float = 0.0, share: bool = False) -> None:
    """Locks an open file until it is closed.

    Args:
        handle: The file, open for writing, as NFS wants it.
        path: Path for the message.
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


def refuse_url(folder: Path) -> None:
    """Refuses an address of an object store or server as the folder of results.

    Raises:
        InputError: It is one.
    """
    if re.match("[a-z][a-z0-9+.-]+:/", str(folder)) and not folder.exists():
        raise InputError(
            f"{folder} is a URL; expected a folder on a file system with POSIX locks, which all "
            "processes share: copy the results to an object store afterwards"
        )


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
