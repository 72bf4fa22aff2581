"""The application, its exit codes, and the options that several commands take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import AutofuseError

if TYPE_CHECKING:
    from ..store.store import Store

NOTHING, BAD_INPUT, INTERRUPTED = 1, 2, 130


class _Group(TyperGroup):
    """Prints what autofuse raises on purpose as one line; anything else is a bug, and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AutofuseError as error:
            _fail(error)


def _fail(error: AutofuseError) -> NoReturn:
    typer.echo(f"autofuse: {error}", err=True)
    raise typer.Exit(BAD_INPUT)


app = typer.Typer(
    name="autofuse",
    help="Tunes fused kernels for PyTorch functions, and shows what was found.",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Result database: a file, sqlite:///FILE or postgresql://... "
                 "[default: AUTOFUSE_STORE, or a file in the user's data folder]"),
]  # fmt: skip
TARGET_HELP = "path.py:function or module:function"
Args = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=SPEC",
        help="An argument, once for each: x=rows,4096 (extents or axes), "
        "labels=rows:int64:0..32000 (dtype, range), scale=0.125, n=3:int (Python scalars).",
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Option("--axis", metavar="NAME=N,N,...", help="The extents of an axis that the arguments name."),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="DTYPE,...", help="Dtypes of the arguments that name none [default: float32]"),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda:N [default: the GPU if there is one]")]
Chains = Annotated[
    list[str] | None,
    typer.Option("--chain", metavar="N", help="Only this chain (name, id or the start of its key); may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


def _version(asked: bool) -> None:
    if asked:
        from ..version import __version__

        typer.echo(f"autofuse {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tunes fused kernels for PyTorch functions, and shows what was found."""


def reading(store: str | None) -> Store:
    from ..doctor import database_url
    from ..store.store import Store

    return Store.open(database_url(store), read_only=True)
