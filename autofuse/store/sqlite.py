"""SQLite files by URL, and opening one so that nothing can write through it. The standard library only."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from ..errors import StoreError


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL, or None for another kind of database. Raises StoreError for one in memory."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] != "sqlite":
        return None
    name = rest.removeprefix("/").partition("?")[0]
    if not rest.startswith("/") or name in ("", ":memory:") or name.startswith("file:"):
        raise StoreError(f"{url!r} names no file that processes could share: write sqlite:///relative or sqlite:////absolute")
    return Path(name)


def connect_read_only(path: Path, timeout_s: float = 30.0) -> tuple[sqlite3.Connection, bool]:
    """Open an existing SQLite file so that nothing can write through it. Also says whether it is held as immutable.

    In a folder that cannot be written the file is read as immutable, without locks: right for databases that are shipped,
    and the only way to read one in WAL mode, whose -shm file cannot be made there. Not if a -wal file or a journal lies
    beside it: then the file alone is not the database.
    """
    immutable = not os.access(path.parent, os.W_OK) and not _has_log(path)
    uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if immutable else ''}"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection, immutable
    except sqlite3.Error:
        connection.close()
        raise


def _has_log(path: Path) -> bool:
    for end in ("-wal", "-journal"):
        try:
            if path.with_name(path.name + end).stat().st_size > 0:
                return True
        except OSError:
            continue
    return False
