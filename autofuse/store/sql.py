"""A user's own SQL, held to reading by the database itself and not by looking at the text alone."""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine

from ..errors import InputError
from .engine import database_path, where, wrapped
from .failures import explain
from .sqlite import connect_read_only

READ_PRAGMAS = frozenset(
    (
        "table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list",
        "foreign_key_check", "integrity_check", "quick_check",
    )
)  # fmt: skip
READ_WORDS = frozenset(["select", "with", "values", "table", "explain", "show"])
ALLOWED_ACTIONS = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE))
ONLY_READS = "A query may only read: write one SELECT (or WITH ... SELECT) statement."

Result = tuple[list[str], list[tuple[Any, ...]]]


def run_query(engine: Engine, sql: str) -> Result:
    """Column names and rows of one reading statement. Raises InputError for SQL that is wrong, writes, or is several.

    Values are the driver's own: SQLite gives times and JSON as text and booleans as 0 and 1; PostgreSQL gives objects.
    """
    if "\0" in sql:
        raise InputError(f"The query holds a NUL character. {ONLY_READS}")
    bare = re.sub(r"(?s)--[^\n]*|/\*.*?\*/", " ", sql).strip()
    if not bare.strip("; \n\t"):
        raise InputError(f"The query is empty. {ONLY_READS}")
    if database_path(engine) is not None:
        return _sqlite(engine, sql)
    return _postgresql(engine, sql, bare)


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _view: str | None) -> int:
    if action in ALLOWED_ACTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() != "load_extension":
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in READ_PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _sqlite(engine: Engine, sql: str) -> Result:
    path = database_path(engine)
    assert path is not None
    try:
        connection, _ = connect_read_only(path)
    except sqlite3.Error as error:
        raise explain(error, where(engine)) from error
    try:
        # The first use of a table-valued function declares it, which the authorizer would take for a write.
        with suppress(sqlite3.OperationalError):  # a SQLite that was built without one of them
            connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]'), pragma_table_info('')")
        connection.set_authorizer(_authorize)
        cursor = connection.execute(sql)
        return [column[0] for column in cursor.description or ()], cursor.fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        low = str(error).lower()
        if "one statement at a time" in low:
            raise InputError(f"The query holds several statements. {ONLY_READS}") from error
        if "not authorized" in low or "prohibited" in low or "readonly" in low or "read-only" in low:
            raise InputError(f"The query would do more than read ({error}). {ONLY_READS}") from error
        if any(sign in low for sign in ("disk image", "not a database", "is locked", "disk i/o")):
            raise explain(error, where(engine)) from error
        raise InputError(f"The database refused the query: {error}.") from error
    finally:
        connection.close()


def _postgresql(engine: Engine, sql: str, bare: str) -> Result:
    import psycopg

    # A read-only transaction stops writes to tables, but not COPY ... TO PROGRAM or CALL.
    word = re.match(r"[\s(]*(\w*)", bare)
    if word is None or word.group(1).lower() not in READ_WORDS:
        raise InputError(f"The query would do more than read. {ONLY_READS}")
    with wrapped(engine), engine.connect() as connection, connection.begin() as transaction:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        raw = connection.connection.driver_connection
        assert isinstance(raw, psycopg.Connection)
        try:
            # prepare=True: only the simple protocol takes several statements, so a COMMIT cannot slip in before a
            # write.
            with raw.cursor() as cursor:
                cursor.execute(sql.encode(), prepare=True)
                names = [column.name for column in cursor.description or ()]
                return names, cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            raise explain(error, where(engine)) from error
        except psycopg.Error as error:
            message = " ".join(str(error).split())
            if "multiple commands" in message:
                raise InputError(f"The query holds several statements. {ONLY_READS}") from error
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                raise InputError(f"The query would do more than read ({message}). {ONLY_READS}") from error
            raise InputError(f"The database refused the query: {message}.") from error
        finally:
            transaction.rollback()
