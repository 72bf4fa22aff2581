"""Which config a call gets: match tiers, layers of databases, and what a miss is told. One real search feeds them all."""

from __future__ import annotations

import sqlite3
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import dispatch, settings
from autofuse.device import describe
from autofuse.errors import MissError
from autofuse.miss import nearest
from autofuse.store.reader import Reader
from autofuse.store.records import EntryRecord, EnvironmentRecord, WorkloadRecord
from tests.kernel_cases import right

pytestmark = pytest.mark.usefixtures("own_store")
ROWS, COLS = 512, 1024
ARCH = describe("cpu").arch
TWIN = f"UPDATE device SET uid = '{'7' * 32}', name = 'Twin'"


def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x) + F.softplus(x)


def batch(rows: int = ROWS, cols: int = COLS) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, cols)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("searched") / "tuned.db"
    result = autofuse.tune(gate, [(batch(),)], store=str(path), trials=3, seconds=20, device="cpu")
    assert result.rows[0].plan.startswith("pointwise")  # eager cannot win this one
    return path


Database = Callable[..., str]


@pytest.fixture
def database(searched: Path, tmp_path: Path) -> Database:
    """Makes a database of the search's, changed by SQL; named "store", it is the one that calls ask first."""

    def make(name: str, *changes: str) -> str:
        path = tmp_path / f"{name}.db"
        source, copy = sqlite3.connect(searched), sqlite3.connect(path)
        source.backup(copy)
        copy.execute("PRAGMA foreign_keys=OFF")
        for change in changes:
            copy.execute(change)
        copy.commit()
        copy.execute("PRAGMA journal_mode=DELETE")
        for connection in (source, copy):
            connection.close()
        return str(path)

    return make


# ---- tiers


def test_near_rows_are_bounded(database: Database) -> None:
    database("store")
    fused = autofuse.fuse(gate)
    assert fused.explain(batch()).tier == "exact"
    for rows in (ROWS // 64, ROWS * 2):
        told = fused.explain(batch(rows))
        assert (told.tier, told.tuned_rows, told.differs) == ("near rows", ROWS, ())
    told = fused.explain(batch(ROWS // 64 - 1))
    assert told.tier == "heuristic"
    assert told.differs == (f"rows: 7 here, {ROWS} there, more than 64 times apart",)


def test_near_device_comes_after_near_rows_and_is_checked_at_its_first_call(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database("store", TWIN)
    fused = autofuse.fuse(gate)
    told = fused.explain(batch(100))
    assert (told.tier, told.note) == ("near device", f"tuned at rows {ROWS} on Twin")
    checked: list[str] = []
    original = dispatch._disagreement

    def disagreement(call: Any, inputs: Any) -> str:
        checked.append(call.choice.tier)
        return original(call, inputs)

    monkeypatch.setattr(dispatch, "_disagreement", disagreement)
    right(gate, (batch(100),), fused(batch(100)))
    fused(batch(100))
    assert checked == ["near device"]
    monkeypatch.setenv("AUTOFUSE_LAYERS", database("own", "UPDATE workload SET rows = 64"))
    assert autofuse.fuse(gate).explain(batch()).tier == "near rows"
    assert autofuse.fuse(gate).explain(batch(64)).tier == "exact"


def test_another_architecture_is_no_near_device(database: Database) -> None:
    database("store", TWIN, "UPDATE device SET arch = 'sm_90'", "UPDATE environment SET driver = '570', triton = '3.5'")
    told = autofuse.fuse(gate).explain(batch())
    assert told.tier == "heuristic"
    assert told.differs == (f"device: {ARCH} here, sm_90 there",)


def test_a_wrong_kernel_of_another_device_makes_room_for_the_next_tier(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database("store", TWIN)
    original = dispatch._disagreement
    monkeypatch.setattr(
        dispatch, "_disagreement", lambda call, i: "off by 1" if call.choice.tier == "near device" else original(call, i)
    )
    fused, x = autofuse.fuse(gate), batch(100)
    with pytest.warns(RuntimeWarning, match=r"its near device kernel failed \(off by 1\)"):
        assert torch.equal(fused(x), gate(x))
    assert fused.tiers() == {"eager": 1}
    right(gate, (x,), fused(x))
    assert fused.tiers() == {"eager": 1, "heuristic": 1}
    told = fused.explain(x)
    assert (told.tier, told.note) == ("heuristic", "near device: its kernel failed: off by 1")


# ---- layers


@pytest.mark.parametrize(
    ("store", "layer", "winner"),
    [
        ((), (), 1.0),  # equal: the user's own
        (("UPDATE workload SET rows = 256",), (), 2.0),  # exact before near rows
        (("UPDATE environment SET kernel_source_hash = 'old'",), ("UPDATE best SET verified = 0",), 2.0),  # not the stale one
        (("UPDATE best SET verified = 0",), (), 2.0),
        ((), ("UPDATE best SET verified = 0",), 1.0),
        ((TWIN,), ("UPDATE workload SET rows = 8", "UPDATE environment SET kernel_source_hash = 'old'"), 2.0),
        (("UPDATE workload SET rows = 64",), ("UPDATE workload SET rows = 256",), 2.0),  # the nearer one
    ],
)
def test_a_row_wins_by_tier_then_environment_then_verified_then_layer(
    database: Database, monkeypatch: pytest.MonkeyPatch, store: tuple[str, ...], layer: tuple[str, ...], winner: float
) -> None:
    database("store", *store, "UPDATE best SET median_us = 1.0")
    monkeypatch.setenv("AUTOFUSE_LAYERS", database("layer", *layer, "UPDATE best SET median_us = 2.0"))
    assert autofuse.fuse(gate).explain(batch()).median_us == winner


def test_layers_are_asked_in_order_also_below_a_store_of_ones_own(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second, third = (database(f"layer{n}", f"UPDATE best SET median_us = {n}.0") for n in (2, 3))
    monkeypatch.setenv("AUTOFUSE_LAYERS", f"{third}:sqlite:///{second}")
    with pytest.warns(RuntimeWarning, match="the store is not used: there is no database at .*other.db: run `autofuse tune`"):
        assert autofuse.fuse(gate, store=str(tmp_path / "other.db")).explain(batch()).median_us == 3.0


def test_a_broken_layer_is_one_warning_and_the_others_go_on(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database("store", "DELETE FROM best")
    (tmp_path / "broken.db").write_text("no database at all, of some length\n" * 9)
    monkeypatch.setenv("AUTOFUSE_LAYERS", f"{tmp_path}/broken.db:{tmp_path}/gone.db:{database('good')}")
    fused = autofuse.fuse(gate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [fused.explain(batch(n)).tier for n in (ROWS, 100, 3)] == ["exact", "near rows", "heuristic"]
        assert fused.explain(batch(4, 32)).tier == "heuristic"
    broken, gone = sorted(str(w.message) for w in caught)
    assert broken.startswith(f"the layer is not used: {tmp_path}/broken.db is damaged or no SQLite database")
    assert gone == f"the layer is not used: there is no database at {tmp_path}/gone.db: correct AUTOFUSE_LAYERS"
    assert not (tmp_path / "gone.db").exists()


def test_the_search_path_of_layers() -> None:
    def layers(text: str) -> tuple[str, ...]:
        return settings.read({"AUTOFUSE_STORE": "/a.db", "AUTOFUSE_CACHE": "/c", "AUTOFUSE_LAYERS": text}).layers

    server = "postgresql://me:word@host:5432/name"
    assert layers("") == ()
    assert layers("/b.db:/c d.db::") == ("sqlite:////b.db", "sqlite:////c d.db")
    assert layers(f"sqlite:////b.db:{server}:/c.db") == ("sqlite:////b.db", server, "sqlite:////c.db")
    assert layers(f"x.db:y.db:{server}") == (f"sqlite:///{Path.cwd()}/x.db", f"sqlite:///{Path.cwd()}/y.db", server)


# ---- misses


def test_a_miss_names_the_nearest_entry_field_by_field(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database("store")
    fused = autofuse.fuse(gate)
    told = fused.explain(torch.randn(64, COLS * 2)[:, ::2].bfloat16()[:, 1:])
    name = describe("cpu").name
    assert told.nearest == f"gate: rows {ROWS}, extents {COLS}, float32, on {name}"
    assert told.differs == (
        f"rows: 64 here, {ROWS} there", f"extents: {COLS - 1} here, {COLS} there", "dtypes: bfloat16 here, float32 there",
        "input 0: misaligned here, aligned to 16 bytes there",
    )  # fmt: skip
    assert told.note == "the store has nothing near it: the nearest differs in rows, extents, dtypes, input 0"
    assert str(told).splitlines()[-5:] == [f"  nearest    {told.nearest}", *(f"  differs    {line}" for line in told.differs)]
    turned = fused.explain(batch(COLS, ROWS).t()[:, ::1])
    assert "input 0: strides (n) here, (1) there" in turned.differs
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "error")
    with pytest.raises(MissError, match=rf"the nearest is gate: rows {ROWS}, .*; rows: 8 here, .*; extents: 16 here"):
        autofuse.fuse(gate)(batch(8, 16))


def test_a_miss_of_an_unknown_chain_names_one_of_its_name(database: Database) -> None:
    database("store", "UPDATE environment SET torch = '1.0'")

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3 + 1

    told = autofuse.fuse(other, name="gate").explain(batch())
    assert told.differs[0].startswith("chain: ") and told.differs[0].endswith("there, another function of this name")
    assert told.differs[1:] == (f"environment, torch: {torch.__version__} here, 1.0 there",)
    assert autofuse.fuse(other).explain(batch()).nearest == ""


def test_a_prepared_call_asks_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database("store")
    asked: list[str] = []
    best, entries = Reader.best, Reader.entries

    def count_best(reader: Reader, *given: Any) -> Any:
        asked.append("best")
        return best(reader, *given)

    def count_entries(reader: Reader, *given: Any) -> Any:
        asked.append("entries")
        return entries(reader, *given)

    monkeypatch.setattr(Reader, "best", count_best)
    monkeypatch.setattr(Reader, "entries", count_entries)
    fused = autofuse.fuse(gate)
    for _ in range(3):
        fused(batch(4, 32))
        fused(batch())
    fused(batch(5, 32))
    assert asked == ["best", "best"]
    assert fused.explain(batch(4, 32)).nearest and asked == ["best", "best", "entries"]  # only who asks pays for the answer


HERE = EnvironmentRecord("", "", "2.9", "", "gcc", "3.11", "0.1", "k")


def entry(rows: int = 8, extents: tuple[int, ...] = (64,), arch: str = "a", key: str = "c", layout: str = "c:1:a") -> EntryRecord:
    return EntryRecord("f", WorkloadRecord(key, ("float32",), (layout,), rows, extents), "d", "D", arch, HERE)


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (entry(extents=(8,)), entry(arch="b")),
        (entry(arch="b"), entry(key="other")),
        (entry(rows=10**6), entry(extents=(65,))),
        (entry(extents=(128,)), entry(extents=(16,))),
        (entry(rows=9), entry(rows=4)),
        (entry(extents=(32, 2), arch="a"), entry(arch="b")),
    ],
)
def test_what_is_nearest(near: EntryRecord, far: EntryRecord) -> None:
    for entries in ([near, far], [far, near]):
        assert nearest(entries, entry().workload, "d", "a", HERE) == nearest([near], entry().workload, "d", "a", HERE)


def test_layouts_in_words() -> None:
    found = nearest([entry(layout="s:4:u")], entry().workload, "e", "a", HERE)
    assert found is not None and found.differs == (
        "input 0: leading axes run on here, leading axes lie apart there",
        "input 0: aligned to 16 bytes here, misaligned there", "input 0: strides (1) here, (4) there",
        "device: another of a there, D",
    )  # fmt: skip


# ---- what served how many calls


def test_every_call_is_counted_under_the_tier_that_served_it(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database("store")
    fused = autofuse.fuse(gate)
    assert fused.tiers() == {}
    turned = torch.randn(100 * COLS + 1)[1:].view(100, COLS)  # misaligned: no guard serves it
    for _ in range(4):
        fused(batch())
        for rows in (100, 101):
            fused(x=batch(rows))
        fused(batch(5))
        fused(turned)
    expected = {"exact": 4, "near rows": 8, "heuristic": 8}
    assert fused.tiers() == fused.tiers() == expected
    fused(batch().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        fused(batch())
    autofuse.reload()
    fused(batch(5))
    assert fused.tiers() == {**expected, "heuristic": 9, "eager": 2}
    monkeypatch.setenv("AUTOFUSE_ON_MISS", "eager")
    other = autofuse.fuse(gate)
    for _ in range(3):
        other(batch(5))
    assert other.tiers() == {"eager": 3}


def test_calls_from_many_threads_are_all_counted() -> None:
    fused = autofuse.fuse(gate)
    x, y = batch(4, 32), batch(5, 32)
    fused(x)

    def calls() -> None:
        for _ in range(1000):
            fused(x)
            fused(y)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        fused.tiers()
    for thread in threads:
        thread.join()
    assert fused.tiers() == {"heuristic": 8001}
