"""Bringing a database to the schema that this code speaks, when many processes may open it at once.

Never re-creates, renames or deletes a database: whatever cannot be used is an error that says what to do.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from ..errors import StoreError, StoreNewer
from .engine import BUSY_MS, database_path, reading, set_journal, where, wrapped
from .models import Base
from .revision import APPLICATION_ID, HEAD, SCHEMA, VERSION_TABLE, refuse_newer

if TYPE_CHECKING:
    from alembic.config import Config

ADVISORY_LOCK = 0x4175746F66757365  # "Autofuse": one upgrade at a time on a PostgreSQL server


def migrations_folder() -> Path:
    """Where the migrations lie: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"The migrations are missing beside {package}: install autofuse again.")


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, without an ini file. `connection`: run inside its transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def current_revision(connection: Connection) -> str | None:
    """The revision that the database is at, None if it has none of our tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def check(engine: Engine, *, write: bool = False) -> bool:
    """True if the database is at this code's schema, or at a newer one that allows this code; False if it is older or
    new.

    Two small look-ups, no Alembic. Raises StoreNewer, StoreCorrupt or StoreError.
    """
    with reading(engine) as connection:
        _refuse_foreign(connection)
        revision = current_revision(connection)
        if revision is None:
            return False
        meta = {row.key: row.value for row in connection.execute(text("SELECT key, value FROM meta"))}
    refuse_newer(meta, where(engine), write=write)
    return revision == HEAD or int(meta.get("schema", 0)) > SCHEMA


def require(engine: Engine) -> None:
    """For read-only use: raise a StoreError unless `check` is true."""
    if not check(engine):
        raise StoreError(
            f"{where(engine)} is empty or has an older schema: open it once for writing (any tuning job does, or "
            "`alembic upgrade head` in a checkout) to upgrade it."
        )


def upgrade(engine: Engine) -> None:
    """Create the tables, or upgrade them, if that is needed; safe when many processes do so at once.

    An older database that holds tables is first copied beside itself (`NAME.backup-REVISION-TIME`).
    """
    path = database_path(engine)
    if path is not None and path.exists() and not os.access(path, os.W_OK):
        raise StoreError(f"{path} is read-only: open it with read_only=True, make it writable, or set AUTOFUSE_STORE.")
    deadline = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            if check(engine, write=True):
                return
            with exclusive(engine) as connection:
                _upgrade_locked(engine, connection)
            return
        except StoreError as error:
            # While another process switches a new file to WAL, SQLite answers "locked" without its busy timeout.
            if "locked" not in str(error.__cause__) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def exclusive(engine: Engine) -> Iterator[Connection]:
    """A transaction that no other process can upgrade in, with SQLite's foreign keys off.

    With them on, a batch migration drops a table to copy it, and the drop deletes the rows that refer to it.
    """
    with wrapped(engine), engine.connect().execution_options(autofuse_write=True) as connection:
        path = database_path(engine)
        if path is None:
            with connection.begin():
                connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
                yield connection
            return
        # Both settings are silently ignored inside a transaction, so they go past SQLAlchemy, which would begin one.
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        if not raw.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            set_journal(raw, path)
        raw.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                yield connection
                found = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                broken = [row for row in found if row[0] in Base.metadata.tables]  # another program's are its own affair
                if broken:
                    raise StoreError(
                        f"The upgrade of {path} would break references ({broken[0]}); nothing was changed. "
                        "Report this with the file."
                    )
                owner = connection.exec_driver_sql("PRAGMA application_id").scalar()
                if owner == 0:
                    connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        finally:
            raw.execute("PRAGMA foreign_keys=ON")


def _upgrade_locked(engine: Engine, connection: Connection) -> None:
    revision = current_revision(connection)
    if revision == HEAD:
        return  # another process was faster
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise StoreNewer(
            f"{where(engine)} is at revision {revision}, which this autofuse does not know: "
            "upgrade with `pip install --upgrade autofuse`, or name another database in AUTOFUSE_STORE."
        )
    if revision is not None:
        _back_up(engine, revision)
    command.upgrade(config, "head")


def _back_up(engine: Engine, revision: str) -> Path | None:
    """Copy a SQLite database beside itself. A second connection: VACUUM cannot run in the transaction that holds the
    lock, and this one sees what was committed before it."""
    path = database_path(engine)
    if path is None:
        return None
    copy = path.with_name(f"{path.name}.backup-{revision}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    raw = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None)
    try:
        raw.execute("VACUUM INTO ?", (str(copy),))
    finally:
        raw.close()
    return copy


def _refuse_foreign(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    owner = connection.exec_driver_sql("PRAGMA application_id").scalar()
    if owner not in (0, APPLICATION_ID):
        name = connection.engine.url.database
        raise StoreError(f"{name} belongs to another program (application_id {owner:#x}): name another file.")
