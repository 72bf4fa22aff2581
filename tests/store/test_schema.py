"""Creating, upgrading and refusing databases."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from store_samples import DEVICE, OLD, SPLIT, fill, workload

import autofuse.store.engine
import autofuse.store.revision
from autofuse.errors import StoreCorrupt, StoreError, StoreNewer
from autofuse.store import schema, views
from autofuse.store.engine import make_engine, on_network, writing
from autofuse.store.models import Base
from autofuse.store.records import BestRecord
from autofuse.store.revision import HEAD, SCHEMA, VERSION_TABLE
from autofuse.store.store import Store

NEXT = f"{SCHEMA + 1:04}"
REVISION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "{next}", "{head}"
def upgrade():
    always = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("run", recreate=always) as batch:
        batch.add_column(sa.Column("note", sa.Text()))
    {more}
def downgrade():
    pass
"""


def open_and_count(_number: int, url: str) -> int:
    with Store.open(url) as store:
        return len(store.query("SELECT key FROM meta")[1])


def test_eight_processes_open_a_new_database_at_once(url: str, together: Callable[..., list[Any]]) -> None:
    assert together(8, open_and_count, url) == [3] * 8


def test_new_files_are_opened_at_once_again_and_again(tmp_path: Path, together: Callable[..., list[Any]]) -> None:
    for i in range(5):
        assert together(4, open_and_count, f"sqlite:///{tmp_path}/{i}.db") == [3] * 4


def test_migrations_make_what_the_models_say(store: Store) -> None:
    def ours(name: str | None, kind: str, _parents: Any) -> bool:
        return kind != "table" or name in Base.metadata.tables

    with store.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "include_name": ours, "version_table": VERSION_TABLE}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_migrations_make_the_same_checks_and_keys_as_the_models(store: Store, file: Path) -> None:
    """Alembic compares no CHECK constraints, so compare all the DDL that SQLite keeps."""
    if store.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL keeps no DDL text")
    plain = make_engine(f"sqlite:///{file}.plain")
    Base.metadata.create_all(plain)
    ddl = text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'view' AND name NOT LIKE 'autofuse%'")

    def read(connection: Connection) -> dict[str, list[str]]:
        lines = ((name, sql.splitlines()) for name, sql in connection.execute(ddl))
        return {name: sorted(line.strip(" \t,") for line in found) for name, found in lines}

    with plain.connect() as one, store.engine.connect() as two:
        made, migrated = read(one), read(two)
    assert migrated == made
    assert "CONSTRAINT ck_trial_ok_has_time CHECK ((status = 'ok') = (median_us IS NOT NULL))" in made["trial"]


@pytest.mark.parametrize("layout", ["installed", "checkout"])
def test_migrations_are_found(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "autofuse"
    folder = (package if layout == "installed" else package.parent) / "migrations"
    (package / "store").mkdir(parents=True)
    monkeypatch.setattr(schema, "__file__", str(package / "store" / "schema.py"))
    with pytest.raises(StoreError, match="migrations are missing"):
        schema.migrations_folder()
    folder.mkdir()
    (folder / "env.py").touch()
    assert schema.migrations_folder() == folder


def test_the_alembic_command(url: str) -> None:
    root = Path(__file__).parents[2]
    if not (root / "alembic.ini").is_file():
        pytest.skip("not in a checkout")

    def alembic(*words: str) -> str:
        command = [sys.executable, "-m", "alembic", "-x", f"url={url}", *words]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    alembic("upgrade", "head")
    assert "No new upgrade operations detected" in alembic("check")
    with Store.open(url) as store:
        fill(store)
        assert len(store.best()) == 1
    assert alembic("current") == f"{HEAD} (head)\n"


def test_head_is_the_newest_migration() -> None:
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    assert scripts.get_current_head() == HEAD
    assert len(list(scripts.walk_revisions())) == SCHEMA


def test_downgrade_and_upgrade_of_a_filled_database(store: Store) -> None:
    fill(store)
    with writing(store.engine) as connection:
        connection.execute(text("CREATE TABLE trials (trial_id INTEGER)"))  # another program's
        connection.execute(text("INSERT INTO trials VALUES (42)"))
    with schema.exclusive(store.engine) as connection:
        command.downgrade(schema.alembic_config(connection), "base")
    with store.engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) == {VERSION_TABLE, "trials"}
        assert inspect(connection).get_view_names() == []
        assert connection.scalar(text("SELECT trial_id FROM trials")) == 42
    schema.upgrade(store.engine)
    run = fill(store)
    assert [(row["trial_id"], row["run_id"]) for row in store.history()] == [(3, run), (2, run), (1, run)]
    assert set(inspect(store.engine).get_view_names()) == set(views.VIEWS)


def test_sqlite_settings(file: Path) -> None:
    Store.open(f"sqlite:///{file}").close()
    with Store.open(f"sqlite:///{file}") as store, store.engine.connect() as connection:
        asked = ("journal_mode", "busy_timeout", "synchronous", "foreign_keys", "application_id")
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in asked]
    assert values == ["wal", 30000, 1, 1, 0x41664675]


def make_next_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str = "pass") -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(schema.migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / f"{NEXT}_next.py").write_text(REVISION.format(next=NEXT, head=HEAD, more=more))
    monkeypatch.setattr(schema, "migrations_folder", lambda: folder)
    monkeypatch.setattr(schema, "HEAD", NEXT)
    monkeypatch.setattr(autofuse.store.revision, "HEAD", NEXT)


def test_upgrade_keeps_rows_and_makes_a_backup(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: Callable[..., list[Any]]
) -> None:
    with Store.open(url) as store:
        fill(store)
    make_next_revision(monkeypatch, tmp_path)
    assert together(4, open_and_count, url) == [3] * 4  # four at once: one upgrade, one backup
    with Store.open(url) as store:
        assert store.query("SELECT note, reason FROM run")[1] == [(None, "budget")]
        assert len(store.history()) == 3  # a batch migration with foreign keys on would have deleted these
        if url.startswith("sqlite"):
            [backup] = tmp_path.glob(f"results.db.backup-{HEAD}-*")
            with sqlite3.connect(backup) as old:
                assert old.execute("SELECT reason FROM run").fetchall() == [("budget",)]
                assert old.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [(HEAD,)]


def test_an_upgrade_that_breaks_references_changes_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
    make_next_revision(monkeypatch, tmp_path, 'op.execute("DELETE FROM workload")')
    with pytest.raises(StoreError, match="would break references"):
        Store.open(f"sqlite:///{file}")
    with sqlite3.connect(file) as raw:
        assert raw.execute("SELECT count(*) FROM workload").fetchone() == (3,)
        assert raw.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone() == (HEAD,)
        assert raw.execute("SELECT count(*) FROM v_history").fetchone() == (3,)


FROZEN = sorted((Path(__file__).parent / "frozen").glob("*.sql"))


def test_every_revision_has_a_frozen_database() -> None:
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    assert {path.stem for path in FROZEN} == {script.revision for script in scripts.walk_revisions()}


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.stem)
def test_frozen_databases_of_every_revision_still_work(file: Path, frozen: Path) -> None:
    """Each is what `fill` made when its revision was the newest, as a dump; never change one."""
    with sqlite3.connect(file) as raw:
        raw.executescript(frozen.read_text())
    with Store.open(f"sqlite:///{file}") as store:
        assert [(r["number"], r["status"], r["median_us"], r["plan"]) for r in store.history("norm_silu")] == [
            (2, "incorrect", None, "[0+1]"), (1, "ok", 12.0, "[0][1]"), (0, "ok", 7.0, None),
        ]  # fmt: skip
        assert store.best_records(workload().family, DEVICE.uid) == [
            BestRecord(1024, SPLIT.plan, SPLIT.schedules, 12.0, True, OLD, SPLIT.uid, "cold", DEVICE.uid, DEVICE.name)
        ]
        assert store.query("SELECT speedup_vs_eager, speedup_vs_unfused FROM v_speedup")[1] == [(2.0, 1.5)]
        assert store.query("PRAGMA foreign_key_check")[1] == []
        counted = [(r["chain"], r["tier"], r["calls"], r["seconds"], r["sizes"]) for r in store.demand()]
        assert counted == ([] if frozen.stem < "0002" else [("norm_silu", "heuristic", 10, 0.5, {"s0": 4, "s1": 4})])


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.stem)
def test_an_upgrade_keeps_every_row(file: Path, frozen: Path) -> None:
    def contents() -> dict[str, list[Any]]:
        with sqlite3.connect(file) as raw:
            tables = [n for (n,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {n: raw.execute(f"SELECT * FROM {n} ORDER BY 1, 2").fetchall() for n in tables if n != VERSION_TABLE}

    with sqlite3.connect(file) as raw:
        raw.executescript(frozen.read_text())
    before = contents()
    Store.open(f"sqlite:///{file}").close()
    after = contents()
    assert before["trial"] and before.pop("meta")
    assert {n: after[n] for n in before} == before
    assert after["meta"] == [("oldest_reader", "1"), ("oldest_writer", "1"), ("schema", str(SCHEMA))]


def test_the_first_schemas_code_may_go_on_with_this_one(url: str) -> None:
    with Store.open(url) as store:
        meta = dict(store.query("SELECT key, value FROM meta")[1])
    assert (int(meta["oldest_reader"]), int(meta["oldest_writer"]), int(meta["schema"])) == (1, 1, SCHEMA)


def set_meta(url: str, schema_number: int, reader: int, writer: int, revision: str) -> None:
    with Store.open(url) as store, writing(store.engine) as connection:
        for key, value in (("schema", schema_number), ("oldest_reader", reader), ("oldest_writer", writer)):
            connection.execute(text("UPDATE meta SET value = :v WHERE key = :k"), {"v": str(value), "k": key})
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = :r"), {"r": revision})


def test_newer_database_that_nobody_old_may_read(url: str) -> None:
    set_meta(url, 9, 9, 9, "0009")
    for read_only in (True, False):
        with pytest.raises(StoreNewer, match=r"schema 9.*pip install --upgrade autofuse"):
            Store.open(url, read_only=read_only)


def test_newer_database_that_may_be_read_only(url: str) -> None:
    with Store.open(url) as store:
        fill(store)
    set_meta(url, 9, 1, 9, "0009")
    with Store.open(url, read_only=True) as store:
        assert [row["median_us"] for row in store.best()] == [12.0]
    with pytest.raises(StoreNewer, match="read-only"):
        Store.open(url)


def test_newer_database_that_may_be_written(url: str) -> None:
    set_meta(url, 9, 1, 1, "0009")
    with Store.open(url) as store:
        fill(store)
        assert len(store.history()) == 3


def test_unknown_revision_is_newer(url: str) -> None:
    set_meta(url, 1, 1, 1, "0009")
    with pytest.raises(StoreNewer, match="revision 0009"):
        Store.open(url)


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_corrupt_file_is_reported_and_left_alone(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(StoreCorrupt, match=r"results\.db is damaged.*move it aside"):
            Store.open(f"sqlite:///{file}", read_only=read_only)
    assert file.read_bytes() == content
    assert [p.name for p in file.parent.iterdir()] == ["results.db"]


def test_another_programs_file_is_refused(file: Path) -> None:
    with sqlite3.connect(file) as raw:
        raw.execute("PRAGMA application_id = 1234")
        raw.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        Store.open(f"sqlite:///{file}")


def test_a_table_of_our_name_without_our_version_is_left_alone(file: Path) -> None:
    with sqlite3.connect(file) as raw:
        raw.execute("CREATE TABLE run (theirs)")
        raw.execute("INSERT INTO run VALUES ('x')")
    with pytest.raises(StoreError, match="already exists"):
        Store.open(f"sqlite:///{file}")
    with sqlite3.connect(file) as raw:
        assert raw.execute("SELECT * FROM run").fetchall() == [("x",)]
        assert raw.execute("SELECT name FROM sqlite_master").fetchall() == [("run",)]


def test_read_only_needs_a_database(file: Path) -> None:
    with pytest.raises(StoreError, match="no database at"):
        Store.open(f"sqlite:///{file}", read_only=True)
    assert not file.exists()
    file.touch()
    with pytest.raises(StoreError, match="empty or has an older schema"):
        Store.open(f"sqlite:///{file}", read_only=True)


@pytest.mark.parametrize("bad", ["sqlite://", "sqlite:///:memory:", "mysql://host/name", "sqlite:///file:x?uri=true"])
def test_urls_that_cannot_work(bad: str) -> None:
    with pytest.raises(StoreError):
        Store.open(bad)


def test_a_database_that_the_server_does_not_have(url: str) -> None:
    if not url.startswith("postgresql"):
        pytest.skip("SQLite makes a database that is not there")
    with pytest.raises(StoreError, match=r"cannot be reached.*does not exist"):
        Store.open(url.partition("?")[0] + "_not_there")


def test_unreachable_server_does_not_show_the_password() -> None:
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        Store.open("postgresql://me:secret@127.0.0.1:1/none?connect_timeout=2")
    assert "secret" not in str(caught.value)


MOUNTS = """\
/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local\\040disk ext4 rw 0 0
tmpfs /hom tmpfs rw 0 0
"""


def test_network_file_systems_are_told_by_their_mount() -> None:
    assert on_network(Path("/home/me/x.db"), MOUNTS) == "nfs4"
    assert on_network(Path("/home/local disk/x.db"), MOUNTS) is None
    assert on_network(Path("/homely/x.db"), MOUNTS) is None


def test_no_wal_on_a_network_file_system(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autofuse.store.engine, "on_network", lambda path: "nfs4")
    with pytest.warns(UserWarning, match="network file system"), Store.open(f"sqlite:///{file}") as store:
        fill(store)
    with sqlite3.connect(file) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("delete",)
