"""Commands that read what was found."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import tables
from .base import Json, StoreUrl, app, reading


@app.command()
def best(store: StoreUrl = None, as_json: Json = False) -> None:
    """The winners: one line for each workload, device and environment."""
    with reading(store) as opened:
        tables.show_rows(opened.best(), tables.BEST, as_json)


@app.command()
def history(
    chain: Annotated[
        str | None,
        typer.Option("--chain", metavar="N", help="Only of this chain: its name, id or the start of its key"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many.")] = 100,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """The newest trials, failed ones with their reason, newest first."""
    with reading(store) as opened:
        tables.show_rows(opened.history(chain, limit), tables.HISTORY, as_json)


@app.command()
def demand(
    device: Annotated[str | None, typer.Option("--device", help="Only of cpu or cuda:N [default: any]")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many.")] = 100,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """What was called without being tuned, by the time lost.

    Programs that run with AUTOFUSE_DEMAND=1 write it.
    """
    uid = None
    if device is not None:
        from ..device import describe, parse_device

        uid = describe(str(parse_device(device))).uid
    with reading(store) as opened:
        rows = [{k: v for k, v in row.items() if k != "graph"} for row in opened.demand(uid, limit)]
    tables.show_rows(rows, tables.DEMAND, as_json)


@app.command()
def show(
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="A number that `autofuse history` prints.")],
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """All about one trial: times, errors, knobs, its run."""
    with reading(store) as opened:
        tables.show_record(opened.show_trial(trial), as_json)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(metavar="SELECT", help="One reading statement, over the tables and v_ views.")],
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Run a query of your own. The database itself refuses to write."""
    with reading(store) as opened:
        tables.show_result(*opened.query(query), as_json)
