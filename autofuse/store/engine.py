"""Engines: how a connection to the database is opened and how its transactions begin.

SQLite needs care that PostgreSQL does not: see the comments. Both are reached by URL and share the models.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ..errors import StoreError
from .failures import explain
from .records import canonical_json
from .sqlite import connect_read_only, sqlite_path

BUSY_MS = 30_000
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.beegfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
        "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs3",
        "nfs4", "ocfs2", "pvfs2", "smb3", "smbfs",
    )
)  # fmt: skip
"""File systems where SQLite's WAL is unsafe: it shares memory between processes, which must be on one machine."""


def make_engine(url: str, read_only: bool = False) -> Engine:
    """An engine for a SQLite file or a PostgreSQL database. A folder that a SQLite file needs is made (not if
    read-only).

    Raises StoreError for a URL of another kind, and for a read-only SQLite file that is not there.
    """
    path = sqlite_path(url)
    if path is None:
        return _postgresql(url, read_only)
    path = path.absolute()
    options: dict[str, Any] = {"json_serializer": canonical_json}
    if read_only:
        if not path.is_file():
            raise StoreError(f"There is no database at {path}: run a tuning job first, or set AUTOFUSE_STORE.")
        # SQLAlchemy's pool calls this, so that the fall-back for read-only folders is the reader's own.
        options["creator"] = lambda: connect_read_only(path)[0]
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"The folder {path.parent} cannot be made ({error}): set AUTOFUSE_STORE.") from error
        options["connect_args"] = {"timeout": BUSY_MS / 1000}
    engine = create_engine(URL.create("sqlite", database=str(path)), **options)
    event.listen(engine, "connect", _prepare_read_only if read_only else _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    _dispose_after_fork(engine)
    return engine


def database_path(engine: Engine) -> Path | None:
    """The file of a SQLite engine, None for a server."""
    name = engine.url.database
    return Path(name) if engine.dialect.name == "sqlite" and name else None


def where(engine: Engine) -> str:
    """How messages name the database: its file, or its URL without the password."""
    return str(database_path(engine) or engine.url.render_as_string(hide_password=True))


def on_network(path: Path, mounts: str | None = None) -> str | None:
    """The name of the network file system that `path` lies on, or None. Asks /proc/mounts; elsewhere it cannot tell."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(errors="replace")
        except OSError:
            return None
    target = path.resolve()
    best, kind = -1, None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # ">=": of two mounts on one folder the later hides the earlier.
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def set_journal(raw: sqlite3.Connection, path: Path) -> None:
    """Set WAL, once, on a database that is being created. The mode is kept in the file."""
    if raw.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        return
    network = on_network(path)
    if network:
        warnings.warn(
            f"{path} lies on a network file system ({network}), where SQLite is slow and its locks may not hold: "
            "put it on a local disk, or use PostgreSQL, with AUTOFUSE_STORE.",
            stacklevel=2,
        )
        return
    raw.execute("PRAGMA journal_mode=WAL")


@contextmanager
def wrapped(engine: Engine) -> Iterator[None]:
    """Turn the errors of the database and its driver into StoreErrors."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise explain(getattr(error, "orig", None) or error, where(engine)) from error


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A short transaction that sees one state of the database."""
    with wrapped(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """The one way to write: a short transaction that holds the write lock from its start, commits, or rolls back."""
    with wrapped(engine), engine.connect().execution_options(autofuse_write=True) as connection, connection.begin():
        yield connection


def _prepare_sqlite(raw: sqlite3.Connection, _record: object) -> None:
    raw.isolation_level = None  # the driver begins no transactions by itself: _begin_sqlite does
    raw.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    raw.execute("PRAGMA synchronous=NORMAL")
    raw.execute("PRAGMA foreign_keys=ON")


def _prepare_read_only(raw: sqlite3.Connection, _record: object) -> None:
    raw.isolation_level = None
    raw.execute("PRAGMA query_only=ON")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred BEGIN that later wants to write fails at once when another writer was faster: no timeout helps.
    write = connection.get_execution_options().get("autofuse_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _postgresql(url: str, read_only: bool) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"{url!r} is no database URL: write sqlite:///FILE or postgresql://HOST/NAME") from error
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise StoreError(f"{parsed.get_backend_name()!r} databases are not supported: use sqlite:/// or postgresql://")
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        options = {"postgresql_readonly": True} if read_only else {}
        engine = create_engine(parsed, json_serializer=canonical_json, pool_pre_ping=True, execution_options=options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise StoreError(f"PostgreSQL needs a driver ({error}): pip install 'psycopg[binary]'") from error
    _dispose_after_fork(engine)
    return engine


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_abandoned: list[object] = []


def _dispose_after_fork(engine: Engine) -> None:
    _engines.add(engine)


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        # The parent's connections are neither used nor closed here: a close in the child would reach the server, or end
        # the parent's WAL. Keeping the pool keeps them from being collected.
        _abandoned.append(engine.pool)
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
