"""A user's own SQL reads, and does nothing else."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from store_samples import fill

from autofuse.errors import InputError
from autofuse.store.store import Store

WRITES = [
    "INSERT INTO meta VALUES ('x', 'y')", "UPDATE run SET reason = 'x'", "DELETE FROM trial", "DROP TABLE trial",
    "DROP VIEW v_best", "CREATE TABLE x (y INTEGER)", "CREATE TEMP TABLE x (y INTEGER)",
    "ALTER TABLE run ADD x INTEGER",
    "WITH x AS (SELECT 1) DELETE FROM trial", "WITH x AS (SELECT 1) INSERT INTO meta SELECT 'a', 'b'",
    "BEGIN", "COMMIT",
    "VACUUM", "EXPLAIN ANALYZE DELETE FROM trial", "REINDEX",
    "/* SELECT */ DELETE FROM trial", "-- SELECT\nDELETE FROM trial",
]  # fmt: skip
SQLITE_WRITES = [
    "ATTACH DATABASE '{folder}/other.db' AS other", "VACUUM INTO '{folder}/copy.db'", "PRAGMA writable_schema = ON",
    "PRAGMA journal_mode = DELETE", "PRAGMA query_only = OFF", "PRAGMA user_version = 3", "SAVEPOINT x",
    "REPLACE INTO meta VALUES ('schema', '9')", "SELECT load_extension('x')", "ANALYZE",
    "CREATE TRIGGER x AFTER INSERT ON run BEGIN SELECT 1; END", "PRAGMA wal_checkpoint",
]  # fmt: skip
POSTGRES_WRITES = [
    "COPY trial TO PROGRAM 'cat'", "COPY (SELECT 1) TO '/tmp/autofuse_copy'", "SET TRANSACTION READ WRITE",
    "DO $$ BEGIN END $$",
    "SELECT setval('trial_id_seq', 99)", "SELECT * INTO x FROM trial", "TRUNCATE trial CASCADE",
    "GRANT SELECT ON trial TO public",
    "WITH x AS (DELETE FROM trial RETURNING id) SELECT * FROM x",
]  # fmt: skip


def assert_refused(store: Store, sql: str) -> None:
    before = store.query("SELECT count(*), max(reason) FROM trial JOIN run ON run.id = trial.run_id")[1]
    with pytest.raises(InputError):
        store.query(sql)
    assert store.query("SELECT count(*), max(reason) FROM trial JOIN run ON run.id = trial.run_id")[1] == before
    assert store.query("SELECT count(*) FROM meta")[1] == [(3,)]


@pytest.mark.parametrize("sql", WRITES)
def test_writes_are_refused(store: Store, sql: str) -> None:
    fill(store)
    assert_refused(store, sql)


@pytest.mark.parametrize("sql", SQLITE_WRITES)
def test_writes_of_sqlite_are_refused(file: Path, sql: str) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
        assert_refused(store, sql.format(folder=file.parent))
    assert sorted(p.name for p in file.parent.iterdir()) == ["results.db"]
    with sqlite3.connect(file) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_writes_of_postgresql_are_refused(store: Store) -> None:
    if store.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has its own list")
    fill(store)
    for sql in POSTGRES_WRITES:
        assert_refused(store, sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1; SELECT 2",
        "SELECT 1; DELETE FROM trial",
        "SELECT 1; COMMIT; DELETE FROM trial",
        "COMMIT; DELETE FROM trial",
    ],
)
def test_several_statements_are_refused(store: Store, sql: str) -> None:
    fill(store)
    assert_refused(store, sql)
    if sql.startswith("SELECT"):
        with pytest.raises(InputError, match="several statements"):
            store.query(sql)


def test_bad_sql_gets_the_databases_own_message(store: Store) -> None:
    with pytest.raises(InputError, match=r"refused the query: .*(no such column: medain|column \"medain\" does not exist)"):
        store.query("SELECT medain FROM trial")
    with pytest.raises(InputError, match="syntax error"):
        store.query("SELECT FROM WHERE")
    with pytest.raises(InputError, match="NUL"):
        store.query("SELECT 1\0")
    for empty in ("", " ; ", "-- nothing\n"):
        with pytest.raises(InputError, match="empty"):
            store.query(empty)


def test_reading_works(store: Store) -> None:
    fill(store)
    expected = (["status", "n"], [("incorrect", 1), ("ok", 2)])
    sql = "SELECT status, count(*) AS n FROM trial GROUP BY status ORDER BY status"
    assert store.query(sql) == expected
    assert store.query(f"  -- a comment\n{sql} ;\n") == expected
    assert store.query(f"WITH x AS ({sql}) SELECT * FROM x") == expected
    assert store.query("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4) SELECT sum(i) FROM n")[1] == [
        (10,)
    ]
    assert store.query("SELECT message FROM trial WHERE message LIKE 'off%' AND message <> 'a;b'")[1] == [("off by 3 ulp",)]
    assert len(store.query(f"EXPLAIN {sql}")[1]) > 1


def test_pragmas_that_read_work(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        assert [row[1] for row in store.query("PRAGMA table_info(meta)")[1]] == ["key", "value"]
        assert store.query("SELECT name FROM pragma_table_info('meta')")[1] == [("key",), ("value",)]
        fill(store)
        with pytest.raises(InputError, match="malformed JSON"):  # in the query, not in the file
            store.query("SELECT json_extract('{', '$')")
        knobs = "SELECT k.key, k.value FROM schedule s, json_each(s.knobs) k WHERE s.num_warps = 8 ORDER BY k.key"
        assert store.query(knobs)[1] == [("form", "looped"), ("num_warps", 8)]
