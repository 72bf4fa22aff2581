"""Commands about databases as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import tables
from .base import NOTHING, Chains, Json, StoreUrl, app, reading


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The database to make.")],
    chain: Chains = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    store: StoreUrl = None,
) -> None:
    """Write the winners into a single file, to be shipped."""
    from ..store.export import export as write

    with reading(store) as opened:
        count = write(opened, file, chain or (), force=force)
    typer.echo(f"winners written to {file}: {count}", err=True)


@app.command()
def doctor(store: StoreUrl = None, as_json: Json = False) -> None:
    """What this machine can do, and what to do about what it lacks."""
    from ..doctor import examine, usable

    checks = examine(store)
    tables.show_checks(checks, as_json)
    if not usable(checks):
        raise typer.Exit(NOTHING)
