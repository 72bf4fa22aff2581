"""Commands that look at a function: tune it, say what its calls run, build its winners."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import tables
from ..errors import InputError
from .base import BAD_INPUT, INTERRUPTED, NOTHING, TARGET_HELP, Args, Axes, Chains, Device, Dtypes, Json, StoreUrl, app, reading

if TYPE_CHECKING:
    from ..job import Job, Request
    from ..result import Tuned


@app.command()
def tune(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=TARGET_HELP)] = None,
    arg: Args = None,
    axis: Axes = None,
    dtype: Dtypes = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="FILE", help="A job file (TOML) with many.")] = None,
    from_demand: Annotated[bool, typer.Option("--from-demand", help="What `autofuse demand` lists for the device.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="How many, with --from-demand [default: 10]")] = None,
    store: StoreUrl = None,
    device: Device = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Most trials of a workload [default: 60]")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="Most seconds of a workload [default: 30]")] = None,
    math: Annotated[
        str | None,
        typer.Option(
            "--math", metavar="MODE", help="Only kernels of this math mode: exact, fast, approx [default: any that is right]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search and of the arguments' values.")] = 0,
    as_json: Json = False,
) -> None:
    """Tune a function, or a job file of many, and print what was found."""
    from ..doctor import database_url

    url = database_url(store)
    if from_demand:
        for option, given in (("TARGET", target), ("--job", job), ("--arg", arg), ("--axis", axis), ("--dtype", dtype)):
            if given:
                raise InputError(f"{option} does not go with --from-demand: the store says what is tuned")
        rows, failed = _run_demand(url, device, limit or 10, trials, seconds, seed, math)
    elif limit is not None:
        raise InputError("--limit goes with --from-demand")
    else:
        rows, failed = _run(_job(target, arg or [], axis or [], dtype or [], job), url, device, trials, seconds, seed, math)
    if rows or not failed:
        tables.show_tuned(rows, as_json)
    if any(row.state == "interrupted" for row in rows):
        typer.echo("autofuse: interrupted; what was found is in the store, and the same command goes on from it", err=True)
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(BAD_INPUT)
    if not rows and from_demand:
        typer.echo("autofuse: nothing was missed on this device (AUTOFUSE_DEMAND=1 counts what is)", err=True)
        return
    if not rows or any(row.best_us is None for row in rows):
        raise typer.Exit(NOTHING)


def _job(target: str | None, args: list[str], axes: list[str], dtypes: list[str], file: Path | None) -> Job:
    """What the options ask for. Raises InputError, which names the option."""
    from .. import inputs
    from ..job import DTYPE, Job, Request, load

    if target is not None and file is not None:
        raise InputError("name a function or a job file with --job, not both")
    if target is None and file is None:
        raise InputError("name a function (path.py:function or module:function), or a job file with --job FILE")
    if file is not None:
        for option, given in (("--arg", args), ("--axis", axes), ("--dtype", dtypes)):
            if given:
                raise InputError(f"{option} does not go with --job: write it into {file}")
        return load(file)
    assert target is not None
    specs: dict[str, inputs.ArgSpec] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, None] = {}
    option = ""
    try:
        for text in args:
            option = f"--arg {text}"
            name, rest = inputs.parse_name(text, "x=rows,4096")
            if name in specs:
                raise InputError(f"{name!r} is given twice")
            specs[name] = inputs.parse_arg(rest)
        for text in axes:
            option = f"--axis {text}"
            name, rest = inputs.parse_name(text, "rows=16,2048")
            if name in sizes:
                raise InputError(f"{name!r} is given twice: write all its values into one")
            sizes[name] = inputs.parse_sizes(rest)
        for text in dtypes:
            option = f"--dtype {text}"
            kinds |= dict.fromkeys(inputs.parse_dtypes(text))
        option = "--axis"
        inputs.check_axes(specs, sizes)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    return Job((Request(target, Path(), tuple(specs.items()), tuple(sizes.items()), tuple(kinds) or (DTYPE,)),))


def _place(device: str | None) -> str:
    """The device that is tuned for."""
    from ..device import parse_device

    place = str(parse_device(device))
    if place == "cpu":
        from ..kernels import build

        build.compiler()  # without one nothing could be built: a BuildError says what to do
    return place


def _run(
    job: Job, url: str, device: str | None, trials: int | None, seconds: float | None, seed: int, math: str | None
) -> tuple[list[Tuned], bool]:
    """Tune everything. Also says whether a function of several could not be tuned for a reason that was printed."""
    place = _place(device or job.device)
    prepared = [(request, *_prepare(request, place, seed)) for request in job.requests]  # bad input is told at once
    from ..errors import TraceError
    from ..progress import Reporter
    from ..search.tuner import Tuner

    rows: list[Tuned] = []
    failed = False
    with Reporter() as report, Tuner(url) as tuner:
        for request, fn, cases in prepared:
            try:
                result = tuner.tune(
                    fn, cases, device=place, trials=trials or request.trials,
                    seconds=seconds or request.seconds, seed=seed, progress=report, name=request.name,
                    math=math or request.math,
                )  # fmt: skip
            except (TraceError, InputError) as error:
                told = f"{request.where}{error}{_hint(request) if isinstance(error, TraceError) and 'size' in str(error) else ''}"
                if len(prepared) == 1:
                    raise type(error)(told) from error
                report.note(f"autofuse: {told}")
                failed = True
                continue
            rows += result.rows
            if any(row.state == "interrupted" for row in result.rows):
                break
    return rows, failed


def _run_demand(
    url: str, device: str | None, limit: int, trials: int | None, seconds: float | None, seed: int, math: str | None
) -> tuple[list[Tuned], bool]:
    """Tune what calls have missed. Also says whether some of it could not be, for a reason that was printed."""
    from ..job import SECONDS, TRIALS
    from ..progress import Reporter
    from ..search.demanded import tune_demand
    from ..search.tuner import Tuner

    place = _place(device)
    with Reporter() as report, Tuner(url) as tuner:
        return tune_demand(
            tuner, place, limit, report.note, report, trials=trials or TRIALS, seconds=seconds or SECONDS, seed=seed, math=math
        )


def _hint(request: Request) -> str:
    """Beside an error of the trace: arguments of an extent that no other has may have been meant as Python numbers."""
    from .. import functions
    from ..inputs import TensorSpec

    tensors = {key: spec for key, spec in request.args if isinstance(spec, TensorSpec)}
    known = {n for _, values in request.axes for n in values}
    hints = []
    for key, spec in tensors.items():
        others = known.union(*(other.dims for name, other in tensors.items() if name != key))
        if functions.whole_number(spec) and spec.dims[0] not in others and spec.dims[0] != 1:
            hints.append(f" (if {key} is a number: {functions.number_hint(key, spec)})")
    return "".join(hints)


def _prepare(request: Request, device: str, seed: int) -> tuple[Any, Any]:
    """The function and its cases. Raises InputError."""
    from .. import functions, inputs

    try:
        fn = functions.load_function(request.function, request.folder)
        bound = functions.bind(fn, dict(request.args), request.how)
        specs = inputs.case_specs(bound, dict(request.axes), request.dtypes)
        for spec in specs:
            spec.check()
    except InputError as error:
        raise InputError(f"{request.where}{error}") from error
    return fn, inputs.Cases(specs, device, seed)


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    arg: Args = None,
    axis: Axes = None,
    dtype: Dtypes = None,
    store: StoreUrl = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What calls of a function would run, and why; runs nothing."""
    from ..device import parse_device
    from ..dispatch import Fused
    from ..doctor import database_url

    wanted = _job(target, arg or [], axis or [], dtype or [], None)
    place = str(parse_device(device))
    fn, cases = _prepare(wanted.requests[0], place, 0)
    own = fn if isinstance(fn, Fused) else Fused(fn)
    fused = Fused(own.fn, database_url(store), own.name)
    tables.show_explained([fused.explain(*case) for case in cases], as_json)


@app.command()
def build(
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="sm_NN", help="For GPUs of this architecture, one that is not here too.")
    ] = None,
    chain: Chains = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where to [default: the kernel cache]")] = None,
    store: StoreUrl = None,
    device: Device = None,
) -> None:
    """Build the winners' kernels ahead, so that no call waits."""
    from .. import settings
    from ..ahead import build_winners
    from ..device import default_device, describe, parse_device

    if arch is not None and device is not None:
        raise InputError("--arch does not go with --device: give one")
    if arch is not None and not re.fullmatch(r"sm_\d+", arch):
        raise InputError(f"{arch!r} is no architecture: write it as sm_90")
    here = None if arch is not None else describe(str(parse_device(device or default_device())))
    folder = (out or settings.read().cache).expanduser().absolute()
    with reading(store) as opened:
        built, failed = build_winners(
            opened, folder, arch or (here.arch if here else ""), here.uid if here else None, chain or (),
            lambda text: typer.echo(text, err=True),
        )  # fmt: skip
    typer.echo(f"winners built into {folder}: {built}", err=True)
    if failed:
        raise typer.Exit(NOTHING)
