"""The dispatcher: right values, shapes, strides and aliases in every situation, and which kernel a call runs."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import dispatch
from autofuse.errors import InputError, MissError, TraceError, UnsupportedOp
from autofuse.kernels import build
from autofuse.store.store import Store
from tests.kernel_cases import right


def add_norm_act(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x + residual
    return F.silu(F.rms_norm(h, (h.shape[-1],), weight, 1e-6))


def softplus_gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x) + F.softplus(x)


def make(rows: int = 6, cols: int = 96, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype), torch.randn(cols).to(dtype)


def in_a_new_process(code: str, *options: str, env: dict[str, str] | None = None) -> None:
    """Run code in a Python of its own, which must succeed."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


pytestmark = pytest.mark.usefixtures("own_store")


# ---- tiers


def test_heuristic_then_exact_then_near_rows() -> None:
    args = make(64, 256)
    fused = autofuse.fuse(add_norm_act)
    assert fused.explain(*args).tier == "heuristic"
    right(add_norm_act, args, fused(*args))
    result = autofuse.tune(add_norm_act, [args], trials=4, seconds=20)
    assert result.ok
    told = fused.explain(*args)
    assert (told.tier, told.tuned_rows) == ("exact", 64)
    assert told.median_us == pytest.approx(result.rows[0].best_us) and told.plan == result.rows[0].plan
    right(add_norm_act, args, fused(*args))
    near = fused.explain(*make(7, 256))
    assert near.tier == "near rows" and "rows 64" in near.note
    right(add_norm_act, make(7, 256), fused(*make(7, 256)))
    assert fused.explain(*make(64, 128)).tier == "heuristic"


def test_images_of_several_sizes() -> None:
    """Channels, height and width are static: another size is another chain, another batch is not."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, 4, w))

    fused = autofuse.fuse(fn)
    weight = torch.randn(8)
    for shape in ((2, 8, 5, 7), (3, 8, 5, 7), (2, 8, 4, 4), (1, 8, 5, 7), (2, 8, 5, 7), (8, 8, 5, 7), (3, 8, 40)):
        x = torch.randn(shape)
        right(fn, (x, weight), fused(x, weight))
        assert fused.explain(x, weight).tier == "heuristic"


@pytest.mark.parametrize("order", [1, -1])
def test_row_numbers_at_several_shapes(order: int) -> None:
    """A kernel built where row axes of 1 run on as one does not serve where they do not."""

    def fn(s: torch.Tensor) -> torch.Tensor:
        q, k = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        head = torch.arange(s.shape[1])[:, None, None]
        return F.softmax(torch.where(k <= q + head, s, -1e9), -1)

    fused = autofuse.fuse(fn)
    shapes = [(1, 1, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8), (1, 3, 1, 8), (1, 3, 9, 8), (4, 2, 2, 8), (3, 1, 1, 8)]
    for shape in shapes[::order]:
        x = torch.randn(shape)
        right(fn, (x,), fused(x))
        assert fused.explain(x).tier == "heuristic"
        assert torch.equal(fused(x) > 0, fn(x) > 0)


def test_on_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make()
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "eager")
    assert autofuse.fuse(add_norm_act).explain(*args).tier == "eager"
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "error")
    with pytest.raises(MissError, match=r"add_norm_act has no tuned kernel for rows 6, extents \(96,\).*autofuse tune"):
        autofuse.fuse(add_norm_act)(*args)
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "sometimes")
    with pytest.raises(InputError, match="AUTOFUSE_ON_MISS is 'sometimes': set it to one of heuristic, eager, error"):
        autofuse.fuse(add_norm_act)(*args)


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_DISABLE", "1")
    fused = autofuse.fuse(add_norm_act)
    assert torch.equal(fused(*make()), add_norm_act(*make()))
    assert fused.explain(*make()).note == "AUTOFUSE_DISABLE is set"


# ---- inputs of every kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 3, 1000])
def test_rows_and_dtypes(rows: int, dtype: torch.dtype) -> None:
    args = make(rows, 33, dtype)
    right(add_norm_act, args, autofuse.fuse(add_norm_act)(*args))


def test_any_row_count_without_a_new_build(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = autofuse.fuse(softplus_gate)
    fused(torch.randn(8, 64))
    compiled: list[Any] = []
    original = build.compile_c

    def counted(*args: Any) -> Path:
        compiled.append(args)
        return original(*args)

    monkeypatch.setattr(build, "compile_c", counted)
    for rows in (2, 3, 17, 1, 500):
        x = torch.randn(rows, 64)
        right(softplus_gate, (x,), fused(x))
    assert not compiled


def test_layouts() -> None:
    fused = autofuse.fuse(softplus_gate)
    base = torch.randn(40, 64)
    raw = torch.randn(40 * 64 + 1)
    for x in (
        base.t(), base[::2], base[:, 8:40], base[:, ::2], base[3:4].expand(9, 64), base[:, :1].expand(40, 16),
        raw[1:].view(40, 64), base.view(2, 20, 64).transpose(0, 1), base.view(5, 8, 64)[:, 1:7], base[0], base[0, 0],
    ):  # fmt: skip
        right(softplus_gate, (x,), fused(x))


def test_broadcasting_against_rows() -> None:
    def mix(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y + x

    fused = autofuse.fuse(mix)
    for a, b in (((4, 8), (4, 8)), ((4, 8), (1, 8)), ((1, 8), (4, 8)), ((4, 8), (4, 1)), ((1, 8), (1, 8)), ((2, 4, 8), (4, 8))):
        args = (torch.randn(a), torch.randn(b))
        right(mix, args, fused(*args))


def test_aliased_inputs_and_inputs_unchanged() -> None:
    x, _, w = make()
    before = x.clone()
    right(add_norm_act, (x, x, w), autofuse.fuse(add_norm_act)(x, x, w))
    assert torch.equal(x, before)


def test_shapes_that_do_not_fit_raise_as_eager_does() -> None:
    fused = autofuse.fuse(add_norm_act)
    with pytest.raises((RuntimeError, TraceError), match="size"):
        fused(torch.randn(4, 8), torch.randn(5, 8), torch.randn(8))


def test_outputs_that_are_inputs_and_views() -> None:
    def several(x: torch.Tensor) -> dict[str, Any]:
        y = x * 2
        return {"same": x, "part": x[:, :4], "new": y, "turned": y.t(), "pair": (y + 1, x.unsqueeze(0))}

    x = torch.randn(5, 16)
    got = autofuse.fuse(several)(x)
    right(several, (x,), got)
    assert got["same"] is x
    assert got["part"].data_ptr() == x.data_ptr() and got["part"]._base is x
    assert got["pair"][1]._base is x
    assert got["turned"].data_ptr() == got["new"].data_ptr()


def test_keywords_defaults_and_scalars() -> None:
    def scaled(x: torch.Tensor, scale: float = 0.5, *, shift: bool = False) -> torch.Tensor:
        return x * scale + 1 if shift else x * scale

    fused = autofuse.fuse(scaled)
    x = torch.randn(3, 8)
    for scale in (0.5, 2.0, -0.0, 0.0):
        assert torch.equal(fused(x, scale=scale), x * scale)
        assert torch.equal(torch.signbit(fused(x, scale=scale)), torch.signbit(x * scale))
    with pytest.raises(TraceError, match="scaled got shift as keyword-only"):
        fused(x, shift=True)
    with pytest.raises(InputError, match="no tensor and no number"):
        fused(x, [1.0])


# ---- what a function closes over


def test_closure_tensors_and_numbers_are_read_again() -> None:
    table = {"w": torch.randn(16)}
    weight = torch.randn(16)
    factor = 2.0

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * weight * factor + table["w"]

    fused = autofuse.fuse(f)
    x = torch.randn(4, 16)
    torch.testing.assert_close(fused(x), f(x))
    weight = torch.randn(16)
    torch.testing.assert_close(fused(x), f(x))
    table["w"] = torch.randn(16)
    torch.testing.assert_close(fused(x), f(x))
    weight.mul_(3)
    torch.testing.assert_close(fused(x), f(x))
    factor = -1.0
    torch.testing.assert_close(fused(x), f(x))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32))
        self.eps = 1e-6

    @autofuse.fuse
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), self.weight, self.eps) * 2


def test_a_method_of_a_module() -> None:
    first, second = Block(), Block()
    x = torch.randn(4, 32)
    with torch.no_grad():
        for block in (first, second, first):
            torch.testing.assert_close(block(x), F.rms_norm(x, (32,), block.weight, 1e-6) * 2)
        first.weight = torch.nn.Parameter(torch.randn(32))
        torch.testing.assert_close(first(x), F.rms_norm(x, (32,), first.weight, 1e-6) * 2)
    first(x).sum().backward()
    assert first.weight.grad is not None and first.weight.grad.abs().sum() > 0


# ---- modes


def test_gradients_are_never_cut() -> None:
    x, r, w = make()
    ours, theirs = (t.clone().requires_grad_() for t in (x, x))
    autofuse.fuse(add_norm_act)(ours, r, w).sum().backward()
    add_norm_act(theirs, r, w).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert not autofuse.fuse(add_norm_act)(ours, r, w).requires_grad
    assert autofuse.fuse(add_norm_act).explain(ours, r, w).note == "an input needs a gradient"


def test_autocast_inference_mode_vmap_and_compile() -> None:
    x, r, w = make()
    fused = autofuse.fuse(add_norm_act)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x, r, w), add_norm_act(x, r, w))
    with torch.inference_mode():
        right(add_norm_act, (x, r, w), fused(x, r, w))
    many = torch.func.vmap(fused, in_dims=(0, 0, None))(x.unsqueeze(0), r.unsqueeze(0), w)
    torch.testing.assert_close(many[0], add_norm_act(x, r, w))
    caller = torch.compile(lambda a, b, c: fused(a, b, c) + 1, backend="eager")
    torch.testing.assert_close(caller(x, r, w), add_norm_act(x, r, w) + 1)


def test_a_cold_call_from_many_threads() -> None:
    fused = autofuse.fuse(softplus_gate)
    x = torch.randn(16, 128)
    got: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(fused(x))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 8 and len(fused._calls) == 1
    for y in got:
        right(softplus_gate, (x,), y)


def test_a_forked_child() -> None:
    fused = autofuse.fuse(softplus_gate)
    x = torch.randn(512, 512)
    expected = fused(x).numpy().tobytes()  # compared without torch, whose own parallel loops hang after a fork
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if fused(x).numpy().tobytes() == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.cumsum(-1), r"cumsum\.default in <lambda> at .*test_dispatch\.py:\d+ is not lowered"),
        (lambda x: x.add_(1), "writes into an input"),
        (lambda x: torch.rand_like(x) + x, "is random"),
        (lambda x: x if x.shape[0] > 3 else x * 2, "decides by the size of a leading axis"),
        (lambda x: x if x.sum() > 0 else -x, "depends on the values of a tensor"),
        (lambda x: x.softmax(0), "leading"),
    ],
)
def test_what_is_no_chain_raises_one_clear_error(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        autofuse.fuse(fn)(torch.randn(8, 16))


def test_the_exception_tree() -> None:
    assert issubclass(UnsupportedOp, TraceError) and issubclass(TraceError, autofuse.AutofuseError)


# ---- the database never fails a call


def test_a_wrong_kernel_is_found_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from autofuse.kernels.c_text import CPrinter

    original = CPrinter.operation
    monkeypatch.setattr(
        CPrinter, "operation", lambda self, e, args: original(self, e, args) + (" + 0.25f" if e.op == "exp" else "")
    )
    fused = autofuse.fuse(softplus_gate)
    x = torch.randn(7, 41)
    with pytest.warns(RuntimeWarning, match="softplus_gate runs its eager function: its heuristic kernel failed"):
        assert torch.equal(fused(x), softplus_gate(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fused(x), softplus_gate(x))
        assert torch.equal(fused(x[:3]), softplus_gate(x[:3]))
    assert fused.explain(x).tier == "eager"


@pytest.mark.parametrize("content", [b"this is no database", b"SQLite format 3\0" + b"\0" * 50])
def test_a_store_that_is_no_database_is_a_miss_with_one_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    fused = autofuse.fuse(add_norm_act)
    with pytest.warns(RuntimeWarning, match="the store is not used"):
        right(add_norm_act, make(), fused(*make()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(*make(9))
    assert path.read_bytes() == content


def test_a_schedule_that_someone_else_wrote_cannot_run_code(tmp_path: Path) -> None:
    args = (torch.randn(512, 1024),)  # a chain that eager cannot win
    assert autofuse.tune(softplus_gate, [args], trials=3, seconds=20).rows[0].plan.startswith("pointwise")
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as db:
        db.execute("""UPDATE schedule SET knobs = json_set(knobs, '$.math', 'exact"); system("touch /tmp/never"); //')""")
    db.close()
    dispatch.reload()
    fused = autofuse.fuse(softplus_gate)
    told = fused.explain(*args)
    assert told.tier == "heuristic" and "has no math=" in told.note and "touch" not in told.source
    right(softplus_gate, args, fused(*args))


def test_the_runtime_imports_neither_search_nor_sqlalchemy(tmp_path: Path) -> None:
    code = (
        "import sys, torch, autofuse\n"
        "f = autofuse.fuse(lambda x: torch.tanh(x) * 2)\n"
        "f(torch.randn(4, 8))\n"
        "bad = [m for m in ('optuna', 'alembic', 'sqlalchemy', 'pydantic', 'autofuse.search') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    in_a_new_process(code)


def test_the_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import autofuse\n"
        "autofuse.fuse(lambda x: x + 1)\n"
        "new = {m for m in set(sys.modules) - before if m.split('.')[0] != 'autofuse'}\n"
        "assert new <= {'sqlite3', 'sqlite3.dbapi2', '_sqlite3'}, new\n"
    )
    in_a_new_process(code)


def test_a_damaged_object_in_the_cache_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(f"sqlite:///{tmp_path / 'store.db'}").close()  # a missing one is warned of
    monkeypatch.setenv("AUTOFUSE_CACHE", str(tmp_path / "cache"))
    x = torch.randn(4, 8)
    code = (
        "import torch, autofuse\n"
        "x = torch.ones(4, 8)\n"
        "f = autofuse.fuse(lambda x: x.exp() - 3)\n"
        "assert torch.allclose(f(x), x.exp() - 3) and f.explain(x).tier == 'heuristic'\n"
    )
    for _ in range(2):
        in_a_new_process(code, "-W", "error")
        (library,) = (tmp_path / "cache" / "cpu").glob("*.so")
        library.write_bytes(library.read_bytes()[:100])
    assert x.shape == (4, 8)
    assert not list((tmp_path / "cache").rglob("*.tmp*"))


def test_without_a_compiler_eager_runs_with_one_warning(tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path / 'store.db'}").close()  # a missing one is warned of
    code = (
        "import warnings, torch, autofuse\n"
        "f = autofuse.fuse(lambda x: x.exp() - 3)\n"
        "x = torch.ones(4, 8)\n"
        "with warnings.catch_warnings(record=True) as w:\n"
        "    warnings.simplefilter('always')\n"
        "    assert torch.equal(f(x), x.exp() - 3) and torch.equal(f(x[:2]), x[:2].exp() - 3)\n"
        "assert len(w) == 1 and 'no C compiler was found' in str(w[0].message), [str(x.message) for x in w]\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "CC": "", "AUTOFUSE_CACHE": str(tmp_path / "cache")}
    in_a_new_process(code, env=env)
