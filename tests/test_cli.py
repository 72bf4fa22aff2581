"""The command: what it prints, its exit codes, and each kind of bad input. The search itself is a stand-in here."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from store_samples import fill
from typer.testing import CliRunner, Result

from autofuse import cli, doctor, tables
from autofuse.errors import TraceError, WorkerError
from autofuse.result import Progress, Tuned, TuneResult
from autofuse.search.tuner import Tuner
from autofuse.store.store import Store

Run = Callable[..., Result]
FUNCTIONS = """\
import torch
def add(x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x + y * scale
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of functions, which is also where the command runs and keeps its things."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "results.db"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def run() -> Run:
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(cli.app, words, prog_name="autofuse")

    return invoke


ROOT = str(Path(__file__).parents[1])


@pytest.fixture
def filled(home: Path) -> Path:
    with Store.open(f"sqlite:///{home / 'results.db'}") as store:
        fill(store)
    return home / "results.db"


def subprocess_run(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "autofuse.cli", *words]
    env = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


class Search:
    """Stands in for Tuner.tune: notes its arguments, reports progress, and gives what the test wants."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.states: Iterator[str] = iter(())
        self.raises: dict[str, Exception] = {}

    def __call__(self, fn: Any, cases: Sequence[Any], *, progress: Any, name: str | None, **rest: Any) -> TuneResult:
        args = list(cases)
        told = name or fn.__name__
        self.calls.append({"fn": fn.__name__, "cases": args, "name": name, **rest})
        if told in self.raises:
            raise self.raises[told]
        rows = []
        for case in args:
            state = next(self.states, "done")
            best = 10.0 if state != "failed" else None
            work = "x".join(str(n) for n in case[0].shape)
            progress(Progress(work, 1, 2, None, 30.0, 5.0, 9.0))
            progress(Progress(work, 2, 2, best, 30.0, 5.0, 3.0))
            rows.append(Tuned(told, work, rest["device"], 30.0, 20.0, best, 5.0, "[0]", 2, state, "budget"))
            if state == "interrupted":
                break
        return TuneResult(tuple(rows))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    made = Search()

    def tune(self: Tuner, *args: Any, **given: Any) -> TuneResult:
        return made(*args, store=self.url, **given)

    monkeypatch.setattr(Tuner, "tune", tune)
    return made


ADD = ("tune", "mine.py:add", "--device", "cpu", "--arg", "x=rows,8", "--arg", "y=8")


def test_tune_passes_on_what_the_options_say(run: Run, search: Search, home: Path) -> None:
    done = run(
        *ADD, "--arg", "scale=0.5", "--axis", "rows=2,3", "--dtype", "bfloat16", "--dtype", "fp32", "--trials", "5",
        "--seconds", "1.5", "--seed", "4", "--store", "other.db",
    )  # fmt: skip
    assert (done.exit_code, len(search.calls)) == (0, 1)
    (call,) = search.calls
    assert (call["fn"], call["name"], call["device"]) == ("add", None, "cpu")
    assert (call["trials"], call["seconds"], call["seed"]) == (5, 1.5, 4)
    assert call["store"] == f"sqlite:///{home / 'other.db'}"
    shapes = [(tuple(x.shape), x.dtype, tuple(y.shape), scale) for x, y, scale in call["cases"]]
    assert shapes == [
        ((rows, 8), dtype, (8,), 0.5) for dtype in (torch.bfloat16, torch.float32) for rows in (2, 3)
    ]  # fmt: skip


def test_tune_has_defaults(run: Run, search: Search, home: Path) -> None:
    assert run("tune", "mine.py:double", "--arg", "x=4", "--device", "cpu").exit_code == 0
    (call,) = search.calls
    assert (call["trials"], call["seconds"], call["seed"]) == (60, 30.0, 0)
    assert call["store"] == f"sqlite:///{home / 'results.db'}"
    assert call["cases"][0][0].dtype == torch.float32


def test_tune_prints_a_table_and_its_progress_apart(run: Run, search: Search) -> None:
    done = run(*ADD, "--axis", "rows=2")
    assert done.stdout.splitlines() == [
        "function  workload  eager µs  unfused µs  best µs  speedup  roofline  plan",
        "add       2x8             30          20       10    3.00x       50%  [0]",
    ]
    assert done.stderr.splitlines() == [
        "2x8: trial 1/2, best -, - of the roofline, 9 s left",
        "2x8: trial 2/2, best 10.0 µs, 50% of the roofline, 3 s left",
    ]


def test_tune_prints_json(run: Run, search: Search) -> None:
    done = run(*ADD, "--axis", "rows=2,3", "--json")
    rows = json.loads(done.stdout)
    assert [r["workload"] for r in rows] == ["2x8", "3x8"]
    assert rows[0]["best_us"] == 10.0 and rows[0]["share"] == 0.5 and rows[0]["speedup"] == 3.0


def test_a_workload_without_a_result_is_exit_code_1(run: Run, search: Search) -> None:
    search.states = iter(["done", "failed"])
    done = run(*ADD, "--axis", "rows=2,3")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].split(maxsplit=2) == [
        "add",
        "3x8",
        "30          20        -        -         -  failed: budget",
    ]


def test_an_interrupted_job_ends_with_what_it_has(run: Run, search: Search, home: Path) -> None:
    (home / "job.toml").write_text('[[tune]]\nfunction = "mine.py:double"\nargs = { x = "4" }\n' * 2)
    search.states = iter(["interrupted"])
    done = run("tune", "--job", "job.toml", "--device", "cpu")
    assert (done.exit_code, len(search.calls)) == (130, 1)
    assert "double" in done.stdout and "interrupted" in done.stderr


JOB = """\
[defaults]
device = "cpu"
trials = 3
[[tune]]
function = "mine.py:double"
args = { x = "rows,4" }
axes = { rows = [1, 2] }
name = "first"
[[tune]]
function = "mine.py:add"
args = { x = "4", y = "4" }
seconds = 2
"""


def test_a_job_file(run: Run, search: Search, home: Path) -> None:
    folder = home / "jobs"
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.replace("mine.py", "../mine.py"))
    done = run("tune", "--job", "jobs/job.toml", "--json")
    assert done.exit_code == 0
    assert [(c["fn"], c["name"], c["trials"], c["seconds"]) for c in search.calls] == [
        ("double", "first", 3, 30.0), ("add", None, 3, 2.0),
    ]  # fmt: skip
    assert [r["name"] for r in json.loads(done.stdout)] == ["first", "first", "add"]
    run("tune", "--job", "jobs/job.toml", "--trials", "9", "--seconds", "1")
    assert [(c["trials"], c["seconds"]) for c in search.calls[2:]] == [(9, 1.0)] * 2


def test_one_function_of_a_job_that_cannot_be_traced_does_not_stop_the_others(run: Run, search: Search, home: Path) -> None:
    (home / "job.toml").write_text(JOB)
    search.raises["first"] = TraceError("sort in double (mine.py:5) is not lowered yet")
    done = run("tune", "--job", "job.toml")
    assert done.exit_code == 2
    assert "autofuse: job.toml:4: tune[0]: sort in double (mine.py:5) is not lowered yet" in done.stderr
    assert [c["fn"] for c in search.calls] == ["double", "add"]
    assert done.stdout.splitlines()[-1].startswith("add ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune"], "name a function (path.py:function or module:function), or a job file with --job FILE"),
        (["tune", "mine.py:add", "--job", "job.toml"], "name a function or a job file with --job, not both"),
        (["tune", "--job", "job.toml", "--arg", "x=4"], "--arg does not go with --job: write it into job.toml"),
        (["tune", "--job", "none.toml"], "the job file none.toml cannot be read: No such file or directory"),
        (["tune", "mine.py:add", "--arg", "x"], "--arg x: write NAME=VALUE, as in x=rows,4096"),
        (["tune", "mine.py:add", "--arg", "x=4", "--arg", "x=5"], "--arg x=5: 'x' is given twice"),
        (["tune", "mine.py:add", "--arg", "x=4b"], "--arg x=4b: '4b' in '4b' is no extent"),
        (["tune", "mine.py:add", "--arg", "x=4:int3"], "--arg x=4:int3: 'int3' is no dtype: it may be float32"),
        (["tune", "mine.py:add", "--arg", "x=r"], "--axis: the axis 'r' of argument 'x' has no values"),
        (["tune", "mine.py:add", "--arg", "x=r", "--axis", "q=4"], "r=16,2048 (no argument names 'q': is it a typo?)"),
        (["tune", "mine.py:add", "--arg", "x=4", "--axis", "r=4"], "--axis: no argument names the axis 'r'"),
        (["tune", "mine.py:add", "--arg", "x=r", "--axis", "r=a"], "--axis r=a: 'a' is no extent"),
        (["tune", "mine.py:add", "--arg", "x=r", "--axis", "r=1", "--axis", "r=2"], "--axis r=2: 'r' is given twice"),
        (["tune", "mine.py:add", "--arg", "x=4", "--dtype", "int8"], "--dtype int8: int8 is no floating-point dtype"),
        (["tune", "mine.py:add", "--arg", "x=4"], "add needs an argument 'y': give it with --arg y=..."),
        (["tune", "mine.py:double", "--arg", "z=4"], "double has no parameter 'z': it takes x"),
        (["tune", "mine.py:nope", "--arg", "x=4"], "mine.py has no function 'nope': it has add, double"),
        (["tune", "none.py:add", "--arg", "x=4"], "none.py"),
        (["tune", "mine.py:double", "--arg", "x=r/3", "--axis", "r=4"], "the extent r/3 is no whole number where r is"),
        (["tune", "mine.py:double", "--arg", "x=4", "--device", "tpu9"], "tpu9"),
        (["tune", "mine.py:double", "--arg", "x=4", "--device", "cuda:99"], "cuda:99"),
        (["tune", "mine.py:double", "--from-demand"], "TARGET does not go with --from-demand"),
        (["tune", "--from-demand", "--arg", "x=4"], "--arg does not go with --from-demand"),
        (["tune", "mine.py:double", "--arg", "x=4", "--limit", "3"], "--limit goes with --from-demand"),
        (["demand", "--device", "tpu9"], "tpu9"),
        (["demand"], "There is no database at"),
        (["best"], "There is no database at"),
        (["best", "--store", "mysql://host/name"], "'mysql' databases are not supported"),
        (["history", "--store", "mine.py"], "mine.py is no database: name another file with --store"),
        (["tune", "mine.py:double", "--arg", "x=4", "--store", "mine.py"], "mine.py is no database: name another file"),
        (["tune", "mine.py:add", "--arg", "x=4", "--arg", "y=4", "--arg", "scale=2"],
         "scale of add is a Python number: scale=2 is a tensor of 2 elements, so write scale=2:int or scale=2.0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(run: Run, search: Search, words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout, search.calls) == (2, "", [])
    (line,) = done.stderr.splitlines()
    assert line.startswith("autofuse: ") and message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "mine.py:add", "--trials", "0"], "--trials"),
        (["tune", "mine.py:add", "--seconds", "0"], "--seconds"),
        (["tune", "mine.py:add", "--seed", "x"], "--seed"),
        (["history", "--limit", "0"], "--limit"),
        (["demand", "--limit", "0"], "--limit"),
        (["show", "x"], "TRIAL"),
        (["show"], "TRIAL"),
        (["sql"], "SELECT"),
        (["nope"], "nope"),
        (["best", "--nope"], "--nope"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_option(run: Run, words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_errors_of_the_search(run: Run, search: Search) -> None:
    search.raises["double"] = WorkerError("the measuring process ended at once")
    done = run("tune", "mine.py:double", "--arg", "x=4", "--device", "cpu")
    assert (done.exit_code, done.stderr) == (2, "autofuse: the measuring process ended at once\n")
    search.raises["double"] = RuntimeError("a bug")  # keeps its traceback
    assert isinstance(run("tune", "mine.py:double", "--arg", "x=4", "--device", "cpu").exception, RuntimeError)


def test_a_tensor_that_memory_cannot_hold(run: Run, search: Search) -> None:
    done = run("tune", "mine.py:double", "--device", "cpu", "--arg", "x=400000000000,4096")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "autofuse: an argument of 400000000000,4096 float32 does not fit into the memory of cpu: make its extents smaller\n"
    )


def test_a_number_that_was_written_as_an_extent(run: Run, search: Search) -> None:
    search.raises["double"] = TraceError("double cannot be traced: the size of tensor a must match")
    done = run("tune", "mine.py:double", "--device", "cpu", "--arg", "x=2")
    assert done.exit_code == 2
    assert "(if x is a number: x=2 is a tensor of 2 elements, so write x=2:int or x=2.0)" in done.stderr


def test_the_help_is_not_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("cc", ["/bin/true", "/nonexistent/gcc", "gcc -O2", "mine.py"])
def test_a_cc_that_is_no_compiler_is_named(run: Run, search: Search, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    from autofuse.kernels import build

    monkeypatch.setenv("CC", cc)
    build.compiler.cache_clear()
    try:
        tuned = run("tune", "mine.py:double", "--arg", "x=4", "--device", "cpu")
        told = run("doctor").stdout
    finally:
        monkeypatch.undo()
        build.compiler.cache_clear()
    assert (tuned.exit_code, search.calls) == (2, [])
    assert tuned.stderr.startswith(f"autofuse: CC is {cc!r}, which is no C compiler that works here: set it to")
    assert f"CC is {cc!r}" in told


def test_bad_environment_variables(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "sometimes")
    done = run("best")
    assert done.exit_code == 2 and "AUTOFUSE_ON_MISS is 'sometimes'" in done.stderr


def test_best(run: Run, filled: Path) -> None:
    head, row = run("best").stdout.splitlines()
    assert head.split()[:5] == ["chain", "rows", "cols", "dtypes", "device"]
    assert row.split() == [
        "norm_silu", "1024", "4096", "float16,", "float16", "H200", "12", "[0][1]", "yes", "2.9.0", "cold",
    ]  # fmt: skip
    (told,) = json.loads(run("best", "--json").stdout)
    assert (told["chain"], told["median_us"], told["verified"]) == ("norm_silu", 12.0, True)
    assert told["dtypes"] == ["float16", "float16"] and isinstance(told["layouts"], list)
    (told,) = json.loads(run("sql", "SELECT dtypes, chain FROM v_best", "--json").stdout)
    assert told == {"dtypes": ["float16", "float16"], "chain": "norm_silu"}


def test_explain_says_what_a_call_would_run_and_does_not_run_it(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autofuse.dispatch import Fused
    from autofuse.program import Program

    def refuse(*_: Any) -> None:
        raise AssertionError("it was run")

    for owner, name in ((Fused, "__call__"), (Fused, "_run"), (Program, "__call__"), (Program, "bind")):
        monkeypatch.setattr(owner, name, refuse)
    with Store.open(f"sqlite:///{home / 'results.db'}"):
        pass
    words = ["explain", "mine.py:add", "--device", "cpu", "--arg", "x=r,8", "--arg", "y=8", "--axis", "r=2,3", "--dtype", "bf16"]
    first, second = run(*words).stdout.split("\n\n")
    assert first.startswith("add: heuristic (the store has nothing near it)\n  workload   rows 2, extents 8, bfloat16")
    assert "rows 3, extents 8" in second
    told = json.loads(run(*words, "--json").stdout)
    assert [(t["tier"], t["workload"]["rows"], t["differs"]) for t in told] == [("heuristic", 2, []), ("heuristic", 3, [])]
    done = run("explain", "mine.py:add", "--arg", "x=4")
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.startswith("autofuse: ") and "y" in done.stderr


def test_export(run: Run, filled: Path, home: Path) -> None:
    done = run("export", "shipped.db", "--chain", "norm_silu")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "winners written to shipped.db: 1\n")
    mine, shipped = (json.loads(run("best", "--store", f, "--json").stdout) for f in ("results.db", "shipped.db"))
    assert mine == shipped
    done = run("export", "shipped.db")
    assert done.exit_code == 2 and "is there already: name another file, or use --force" in done.stderr
    assert run("export", "shipped.db", "--force").exit_code == 0
    assert run("export", "again.db", "--store", "shipped.db").exit_code == 0
    assert json.loads(run("best", "--store", "again.db", "--json").stdout) == mine
    assert run("export", "more.db", "--store", "nowhere.db").exit_code == 2
    assert run("export", "other.db", "--chain", "nope").exit_code == 2 and not (home / "other.db").exists()


def test_history(run: Run, filled: Path) -> None:
    lines = run("history").stdout.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[0] == "3" and lines[1].endswith("off by 3 ulp")
    assert "rowreduce: form=looped num_warps=8" in lines[3]
    told = json.loads(run("history", "--limit", "2", "--chain", "norm_silu", "--json").stdout)
    assert [(t["trial_id"], t["status"]) for t in told] == [(3, "incorrect"), (2, "ok")]
    assert told[0]["created"].endswith("+00:00")
    done = run("history", "--chain", "nope")
    assert done.exit_code == 2 and "No chain in the database has the name, id or key prefix 'nope'" in done.stderr


def test_show(run: Run, filled: Path) -> None:
    fields = {line.split()[0]: line.split()[-1] for line in run("show", "1").stdout.splitlines()}
    assert (fields["median_us"], fields["kind"], fields["num_warps"], fields["status"]) == ("7", "rowreduce", "8", "ok")
    shown = run("show", "1").stdout
    assert json.loads(run("show", "1", "--json").stdout)["run"]["uid"] in shown
    assert not [line for line in shown.splitlines() if line.startswith(("run uid", "run protocol", "run seed"))]
    told = json.loads(run("show", "2", "--json").stdout)
    assert told["plan"] == "[0][1]" and told["run"]["eager_us"] == 24.0
    assert [s["knobs"]["num_warps"] for s in told["schedules"]] == [8, 2]
    done = run("show", "99")
    assert (done.exit_code, done.stderr) == (2, "autofuse: There is no trial 99: `autofuse history` lists them.\n")


def test_a_long_plan_is_shortened_in_tables() -> None:
    parts = [f"pointwise({k})" for k in range(16)]
    row = {"plan": " | ".join(parts), "kind": None, "knobs": None}
    (plan,) = [c for c in tables.HISTORY if c.head == "plan or schedule"]
    assert plan.value(row) == "pointwise(0) … (16 segments)"
    assert plan.value({**row, "plan": "rowreduce(3,4) | eager(5)"}) == "rowreduce(3,4) | eager(5)"
    assert plan.value({**row, "plan": None, "kind": "eager"}) == "eager: "
    one = f"rowreduce({','.join(map(str, range(60)))})"
    assert len(plan.value({**row, "plan": one})) == tables.PLAN_WIDTH


def test_sql(run: Run, filled: Path) -> None:
    query = "SELECT status, count(*) AS n, 1e999 AS big, NULL AS no FROM trial GROUP BY status ORDER BY status"
    assert [line.split() for line in run("sql", query).stdout.splitlines()] == [
        ["status", "n", "big", "no"], ["incorrect", "1", "inf", "-"], ["ok", "2", "inf", "-"],
    ]  # fmt: skip
    assert json.loads(run("sql", query, "--json").stdout)[1] == {"status": "ok", "n": 2, "big": None, "no": None}
    assert json.loads(run("sql", "SELECT 1 AS a, 2 AS a, x'00ff' AS b", "--json").stdout) == [{"a": 1, "a:1": 2, "b": "00ff"}]
    assert run("sql", "SELECT * FROM trial WHERE 0").exit_code == 0
    assert run("sql", "SELECT '[red]x[/red]' AS a").stdout.splitlines()[1] == "[red]x[/red]"


@pytest.mark.parametrize("query", ["DELETE FROM trial", "SELECT 1; DELETE FROM trial", "SELECT * FROM nope", ""])
def test_sql_only_reads(run: Run, filled: Path, query: str) -> None:
    done = run("sql", query)
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.startswith("autofuse: The")
    assert run("sql", "SELECT count(*) AS n FROM trial").stdout.split() == ["n", "3"]


def test_doctor(run: Run, home: Path) -> None:
    done = run("doctor")
    lines = {line[:12].strip(): line for line in done.stdout.splitlines()}
    assert done.exit_code == 0
    assert " ok " in lines["target cpu"] and " ok " in lines["OpenMP"]
    assert "not there yet" in lines["store"] and not (home / "results.db").exists()
    told = json.loads(run("doctor", "--json").stdout)
    assert {t["what"] for t in told} >= {"torch", "C compiler", "OpenMP", "triton", "GPU", "store", "kernel cache"}
    assert all(t["ok"] or t["remedy"] for t in told)


def test_doctor_without_a_compiler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from autofuse.kernels import build

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    build.compiler.cache_clear()
    try:
        done = run("doctor")
    finally:
        monkeypatch.undo()
        build.compiler.cache_clear()
    assert done.exit_code == 1
    assert "install gcc or clang" in done.stdout


def test_doctor_says_what_is_wrong_with_the_store(run: Run, home: Path, filled: Path) -> None:
    (store,) = [c for c in doctor.examine(None) if c.what == "store"]
    assert store.ok and "3 trials" in store.found
    (home / "empty.db").touch()
    (store,) = [c for c in doctor.examine("empty.db") if c.what == "store"]
    assert store.ok and "has no tables of this version: the next tuning job makes them" in store.found
    (home / "text.db").write_text("this is no database\n" * 100)
    (store,) = [c for c in doctor.examine("text.db") if c.what == "store"]
    assert (store.ok, store.found[-8:], store.remedy) == (False, "database", "name another file with --store")
    (store,) = [c for c in doctor.examine("/proc/nowhere/x.db") if c.what == "store"]
    assert not store.ok and "AUTOFUSE_STORE" in store.remedy


def test_help_is_quick_it_imports_neither_torch_nor_the_store() -> None:
    code = (
        "import sys; from autofuse import cli\ntry: cli.app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'sqlalchemy', 'optuna', 'pydantic', 'triton') if m in sys.modules])"
    )
    done = subprocess_run(code=code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert all(command in done.stdout for command in ("tune", "explain", "build", "best", "history", "sql", "export", "doctor"))


def test_the_command_as_a_process(filled: Path) -> None:
    done = subprocess_run("best", "--json")
    assert (done.returncode, len(json.loads(done.stdout)), done.stderr) == (0, 1, "")
    done = subprocess_run("show", "99")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("autofuse: There is no trial 99")
    done = subprocess_run("--version")
    assert done.returncode == 0 and done.stdout.startswith("autofuse 0.")


def test_a_reader_that_leaves_is_no_error(filled: Path) -> None:
    long = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000) SELECT * FROM n"
    command = f"set -o pipefail; {sys.executable} -m autofuse.cli sql '{long}' | head -1"
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, check=False, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "i", "")


def test_a_terminal_gets_a_live_bar(search: Search) -> None:
    code = (
        "from autofuse.progress import Reporter\nfrom autofuse.result import Progress\nimport time\n"
        "with Reporter() as r:\n  r(Progress('16x4096 bf16', 7, 60, 12.5, 30.0, 5.0, 21.0))\n"
        "  time.sleep(0.3)\n  r.note('a line that stays')\n"
    )
    leader, follower = pty.openpty()
    env = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=follower, stdout=subprocess.PIPE, env=env)
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 4096):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    out, _ = process.communicate(timeout=60)
    os.close(leader)
    text = seen.decode()
    assert process.returncode == 0 and out == b""
    assert "16x4096 bf16" in text and "7/60" in text and "a line that stays" in text
    assert "best 12.5 µs, 40% of the roofline, 21 s left" in text


REAL = ("tune", "mine.py:add", "--device", "cpu", "--arg", "x=rows,64", "--arg", "y=64", "--axis", "rows=4,8")


def test_a_real_job(home: Path) -> None:
    done = subprocess_run(*REAL, "--trials", "4", "--seconds", "4", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [r["workload"].split()[-2] for r in rows] == ["4x64", "8x64"]
    assert all(0 < r["best_us"] <= r["eager_us"] for r in rows)
    best = json.loads(subprocess_run("best", "--json").stdout)
    assert [(b["rows"], b["cols"], b["chain"]) for b in best] == [(4, 64, "add"), (8, 64, "add")]
    assert [b["median_us"] for b in best] == [r["best_us"] for r in rows]


def test_a_function_that_is_no_chain(home: Path) -> None:
    with (home / "mine.py").open("a") as file:
        file.write("def ordered(x: torch.Tensor) -> torch.Tensor:\n    return torch.sort(x).values\n")
    done = subprocess_run("tune", "mine.py:ordered", "--device", "cpu", "--arg", "x=4,64")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("autofuse: ") and "sort" in line and "mine.py:7" in line


def test_ctrl_c_ends_a_job_with_what_it_has(home: Path) -> None:
    command = [sys.executable, "-m", "autofuse.cli", *REAL, "--trials", "100000", "--seconds", "100"]
    env = {**os.environ, "PYTHONPATH": ROOT}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "best -" not in line:  # the first valid result
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert [line.split()[0] for line in out.splitlines()] == ["function", "add"]  # the second workload was not begun
    assert "autofuse: interrupted" in err and "Traceback" not in err
    assert json.loads(subprocess_run("history", "--json").stdout)
