"""Job files: what they mean, and for each way to write one wrong a message with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofuse import functions, inputs, job
from autofuse.errors import InputError
from autofuse.inputs import ScalarSpec, TensorSpec

GOOD = """\
[defaults]
device = "cpu"
dtype = "bfloat16"
trials = 10

[[tune]]
function = "a.py:f"
args = { x = "rows,4096", s = 0.5, n = 3, flag = true }
axes = { rows = [1, 16] }

[[tune]]
function = "pkg.mod:g"
name = "second"
dtypes = ["fp16", "float32"]
seconds = 5
trials = 7
[tune.args]
x = "rows,cols"
[tune.axes]
rows = 4
cols = [2]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def test_a_job(file: Path) -> None:
    file.write_text(GOOD)
    first, second = job.load(file).requests
    assert job.load(file).device == "cpu"
    assert (first.function, first.folder, first.name) == ("a.py:f", file.parent, None)
    assert first.args == (
        ("x", TensorSpec(("rows", 4096))), ("s", ScalarSpec(0.5)), ("n", ScalarSpec(3)), ("flag", ScalarSpec(True)),
    )  # fmt: skip
    assert first.axes == (("rows", (1, 16)),)
    assert (first.dtypes, first.trials, first.seconds) == (("bfloat16",), 10, 30.0)
    assert first.where == f"{file}:6: tune[0]: "
    assert second.axes == (("rows", (4,)), ("cols", (2,)))
    assert (second.name, second.dtypes, second.trials, second.seconds) == ("second", ("float16", "float32"), 7, 5.0)
    assert second.where == f"{file}:11: tune[1]: "


def test_the_defaults_have_defaults(file: Path) -> None:
    file.write_text('[[tune]]\nfunction = "a.py:f"\nargs = { x = "4" }\n')
    (only,) = job.load(file).requests
    assert (only.dtypes, only.trials, only.seconds, only.axes) == (("float32",), 60, 30.0, ())
    assert job.load(file).device is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device =", "devce =", ":2: defaults.devce: there is no such key: it may be device, dtype, trials, seconds"),
        ("seconds = 5", "secs = 5", ":15: tune[1].secs: there is no such key: it may be function, args, axes, dtypes"),
        ("[defaults]", "[default]", ":1: default: there is no such key: it may be defaults, tune"),
        ('"rows,4096"', '"rows,40a6"', ":8: tune[0].args.x: '40a6' in 'rows,40a6' is no extent"),
        ("s = 0.5", "s = []", ":8: tune[0].args.s: write a string as after --arg NAME=, a number, true or false"),
        ("[1, 16]", '[1, "16"]', ":9: tune[0].axes.rows[1]: Input should be a valid integer"),
        ("[1, 16]", "[]", ":9: tune[0].axes.rows: give at least one"),
        ("[1, 16]", "[-1]", ":9: tune[0].axes.rows[0]: Input should be greater than or equal to 0"),
        ("[1, 16]", "[1], z = 3", ":6: tune[0]: no argument names the axis 'z': they name rows"),
        ("rows = 4\n", "", ":11: tune[1]: the axis 'rows' of argument 'x' has no values"),
        ("trials = 10", "trials = 0", ":4: defaults.trials: Input should be greater than or equal to 1"),
        ("trials = 10", "trials = 1.5", ":4: defaults.trials: Input should be a valid integer"),
        ("trials = 7", 'trials = "7"', ":16: tune[1].trials: Input should be a valid integer"),
        ("seconds = 5", "seconds = inf", ":15: tune[1].seconds: Input should be a finite number"),
        ('"fp16"', '"int8"', ":14: tune[1].dtypes: int8 is no floating-point dtype"),
        ('"bfloat16"', '"bf17"', ":3: defaults.dtype: 'bf17' is no dtype"),
        ('["fp16", "float32"]', "[]", ":14: tune[1].dtypes: write the name of a dtype, or a list of names"),
        ('"pkg.mod:g"', '"pkg.mod"', ":12: tune[1].function: 'pkg.mod' is not of the form that it needs: path.py:func"),
        ('function = "pkg.mod:g"\n', "", ":11: tune[1].function: the key is missing"),
        ('"second"', '""', ":13: tune[1].name: String should have at least 1 character"),
        ('x = "rows,cols"', '"x-y" = "rows,cols"', ":18: tune[1].args.x-y: 'x-y' is not of the form"),
        (GOOD, "", " names nothing to tune: write a table [[tune]] with function and args for each function"),
        (GOOD, "tune = []", " names nothing to tune: write a table [[tune]]"),
        (GOOD, "tune = 3", "tune: Input should be a valid list"),
        (
            "[defaults]",
            "[defaults",
            " is no valid TOML: Expected ']' at the end of a table declaration (at line 1, col",
        ),
    ],
)
def test_bad_jobs(file: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        job.load(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text(GOOD.replace("device =", "devce =").replace("rows,4096", "rows,40a6"))
    with pytest.raises(InputError) as caught:
        job.load(file)
    first, second = str(caught.value).splitlines()
    assert "defaults.devce" in first and "tune[0].args.x" in second


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read: No such file"):
        job.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        job.load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is no text"):
        job.load(tmp_path / "bytes.toml")


def test_the_llama_example() -> None:
    """Each of its functions takes the arguments that it gives, at all of its shapes."""
    path = Path(__file__).parents[1] / "examples" / "llama.toml"
    counts = {}
    for request in job.load(path).requests:
        fn = functions.load_function(request.function, request.folder)
        specs = inputs.case_specs(functions.bind(fn, dict(request.args)), dict(request.axes), request.dtypes)
        assert specs
        smallest = specs[0].make("cpu", 0)
        assert dict(specs[0].sizes)["rows"] == 1
        fn(*smallest)
        counts[request.name or request.function] = len(specs)
    assert counts == {
        "catalogue.py:add_rmsnorm": 6, "catalogue.py:swiglu": 6, "rope_query_key": 12,
        "catalogue.py:rmsnorm_fp8_token": 6, "catalogue.py:softmax": 4,
    }  # fmt: skip
