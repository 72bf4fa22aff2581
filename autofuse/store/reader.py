"""The runtime's read-only look-ups: the standard library's sqlite3 and two statements, no SQLAlchemy (180 ms to import).

`BEST_SQL` and `ENTRIES_SQL` are what SQLAlchemy compiles from the models (`queries.best_statement`, `entries_statement`); a
test holds them equal.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import StoreError
from .failures import explain
from .records import BestRecord, EntryRecord, GraphRecord, entries, gather, graphs
from .revision import APPLICATION_ID, refuse_newer
from .sqlite import connect_read_only, sqlite_path

if TYPE_CHECKING:
    from .store import Store

Record = TypeVar("Record")

BUSY_S = 0.25
"""How long a look-up waits for a lock: a call of the user's model is waiting with it. In WAL mode readers never
wait."""

BEST_SQL = """\
SELECT best.id, workload.rows, config."plan", best.median_us, best.verified, best.protocol, config.uid, \
environment.driver, environment.cuda, environment.torch, environment.triton, environment.compiler, \
environment.python, environment.autofuse, environment.kernel_source_hash, chain.uid AS uid_1, schedule.kind, \
schedule.space_version, schedule.knobs, device.uid AS uid_2, device.name \
FROM best \
JOIN workload ON workload.id = best.workload_id \
JOIN device ON device.id = best.device_id \
JOIN environment ON environment.id = best.environment_id \
JOIN config ON config.id = best.config_id \
LEFT OUTER JOIN config_schedule ON config_schedule.config_id = config.id \
LEFT OUTER JOIN schedule ON schedule.id = config_schedule.schedule_id \
LEFT OUTER JOIN chain ON chain.id = schedule.chain_id \
WHERE workload.family = ? AND (device.uid = ? OR device.arch = ?) \
ORDER BY device.uid = ? DESC, workload.rows, best.verified DESC, best.median_us, best.id, config_schedule.position"""

ENTRIES_SQL = """\
SELECT chain.name, chain.uid, workload.dtypes, workload.layouts, workload.rows, workload.extents, device.uid AS uid_1, \
device.name AS name_1, device.arch, \
environment.driver, environment.cuda, environment.torch, environment.triton, environment.compiler, \
environment.python, environment.autofuse, environment.kernel_source_hash \
FROM best \
JOIN workload ON workload.id = best.workload_id \
JOIN chain ON chain.id = workload.chain_id \
JOIN device ON device.id = best.device_id \
JOIN environment ON environment.id = best.environment_id \
WHERE chain.uid = ? OR chain.name = ? \
ORDER BY workload.family = ? DESC, chain.uid = ? DESC, device.arch = ? DESC, best.id DESC \
LIMIT 200 OFFSET 0"""

GRAPHS_SQL = """\
SELECT chain.graph, workload.extents, workload.dtypes \
FROM workload JOIN chain ON chain.id = workload.chain_id \
WHERE workload.id IN (\
SELECT min(workload.id) AS min_1 \
FROM best JOIN workload ON workload.id = best.workload_id JOIN chain ON chain.id = workload.chain_id \
WHERE chain.name = ? GROUP BY workload.family) \
ORDER BY workload.id DESC"""


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

    A missing or still empty file is no error: nothing is found in it, until it is there, and `absent` says so. Raises StoreCorrupt,
    StoreNewer or StoreError for a database that cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.absent = ""
        self._path = sqlite_path(url)
        self._local = threading.local()
        self._server: Store | None = None
        self._server_lock = threading.Lock()

    def best(self, family_uid: str, device_uid: str, arch: str | None = None) -> list[BestRecord]:
        """What is tuned for a workload family on a device, and on all of its `arch`: every row count, environment and
        protocol.

        The device's own first, then ordered by rows, then verified ones first, then by time.
        """
        if self._path is None:
            return self._open_server().best_records(family_uid, device_uid, arch)
        return self._read(gather, BEST_SQL, (family_uid, device_uid, arch, device_uid))

    def entries(self, chain_key: str, name: str, family_uid: str, arch: str) -> list[EntryRecord]:
        """What is tuned of a chain, or of chains of this name, on any device: for a miss to be explained."""
        if self._path is None:
            return self._open_server().entry_records(chain_key, name, family_uid, arch)
        return self._read(entries, ENTRIES_SQL, (chain_key, name, family_uid, chain_key, arch))

    def graphs(self, name: str) -> list[GraphRecord]:
        """The tuned chains of this name, the newest first."""
        if self._path is None:
            return self._open_server().graph_records(name)
        return self._read(graphs, GRAPHS_SQL, (name,))

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

    def _read(self, made: Callable[[Iterable[Sequence[Any]]], list[Record]], sql: str, values: Sequence[Any]) -> list[Record]:
        assert self._path is not None
        try:
            handle = self._open(self._path)
            return [] if handle is None else made(handle.connection.execute(sql, values))
        except (sqlite3.Error, ValueError) as error:
            self.close()
            raise explain(error, str(self._path)) from error

    def _open(self, path: Path) -> _Handle | None:
        self.absent = ""
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.close()
            self.absent = f"there is no database at {path}"
            return None
        except OSError as error:
            raise explain(error, str(path)) from error
        if not S_ISREG(stat.st_mode):
            raise StoreError(f"{path} is no file: name one in AUTOFUSE_STORE.")
        if stat.st_size == 0:
            self.absent = f"{path} is empty"
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
                self.absent = f"{path} is empty"
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

    def _open_server(self) -> Store:
        with self._server_lock:
            if self._server is None:
                from .store import Store

                self._server = Store.open(self.url, read_only=True)
            return self._server
