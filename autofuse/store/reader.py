"""The runtime's read-only look-ups: the standard library's sqlite3 and one statement, no SQLAlchemy (180 ms to import).

`BEST_SQL` is what SQLAlchemy compiles from the models (`queries.best_statement`); a test holds the two equal.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .failures import explain
from .records import BestRecord, gather
from .revision import APPLICATION_ID, refuse_newer
from .sqlite import connect_read_only, sqlite_path

BUSY_S = 0.25
"""How long a look-up waits for a lock: a call of the user's model is waiting with it. In WAL mode readers never
wait."""

BEST_SQL = """\
SELECT best.id, workload.rows, config."plan", best.median_us, best.verified, best.protocol, config.uid, \
environment.driver, environment.cuda, environment.torch, environment.triton, environment.compiler, \
environment.python, environment.autofuse, environment.kernel_source_hash, chain.uid AS uid_1, schedule.kind, \
schedule.space_version, schedule.knobs \
FROM best \
JOIN workload ON workload.id = best.workload_id \
JOIN device ON device.id = best.device_id \
JOIN environment ON environment.id = best.environment_id \
JOIN config ON config.id = best.config_id \
LEFT OUTER JOIN config_schedule ON config_schedule.config_id = config.id \
LEFT OUTER JOIN schedule ON schedule.id = config_schedule.schedule_id \
LEFT OUTER JOIN chain ON chain.id = schedule.chain_id \
WHERE workload.family = ? AND device.uid = ? \
ORDER BY workload.rows, best.verified DESC, best.median_us, best.id, config_schedule.position"""


class _Handle:
    """An open connection and what it was opened on."""

    def __init__(self, path: Path, identity: tuple[int, ...]) -> None:
        self.connection, self.immutable = connect_read_only(path, BUSY_S)
        self.pid = os.getpid()
        self.identity = identity


_abandoned: list[_Handle] = []
"""Connections inherited through a fork. Closing one could end the parent's WAL, so they are kept and never touched."""


class Reader:
    """Look-ups in the database at `url`. One connection a thread, opened at the first look-up and again after a fork.

    A missing or still empty file is no error: nothing is found in it, until it is there. Raises StoreCorrupt,
    StoreNewer or StoreError for a database that cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = sqlite_path(url)
        self._local = threading.local()
        self._server: Any = None
        self._server_lock = threading.Lock()

    def best(self, family_uid: str, device_uid: str) -> list[BestRecord]:
        """What is tuned for a workload family on a device: every row count, environment and protocol.

        Ordered by rows, then verified ones first, then by time.
        """
        if self._path is None:
            return self._best_of_server(family_uid, device_uid)
        try:
            handle = self._open(self._path)
            return [] if handle is None else gather(handle.connection.execute(BEST_SQL, (family_uid, device_uid)))
        except (sqlite3.Error, ValueError) as error:
            self.close()
            raise explain(error, str(self._path)) from error

    def close(self) -> None:
        """Close this thread's connection. The next look-up opens it again."""
        handle: _Handle | None = getattr(self._local, "handle", None)
        self._local.handle = None
        if handle is not None:
            if handle.pid == os.getpid():
                handle.connection.close()
            else:
                _abandoned.append(handle)
        if self._server is not None:
            self._server.close()
            self._server = None

    def _open(self, path: Path) -> _Handle | None:
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.close()
            return None
        except OSError as error:
            raise explain(error, str(path)) from error
        if stat.st_size == 0:
            return None
        handle: _Handle | None = getattr(self._local, "handle", None)
        if handle is not None:
            # A file put in the place of another has a new inode; an immutable one is only re-read if it is opened
            # again.
            seen = (stat.st_dev, stat.st_ino) + ((stat.st_mtime_ns, stat.st_size) if handle.immutable else ())
            if handle.pid == os.getpid() and seen == handle.identity:
                return handle
            self.close()
        handle = _Handle(path, (stat.st_dev, stat.st_ino))
        if handle.immutable:
            handle.identity += (stat.st_mtime_ns, stat.st_size)
        try:
            if not self._is_ready(handle.connection, path):
                handle.connection.close()
                return None
        except BaseException:
            handle.connection.close()
            raise
        self._local.handle = handle
        return handle

    @staticmethod
    def _is_ready(connection: sqlite3.Connection, path: Path) -> bool:
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            return False  # another process is about to make the tables
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        if owner not in (0, APPLICATION_ID):
            raise StoreError(f"{path} belongs to another program (application_id {owner:#x}): name another file.")
        refuse_newer(dict(connection.execute("SELECT key, value FROM meta")), str(path), write=False)
        return True

    def _best_of_server(self, family_uid: str, device_uid: str) -> list[BestRecord]:
        with self._server_lock:
            if self._server is None:
                from .store import Store

                self._server = Store.open(self.url, read_only=True)
            store = self._server
        found: list[BestRecord] = store.best_records(family_uid, device_uid)
        return found
