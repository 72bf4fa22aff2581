"""The runtime's look-ups: the same answers as the store's, without SQLAlchemy, and every failure told apart."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.dialects import sqlite
from store_samples import CHAIN, DEVICE, EAGER, FUSED, NEW, OLD, OTHER_DEVICE, SPLIT, begin, fill, workload

from autofuse.errors import StoreCorrupt, StoreError, StoreNewer
from autofuse.store import queries
from autofuse.store.reader import BEST_SQL, ENTRIES_SQL, GRAPHS_SQL, Reader
from autofuse.store.records import BestRecord
from autofuse.store.store import Store

FAMILY = workload().family
ON = (DEVICE.uid, DEVICE.name)
THERE = (OTHER_DEVICE.uid, OTHER_DEVICE.name)
SPLIT_BEST = BestRecord(1024, SPLIT.plan, SPLIT.schedules, 12.0, True, OLD, SPLIT.uid, "cold", *ON)


@pytest.mark.parametrize(
    ("statement", "sql"),
    [
        (queries.best_statement("f", "d", "a"), BEST_SQL),
        (queries.entries_statement("k", "n", "f", "a"), ENTRIES_SQL),
        (queries.graphs_statement("n"), GRAPHS_SQL),
    ],
)
def test_the_statements_are_the_models_own(statement: Any, sql: str) -> None:
    compiled = str(statement.compile(dialect=sqlite.dialect()))
    assert " ".join(compiled.split()) == " ".join(sql.split())


def test_a_look_up_imports_no_sqlalchemy(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    code = (
        "import sys; from autofuse.store.reader import Reader; import autofuse.store.records\n"
        f"assert Reader('sqlite:///{file}').best({FAMILY!r}, {DEVICE.uid!r})[0].median_us == 12.0\n"
        "print([m for m in ('sqlalchemy', 'alembic', 'torch', 'optuna') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert out.stdout == "[]\n"


def test_reader_equals_store(url: str) -> None:
    with Store.open(url) as store:
        first, second, third = begin(store), begin(store, environment=NEW), begin(store, protocol="graph")
        other = begin(store, device=OTHER_DEVICE)
        store.set_best(first, workload(), SPLIT, 12.0, True)
        store.set_best(first, workload(16), FUSED, 2.0, False)
        store.set_best(first, workload(16, cols=128), FUSED, 2.0, False)
        store.set_best(second, workload(), FUSED, 10.0, False)
        store.set_best(third, workload(), EAGER, 14.0, True)
        store.set_best(other, workload(), FUSED, 99.0, True)
        expected = [
            BestRecord(16, FUSED.plan, FUSED.schedules, 2.0, False, OLD, FUSED.uid, "cold", *ON),
            SPLIT_BEST,
            BestRecord(1024, EAGER.plan, EAGER.schedules, 14.0, True, OLD, EAGER.uid, "graph", *ON),
            BestRecord(1024, FUSED.plan, FUSED.schedules, 10.0, False, NEW, FUSED.uid, "cold", *ON),
        ]
        reader = Reader(url)
        assert reader.best(FAMILY, DEVICE.uid) == expected
        assert store.best_records(FAMILY, DEVICE.uid) == expected
        elsewhere = BestRecord(1024, FUSED.plan, FUSED.schedules, 99.0, True, OLD, FUSED.uid, "cold", *THERE)
        for source in (reader.best, store.best_records):
            assert source(FAMILY, DEVICE.uid, OTHER_DEVICE.arch) == [*expected, elsewhere]
            assert source(FAMILY, DEVICE.uid, DEVICE.arch) == expected
        asked = (CHAIN.key, "no such name", FAMILY, OTHER_DEVICE.arch)
        found = reader.entries(*asked)
        assert [(e.workload.rows, e.workload.extents, e.device_name, e.environment) for e in found] == [
            (1024, (64, 4096), "some CPU", OLD), (1024, (64, 4096), "H200", OLD), (1024, (64, 4096), "H200", NEW),
            (16, (64, 4096), "H200", OLD), (1024, (64, 4096), "H200", OLD), (16, (64, 128), "H200", OLD),
        ]  # fmt: skip
        assert {e.workload.family for e in found[:5]} == {FAMILY}
        assert store.entry_records(*asked) == found
        assert set(reader.entries("0" * 64, CHAIN.name, "", "")) == set(found)
        assert reader.entries("0" * 64, "", "", "") == []
        store.set_best(first, workload(16), FUSED, 1.0, True)
        assert reader.best(FAMILY, DEVICE.uid)[0].median_us == 1.0  # an open reader sees what was written since
        assert reader.best("0" * 32, DEVICE.uid) == []
        reader.close()
        assert reader.best(FAMILY, OTHER_DEVICE.uid)[0].median_us == 99.0
        reader.close()


def test_a_missing_or_empty_file_is_a_miss_until_it_is_there(file: Path) -> None:
    reader = Reader(f"sqlite:///{file}")
    assert reader.best(FAMILY, DEVICE.uid) == []
    assert not file.exists()
    file.touch()
    assert reader.best(FAMILY, DEVICE.uid) == []
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    assert reader.best(FAMILY, DEVICE.uid) == [SPLIT_BEST]
    file.unlink()
    assert reader.best(FAMILY, DEVICE.uid) == []
    with Store.open(f"sqlite:///{file}") as store:  # another file under the same name
        store.set_best(begin(store), workload(), FUSED, 3.0, True)
    assert [best.median_us for best in reader.best(FAMILY, DEVICE.uid)] == [3.0]


def test_corrupt_files(file: Path) -> None:
    file.write_bytes(b"nothing like a database" * 100)
    with pytest.raises(StoreCorrupt):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)
    file.unlink()
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)  # the first page, with the schema, is whole
    file.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged"):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)


@pytest.mark.parametrize("knobs", ["[not json", "{"])
def test_knobs_that_are_no_json(file: Path, knobs: str) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE schedule SET knobs = ?", (knobs,))
    with pytest.raises(StoreError):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)


def test_newer_databases(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE meta SET value = '9' WHERE key = 'schema'")
    assert Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid) == [SPLIT_BEST]  # its oldest reader is still 1
    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE meta SET value = '9' WHERE key = 'oldest_reader'")
    with pytest.raises(StoreNewer, match="upgrade"):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)


def test_files_of_others(file: Path) -> None:
    with sqlite3.connect(file) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="does not have the tables"):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)
    with sqlite3.connect(file) as raw:
        raw.execute("PRAGMA application_id = 77")
    with pytest.raises(StoreError, match="another program"):
        Reader(f"sqlite:///{file}").best(FAMILY, DEVICE.uid)


def test_a_locked_database_is_an_error_soon_and_works_later(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    raw = sqlite3.connect(file, isolation_level=None)
    raw.execute("PRAGMA journal_mode=DELETE")
    raw.execute("BEGIN EXCLUSIVE")
    reader = Reader(f"sqlite:///{file}")
    with pytest.raises(StoreError, match="locked by another process"):
        reader.best(FAMILY, DEVICE.uid)
    raw.execute("ROLLBACK")
    raw.close()
    assert reader.best(FAMILY, DEVICE.uid) == [SPLIT_BEST]


def test_each_thread_and_each_side_of_a_fork(file: Path, together: Callable[..., list[Any]]) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
        reader = Reader(f"sqlite:///{file}")
        assert reader.best(FAMILY, DEVICE.uid) == [SPLIT_BEST]
        found: list[BestRecord] = []
        threads = [threading.Thread(target=lambda: found.extend(reader.best(FAMILY, DEVICE.uid))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [SPLIT_BEST] * 4
        opened = reader._local.handle.connection

        def in_child(_number: int) -> tuple[list[BestRecord], bool]:
            return reader.best(FAMILY, DEVICE.uid), reader._local.handle.connection is opened

        assert together(2, in_child) == [([SPLIT_BEST], False)] * 2
        assert reader._local.handle.connection is opened
        store.set_best(1, workload(), SPLIT, 11.0, True)
        assert reader.best(FAMILY, DEVICE.uid)[0].median_us == 11.0


@pytest.fixture
def shipped() -> Iterator[Path]:
    """A filled database in WAL mode that an unprivileged user can read, but whose folder it cannot write."""
    folder = Path(tempfile.mkdtemp())
    try:
        with Store.open(f"sqlite:///{folder}/shipped.db") as store:
            fill(store)
        (folder / "shipped.db").chmod(0o444)
        folder.chmod(0o555)
        yield folder / "shipped.db"
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def unprivileged(_number: int, work: Callable[[], Any]) -> Any:
    if os.geteuid() == 0:  # to root, nothing is read-only
        os.setgid(65534)
        os.setuid(65534)
    return work()


def test_a_read_only_folder(shipped: Path, together: Callable[..., list[Any]]) -> None:
    url = f"sqlite:///{shipped}"

    def read() -> tuple[Any, ...]:
        with Store.open(url, read_only=True) as store:
            rows = store.query("SELECT count(*) FROM v_history")[1]
            return Reader(url).best(FAMILY, DEVICE.uid), store.best_records(FAMILY, DEVICE.uid), rows

    def write() -> str:
        with pytest.raises(StoreError) as caught:
            Store.open(url)
        return str(caught.value)

    assert together(1, unprivileged, read) == [([SPLIT_BEST], [SPLIT_BEST], [(3,)])]
    [message] = together(1, unprivileged, write)
    assert "is read-only" in message
    assert "AUTOFUSE_STORE" in message
    assert [p.name for p in shipped.parent.iterdir()] == ["shipped.db"]


def test_a_read_only_folder_with_an_unreadable_wal(shipped: Path, together: Callable[..., list[Any]]) -> None:
    """The newest commits are in the -wal file: without it, the file alone would give old or torn answers."""
    shipped.parent.chmod(0o755)
    wal = shipped.with_name("shipped.db-wal")
    wal.write_bytes(b"commits")
    wal.chmod(0)
    shipped.parent.chmod(0o555)

    def read() -> str:
        with pytest.raises(StoreError) as caught:
            Reader(f"sqlite:///{shipped}").best(FAMILY, DEVICE.uid)
        return str(caught.value)

    [message] = together(1, unprivileged, read)
    assert "cannot be opened" in message


def test_a_store_opened_for_reading_refuses_to_write(url: str) -> None:
    with Store.open(url) as store:
        run = fill(store)
    with Store.open(url, read_only=True) as store:
        with pytest.raises(StoreError, match="read-only"):
            store.finish_run(run, "done")
        assert store.best()[0]["median_us"] == 12.0
