"""Every fault of a database that a user can meet, made for real: calls go on with right values, one warning says what to do,
and nothing is written to the database or deleted."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.store.reader import Reader
from tests.kernel_cases import right

pytestmark = pytest.mark.usefixtures("own_store")
ROWS, COLS = 512, 1024


def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x) + F.softplus(x)


def batch(rows: int = ROWS) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, COLS)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database in DELETE mode, in which this machine has a winner for `gate`."""
    path = tmp_path_factory.mktemp("searched") / "tuned.db"
    result = autofuse.tune(gate, [(batch(),)], store=str(path), trials=3, seconds=20, device="cpu")
    assert result.rows[0].plan.startswith("pointwise")
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    raw.close()
    return path.read_bytes()


@pytest.fixture
def store(tmp_path: Path, searched: bytes) -> Path:
    path = tmp_path / "folder" / "store.db"
    path.parent.mkdir()
    path.write_bytes(searched)
    os.environ["AUTOFUSE_STORE"] = str(path)  # own_store puts back what was there
    return path


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, to the byte and the nanosecond."""
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def remove_all(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


def without_tables(path: Path) -> None:
    path.unlink()
    raw = sqlite3.connect(path)
    raw.execute("VACUUM")
    raw.close()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_another_program(path: Path) -> None:
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA application_id = 77")
    raw.close()


def newer(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = '99' WHERE key IN ('schema', 'oldest_reader', 'oldest_writer')")
    raw.close()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "there is no database at {}: run `autofuse tune`, or set AUTOFUSE_STORE"),
    "missing folder": (remove_all, "there is no database at {}: run `autofuse tune`"),
    "empty": (lambda p: p.write_bytes(b""), "{} is empty: run `autofuse tune`, or set AUTOFUSE_STORE"),
    "no tables": (without_tables, "{} is empty: run `autofuse tune`"),
    "truncated": (cut, "{} is damaged or no SQLite database (database disk image is malformed): move it aside"),
    "a part of its first page": (lambda p: p.write_bytes(p.read_bytes()[:100]), "{} is damaged or no SQLite database"),
    "text": (lambda p: p.write_text("a text, no database\n" * 50), "{} is damaged or no SQLite database (file is not a database)"),
    "newer": (newer, "{} has schema 99 and this autofuse can read up to"),
    "a folder": (a_folder, "{} is no file: name one in AUTOFUSE_STORE"),
    "another program's": (of_another_program, "{} belongs to another program (application_id 0x4d): name another file"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_miss", ["heuristic", "eager"])
def test_calls_go_on(store: Path, fault: str, on_miss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, message = FAULTS[fault]
    break_it(store)
    monkeypatch.setenv("AUTOFUSE_ON_MISS", on_miss)
    before = None if not store.parent.exists() else state(store.parent) if store.is_file() else sorted(store.parent.iterdir())
    fused, another = autofuse.fuse(gate), autofuse.fuse(gate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in (batch(), batch(3), batch()[:, :96].contiguous()):
            right(gate, (x,), fused(x))
            right(gate, (x,), another(x))
            assert fused.explain(x).tier == on_miss
    (told,) = [str(w.message) for w in caught]
    assert told.startswith("the store is not used: " + message.format(store))
    after = None if not store.parent.exists() else state(store.parent) if store.is_file() else sorted(store.parent.iterdir())
    assert after == before


def test_a_default_store_that_nobody_has_made_yet_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOFUSE_STORE")
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *_: str(tmp_path / "data"))
    fused = autofuse.fuse(gate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right(gate, (batch(3),), fused(batch(3)))
    assert fused.tiers() == {"heuristic": 1} and not (tmp_path / "data").exists()


def test_an_empty_store_that_is_tuned_later_serves_new_calls(store: Path, searched: bytes) -> None:
    store.write_bytes(b"")
    fused = autofuse.fuse(gate)
    with pytest.warns(RuntimeWarning, match="is empty"):
        assert fused.explain(batch()).tier == "heuristic"
    store.write_bytes(searched)
    assert fused.explain(batch()).tier == "exact"


@pytest.fixture
def holder(store: Path) -> Iterator[Callable[[], None]]:
    """Another process that holds the store's exclusive lock; calling the fixture ends it."""
    code = (
        "import sqlite3, sys\n"
        "raw = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "raw.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield lambda: process.communicate(timeout=30) and None
    if process.poll() is None:
        process.kill()
        process.wait()


def test_a_store_that_another_process_holds_locked(
    store: Path, holder: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as the lock is held: calls wait for it once, not each, and new ones find the store after it."""
    clock = [1000.0]
    monkeypatch.setattr("autofuse.store.layers.time.monotonic", lambda: clock[0])
    fused = autofuse.fuse(gate)
    content = store.read_bytes()
    opened: list[Path] = []
    original = Reader._open

    def counted(reader: Reader, path: Path) -> Any:
        opened.append(path)
        return original(reader, path)

    monkeypatch.setattr(Reader, "_open", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for second, rows in enumerate((ROWS, 100, 3, ROWS, 64, 65)):
            clock[0] = 1000.0 + second * 12  # a minute
            right(gate, (batch(rows),), fused(batch(rows)))
    (told,) = [str(w.message) for w in caught]
    assert told.startswith(f"the store is not used: {store} is locked by another process") and "try again later" in told
    assert len(opened) == 2  # at 0 s, and again after 30 s
    assert fused.tiers() == {"heuristic": 6}
    holder()
    assert store.read_bytes() == content
    clock[0] += 31
    assert fused.explain(batch()).tier == "exact"


AS_NOBODY = """\
import os, sys, warnings
import torch, torch.nn.functional as F, autofuse
os.umask(0)
other = sys.argv[1] + ".none"
autofuse.fuse(lambda x: x * 2 + 1, store=other)(torch.ones(2, 8))  # imports what nobody may not be able to read
if os.geteuid() == 0:  # to root, nothing is read-only
    os.setgid(65534), os.setuid(65534)
assert not os.access(sys.argv[1], os.W_OK) and os.access(sys.argv[1], os.R_OK)
def gate(x): return x * torch.sigmoid(1.5 * x) + F.softplus(x)
torch.manual_seed(1)
x = torch.randn(512, 1024)
fused = autofuse.fuse(gate)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    torch.testing.assert_close(fused(x), gate(x))
print(fused.tiers())
"""


@pytest.mark.parametrize("folder", [0o555, 0o755])
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_read_only_store_is_read(tmp_path_factory: pytest.TempPathFactory, searched: bytes, folder: int, journal: str) -> None:
    """It is as good as any: found without a warning, and left as it is. In a WAL file's folder nothing is made either."""
    place = tmp_path_factory.mktemp("site")
    for parent in (place, place.parent, place.parent.parent):
        parent.chmod(0o755)
    path, cache = place / "store.db", tmp_path_factory.mktemp("cache")
    path.write_bytes(searched)
    raw = sqlite3.connect(path)
    raw.execute(f"PRAGMA journal_mode={journal}")
    raw.close()
    cache.chmod(0o777)
    path.chmod(0o444)
    place.chmod(folder)
    before = state(place)
    env = {**os.environ, "AUTOFUSE_STORE": str(path), "AUTOFUSE_CACHE": str(cache), "HOME": str(cache)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, check=False, env=env, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "{'exact': 1}\n"), done.stderr
        assert state(place) == before
    finally:
        place.chmod(0o755)
