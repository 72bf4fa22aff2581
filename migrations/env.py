"""How Alembic runs the migrations: in one transaction that no other process can upgrade in, with the views taken away
before and made again after. `autofuse.store.schema` calls it with its own connection; the `alembic` command comes with
none."""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy import Connection

from autofuse import settings
from autofuse.store import views
from autofuse.store.engine import make_engine
from autofuse.store.models import Base
from autofuse.store.revision import HEAD, VERSION_TABLE
from autofuse.store.schema import exclusive


def include_name(name: str | None, kind: str, _parents: Any) -> bool:
    """Only our tables: without this, autogenerate would drop those of others in the same database."""
    return kind != "table" or name in Base.metadata.tables


def run(connection: Connection) -> None:
    """Run what the command asks for on `connection`, inside its transaction."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        include_name=include_name,
        compare_type=True,
        render_as_batch=True,
    )
    views.drop(connection)
    with context.begin_transaction():
        context.run_migrations()
    if context.get_context().get_current_revision() == HEAD:
        views.create(connection)


if context.is_offline_mode():
    raise SystemExit("autofuse's migrations need a database to run on; `--sql` is not supported")
given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    url = context.get_x_argument(as_dictionary=True).get("url")
    engine = make_engine(settings.store_url(url) if url else settings.read().store)
    try:
        with exclusive(engine) as own:
            run(own)
    finally:
        engine.dispose()
