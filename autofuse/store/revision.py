"""Which schema this code speaks, and whether it may touch a database that speaks another one. The standard library
only: the runtime's reader asks the same question as the writers do."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import StoreError, StoreNewer

HEAD = "0002"
"""The newest Alembic revision in `migrations/versions`. Held here so that opening a current database needs no
Alembic."""

SCHEMA = 2
"""The number of that revision. `meta` holds it as `schema`, with the oldest numbers that may still read and write
it."""

VERSION_TABLE = "autofuse_alembic_version"
"""Not Alembic's default name: another tool with migrations in the same database would collide with it."""

APPLICATION_ID = 0x41664675
"""'AfFu' in the header of a SQLite file."""


def refuse_newer(meta: Mapping[str, str], where: str, *, write: bool) -> None:
    """Raise StoreNewer when `meta` says that code of schema `SCHEMA` may not read (or write) the database."""
    try:
        schema = int(meta.get("schema", SCHEMA))
        reader = int(meta.get("oldest_reader", schema))
        writer = int(meta.get("oldest_writer", schema))
    except ValueError as error:
        raise StoreError(f"The table `meta` of {where} holds no schema numbers ({error}): restore a backup.") from error
    if schema <= SCHEMA or (writer if write else reader) <= SCHEMA:
        return
    verb = "write" if write else "read"
    hint = " It may still be opened read-only." if write and reader <= SCHEMA else ""
    raise StoreNewer(
        f"{where} has schema {schema} and this autofuse can {verb} up to {SCHEMA}: "
        f"upgrade with `pip install --upgrade autofuse`, or name another database in AUTOFUSE_STORE.{hint}"
    )
