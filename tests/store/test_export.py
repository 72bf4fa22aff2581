"""A database for shipping: it holds what the runtime looks up and nothing else, and is read where nobody may write."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_samples import (
    CHAIN,
    DEVICE,
    EAGER,
    FUSED,
    NEW,
    NORM,
    OTHER_DEVICE,
    SILU,
    SPLIT,
    begin,
    fill,
    of_config,
    schedule,
    workload,
)  # fmt: skip

from autofuse.errors import InputError, StoreError
from autofuse.store import export as module
from autofuse.store.export import export
from autofuse.store.models import Base
from autofuse.store.reader import Reader
from autofuse.store.records import ChainRecord, ConfigRecord
from autofuse.store.store import Store
from autofuse.store.views import VIEWS

FAMILY = workload().family
OTHER = ChainRecord("f" * 64, "other", '{"nodes":["other"]}')
OTHER_CONFIG = ConfigRecord(OTHER.key, "[0]", (schedule(OTHER, 16), schedule(NORM, 8)))


@pytest.fixture
def filled(url: str) -> Iterator[Store]:
    """Winners of two chains, on two devices and in two environments, and a config that won nothing."""
    store = Store.open(url)
    run = fill(store)
    store.add_trial(run, of_config(ConfigRecord(CHAIN.key, "[0+1]", (schedule(CHAIN, 32),)), 13.0))
    store.set_best(begin(store, 16, NEW), workload(16), FUSED, 3.0, False)
    store.set_best(begin(store, device=OTHER_DEVICE), workload(), EAGER, 40.0, True)
    other = store.begin_run(
        DEVICE, NEW, OTHER, workload(chain=OTHER), protocol="graph", sampler="tpe", seed=1, trials_budget=1, seconds_budget=1.0
    )
    store.set_best(other, workload(chain=OTHER), OTHER_CONFIG, 8.0, True)
    yield store
    store.close()


def rows(path: Path, sql: str) -> list[Any]:
    with sqlite3.connect(path) as raw:
        return sorted(raw.execute(sql).fetchall())


def test_what_it_holds(filled: Store, tmp_path: Path) -> None:
    target = tmp_path / "shipped.db"
    assert export(filled, target) == 4
    reader = Reader(f"sqlite:///{target}")
    for family, device, arch in (
        (FAMILY, DEVICE.uid, OTHER_DEVICE.arch), (FAMILY, OTHER_DEVICE.uid, None), (workload(chain=OTHER).family, DEVICE.uid, None),
    ):  # fmt: skip
        found = reader.best(family, device, arch)
        assert found == filled.best_records(family, device, arch) and found
    assert reader.entries(CHAIN.key, "", FAMILY, "") == filled.entry_records(CHAIN.key, "", FAMILY, "")
    reader.close()
    with Store.open(f"sqlite:///{target}", read_only=True) as shipped:
        assert {(r["chain"], r["median_us"]) for r in shipped.best()} == {(r["chain"], r["median_us"]) for r in filled.best()}
        for view in VIEWS:
            shipped.query(f"SELECT * FROM {view}")
    counts = {name: rows(target, f"SELECT count(*) FROM {name}")[0][0] for name in Base.metadata.tables}
    meta = counts.pop("meta")
    assert meta > 0 and {k: v for k, v in counts.items() if v} == {
        "device": 2, "environment": 2, "chain": 4, "chain_segment": 3, "workload": 3, "schedule": 5, "config": 4,
        "config_schedule": 6, "best": 4,
    }  # fmt: skip
    assert rows(target, "PRAGMA foreign_key_check") == [] and rows(target, "PRAGMA integrity_check") == [("ok",)]
    assert rows(target, "PRAGMA journal_mode") == [("delete",)]
    assert [p.name for p in tmp_path.iterdir() if p.name != "results.db" and "results.db-" not in p.name] == ["shipped.db"]


def test_some_chains_only(filled: Store, tmp_path: Path) -> None:
    target = tmp_path / "shipped.db"
    assert export(filled, target, ["other"]) == 1
    assert rows(target, "SELECT name FROM chain") == [("",), ("other",)]
    assert rows(target, "SELECT name FROM device") == [("H200",)]
    assert rows(target, "SELECT num_warps FROM schedule") == [(8,), (16,)]
    assert rows(target, "PRAGMA foreign_key_check") == []
    assert export(filled, target, ["norm_silu", "other"], force=True) == 4
    with pytest.raises(InputError, match="No chain in the database has the name, id or key prefix 'nope'"):
        export(filled, tmp_path / "new.db", ["nope"])
    assert {NORM.key, SILU.key} <= {uid for (uid,) in rows(target, "SELECT uid FROM chain")}


def test_nothing_to_export_and_files_that_are_there(url: str, tmp_path: Path) -> None:
    target = tmp_path / "shipped.db"
    with Store.open(url) as store:
        begin(store)
        with pytest.raises(InputError, match="has no winners to export: run `autofuse tune` first"):
            export(store, target)
        assert not target.exists()
        fill(store)
        target.write_text("mine")
        with pytest.raises(InputError, match=r"shipped\.db is there already: name another file, or use --force"):
            export(store, target)
        assert target.read_text() == "mine"
        with pytest.raises(StoreError, match="nowhere"):
            export(store, Path("/proc/nowhere/shipped.db"))
        log = tmp_path / "shipped.db-wal"
        log.write_bytes(b"commits")
        with pytest.raises(InputError, match="is in use"):
            export(store, target, force=True)
        log.unlink()
        assert export(store, target, force=True) == 1
        assert Reader(f"sqlite:///{target}").best(FAMILY, DEVICE.uid)[0].config_uid == SPLIT.uid


def test_never_over_the_database_itself(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
        (file.parent / "link.db").symlink_to(file)
        for same in (file, file.parent / "link.db"):
            with pytest.raises(InputError, match="is the database itself"):
                export(store, same, force=True)
        assert len(store.history()) == 3


def test_a_failure_leaves_what_was_there(filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "shipped.db"
    target.write_text("mine")
    before = sorted(p.name for p in tmp_path.iterdir())

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_seal", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        export(filled, target, force=True)
    assert target.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_it_is_read_from_a_folder_that_nobody_may_write(
    file: Path, tmp_path_factory: pytest.TempPathFactory, together: Callable[..., list[Any]]
) -> None:
    folder = tmp_path_factory.mktemp("site")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
        expected = store.best_records(FAMILY, DEVICE.uid)
        export(store, folder / "shipped.db")
    (folder / "shipped.db").chmod(0o444)
    folder.chmod(0o555)

    def read(_number: int) -> tuple[Any, bool]:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        reader = Reader(f"sqlite:///{folder}/shipped.db")
        return reader.best(FAMILY, DEVICE.uid), reader._local.handle.immutable

    try:
        assert together(1, read) == [(expected, True)]
        assert [p.name for p in folder.iterdir()] == ["shipped.db"]
    finally:
        folder.chmod(0o755)
