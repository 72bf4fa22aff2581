"""A tuning job: which functions, at which arguments, with which budget. Read from a TOML file, checked by pydantic.

[defaults]                       # all optional; the command's options go before them
device = "cuda:0"
dtype = "bfloat16"               # or a list: of floating-point arguments that name none
trials = 60                      # of each workload
seconds = 30.0
math = "exact"                   # only kernels of this math mode; left out, the search chooses

[[tune]]
function = "catalogue.py:softmax"    # a path from this file's folder, or package.module:function
args = { x = "rows,cols" }           # as after --arg NAME=; a TOML number or true is a Python scalar
axes = { rows = [1, 16, 2048], cols = 4096 }
dtypes = ["bfloat16", "float16"]     # optional, as are trials, seconds, math and name
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from . import inputs
from .errors import InputError
from .inputs import ArgSpec

TRIALS = 60
SECONDS = 30.0
DTYPE = "float32"


@dataclass(frozen=True)
class Request:
    """One function to tune. `where` says where the user asked for it, for messages; `how` how arguments are given."""

    function: str
    folder: Path
    args: tuple[tuple[str, ArgSpec], ...]
    axes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[str, ...]
    trials: int = TRIALS
    seconds: float = SECONDS
    math: str | None = None
    name: str | None = None
    where: str = ""
    how: str = "--arg"


@dataclass(frozen=True)
class Job:
    """Everything that one command tunes."""

    requests: tuple[Request, ...]
    device: str | None = None


def _refuse(error: InputError) -> ValueError:
    return ValueError(str(error))


def _arg(value: Any) -> ArgSpec:
    if isinstance(value, bool | int | float):
        return inputs.ScalarSpec(value)
    if not isinstance(value, str):
        raise ValueError("write a string as after --arg NAME=, a number, true or false")
    try:
        return inputs.parse_arg(value)
    except InputError as error:
        raise _refuse(error) from None


def _sizes(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int) else value


def _dtypes(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError("write the name of a dtype, or a list of names")
    try:
        return tuple(dtype for name in names for dtype in inputs.parse_dtypes(name))
    except InputError as error:
        raise _refuse(error) from None


Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Sizes = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_sizes), Field(min_length=1)]
Dtypes = Annotated[tuple[str, ...], BeforeValidator(_dtypes)]
Trials = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MathMode = Literal["exact", "fast", "approx"]
Arg = Annotated[Any, BeforeValidator(_arg)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Defaults(_Table):
    """The table [defaults]: what holds for each function that does not say otherwise."""

    device: str | None = None
    dtype: Dtypes = (DTYPE,)
    trials: Trials = TRIALS
    seconds: Seconds = SECONDS
    math: MathMode | None = None


class Tune(_Table):
    """One table [[tune]]: a function and its workloads."""

    function: Annotated[str, Field(pattern=r"^.+:.+$")]
    args: dict[Name, Arg]
    axes: dict[Name, Sizes] = {}
    dtypes: Dtypes | None = None
    trials: Trials | None = None
    seconds: Seconds | None = None
    math: MathMode | None = None
    name: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _axes_agree(self) -> Tune:
        try:
            inputs.check_axes(self.args, self.axes)
        except InputError as error:
            raise _refuse(error) from None
        return self


class JobFile(_Table):
    """A whole job file."""

    defaults: Defaults = Defaults()
    tune: Annotated[list[Tune], Field(min_length=1)]


def load(path: Path) -> Job:
    """Read a job file. Raises InputError, which names the file, the line and the key."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"the job file {path} cannot be read: {reason}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no valid TOML: {error}") from error
    try:
        parsed = JobFile.model_validate(data)
    except ValidationError as error:
        raise InputError("\n".join(_explain(path, text, dict(e)) for e in error.errors())) from error
    base = parsed.defaults
    return Job(
        tuple(
            Request(
                function=t.function,
                folder=path.absolute().parent,
                args=tuple(t.args.items()),
                axes=tuple(t.axes.items()),
                dtypes=t.dtypes or base.dtype,
                trials=t.trials or base.trials,
                seconds=t.seconds or base.seconds,
                math=t.math or base.math,
                name=t.name,
                where=f"{path}{_line(text, ('tune', k))}: tune[{k}]: ",
                how="the key args:",
            )
            for k, t in enumerate(parsed.tune)
        ),
        base.device,
    )


MESSAGES = {
    "extra_forbidden": "there is no such key: it may be {known}",
    "missing": "the key is missing",
    "too_short": "give at least one",
    "string_pattern_mismatch": "{input!r} is not of the form that it needs: {form}",
    "tuple_type": "{input!r} is no list of whole numbers",
}
TABLES: dict[str, type[BaseModel]] = {"defaults": Defaults, "tune": Tune}
FORMS = {"function": "path.py:function or package.module:function"}


def _explain(path: Path, text: str, error: dict[str, Any]) -> str:
    loc: Sequence[str | int] = [part for part in error["loc"] if part != "[key]"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if error["type"] in ("missing", "too_short") and key == "tune":
        return f"{path} names nothing to tune: write a table [[tune]] with function and args for each function"
    table = TABLES.get(str(loc[0]) if len(loc) > 1 else "", JobFile)
    message = MESSAGES.get(error["type"], error["msg"].removeprefix("Value error, ")).format(
        input=error["input"], known=", ".join(table.model_fields), form=FORMS.get(str(loc[-1]), "a name")
    )
    return f"{path}{_line(text, loc)}: {key}: {message}"


def _line(text: str, loc: Sequence[str | int]) -> str:
    """Where a key is written, ":LINE", as well as a look at the text tells; tomllib does not keep it."""
    lines = text.splitlines()
    start, end = 0, len(lines)
    table = str(loc[0]) if loc else ""
    if len(loc) > 1 or table in JobFile.model_fields:
        form = r"\s*\[\[\s*tune\s*\]\]" if table == "tune" else rf"\s*\[\s*{re.escape(table)}\s*\]"
        heads = [n for n, line in enumerate(lines) if re.match(form, line)]
        which = loc[1] if len(loc) > 1 and isinstance(loc[1], int) else 0
        if not isinstance(which, int) or which >= len(heads):
            return ""
        start = heads[which]
        after = (n for n in range(start + 1, end) if re.match(r"\s*\[+\s*(tune|defaults)\s*\]", lines[n]))
        end = next(after, end)
    found = start
    for part in loc:
        if (isinstance(part, str) and part != table) or len(loc) == 1:
            form = rf"(^|[\s.{{,\[\"']){re.escape(str(part))}[\s\"']*([=.\]])"
            found = next((n for n in range(found, end) if re.search(form, lines[n])), found)
    return f":{found + 1}"
