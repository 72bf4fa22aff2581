"""What was missed, made again: chains and tensors of the same workload, and the demand that a search meets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import demand, dispatch
from autofuse.chain import Chain, Ref, Value
from autofuse.device import describe
from autofuse.errors import InputError, StoreError
from autofuse.result import Tuned, TuneResult
from autofuse.search.demanded import case_of, index_bounds, strides_of, tune_demand
from autofuse.search.tuner import Tuner
from autofuse.store.records import ChainRecord, DemandRecord
from autofuse.store.store import Store
from autofuse.stored import Stored
from autofuse.trace import trace
from autofuse.traced import sizes_of
from autofuse.workload import layouts_of, workload_of

Args = tuple[torch.Tensor, ...]


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        yield opened


def record(fn: Callable[..., Any], args: Args, calls: int = 1, seconds: float = 1.0) -> DemandRecord:
    """What the dispatcher writes of a call."""
    traced = trace(fn, args)
    sizes = sizes_of(traced, args)
    assert sizes is not None
    work = workload_of(traced.chain, layouts_of(traced.chain, args), sizes)
    chain = ChainRecord(traced.chain.key, fn.__name__, traced.chain.graph)
    return DemandRecord(describe("cpu"), chain, work, "heuristic", calls, seconds, sizes)


def row_of(store: Store, fn: Callable[..., Any], *args: torch.Tensor) -> dict[str, Any]:
    store.add_demand([record(fn, args)])
    [row] = store.demand()
    return row


def norm_act(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(F.rms_norm(x, (x.shape[-1],), weight, 1e-6))


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y * 2


def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, labels, reduction="none")


def hot(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return x - F.one_hot(labels, x.shape[-1])


def masked(x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.where(mask, x * scale, 0.0), x.sum(-1)


def off_by(elements: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = 1
    for n in sizes:
        count *= n
    return torch.randn(count + elements).to(dtype)[elements:].view(sizes)


CASES: dict[str, tuple[Callable[..., Any], Args]] = {
    "contiguous": (norm_act, (torch.randn(6, 64), torch.randn(64))),
    "two row axes": (norm_act, (torch.randn(3, 2, 64), torch.randn(64))),
    "row axes the other way": (norm_act, (torch.randn(2, 3, 64).transpose(0, 1), torch.randn(64))),
    "rows that lie apart": (add, (torch.randn(6, 128)[:, :64], torch.randn(6, 64))),
    "row axes that lie apart": (add, (torch.randn(4, 5, 64)[:, :3], torch.randn(4, 3, 64))),
    "transposed": (add, (torch.randn(64, 6).t(), torch.randn(6, 64))),
    "every second": (add, (torch.randn(6, 128)[:, ::2], torch.randn(6, 64))),
    "every second weight": (norm_act, (torch.randn(6, 64), torch.randn(128)[::2])),
    "expanded columns": (add, (torch.randn(6, 1).expand(6, 64), torch.randn(6, 64))),
    "expanded rows": (add, (torch.randn(1, 64).expand(6, 64), torch.randn(6, 64))),
    "misaligned": (add, (off_by(1, 6, 64), off_by(3, 6, 64, dtype=torch.bfloat16).float())),
    "rows of no multiple": (add, (torch.randn(6, 65), torch.randn(6, 65))),
    "aligned rows of no multiple": (add, (torch.randn(6, 68)[:, :65], torch.randn(6, 65))),
    "one row": (norm_act, (torch.randn(1, 64), torch.randn(64))),
    "images": (lambda x: F.silu(F.group_norm(x, 4)), (torch.randn(2, 8, 5, 7),)),
    "images, channels last": (
        lambda x: x * 2 + 1, (torch.randn(2, 8, 5, 7).contiguous(memory_format=torch.channels_last),),
    ),
    "labels": (loss, (torch.randn(6, 64), torch.randint(0, 64, (6,)))),
    "bools and a number": (masked, (torch.randn(6, 64), torch.rand(6, 64) > 0.5, torch.tensor(2.0))),
    "half": (norm_act, (torch.randn(6, 64).half(), torch.randn(64).half())),
    "fp8": (lambda x: x.float() * 2, (torch.randn(6, 64).to(torch.float8_e4m3fn),)),
    "int8": (lambda x, s: x.float() * s, (torch.randint(-9, 9, (6, 64)).to(torch.int8), torch.randn(6, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_the_workload_and_computes_what_the_function_does(store: Store, name: str) -> None:
    fn, args = CASES[name]
    chain, made = case_of(row_of(store, fn, *args), "cpu", 0)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in args]
    graph = chain.traced(made).chain
    assert layouts_of(graph, made) == layouts_of(graph, args)
    for given in (made, args):
        torch.testing.assert_close(chain(*given), fn(*given), rtol=0, atol=0, equal_nan=True)


def test_labels_are_drawn_from_the_columns_that_they_point_into(store: Store) -> None:
    x, labels = torch.randn(2000, 7), torch.randint(0, 7, (2000,))
    for k, fn in enumerate((loss, hot)):
        store.add_demand([record(fn, (x, labels), seconds=1.0 + k)])
        chain, (_, made) = case_of(store.demand()[0], "cpu", 0)
        assert (chain.name, set(made.tolist())) == (fn.__name__, set(range(7)))


def gathers(op: str, *args: Any) -> Chain:
    """x.gather(1, op(index))."""
    values = [
        Value("input", (), (), ("s0", 9), "float32"), Value("input", (), (), ("s0", 1), "int64"),
        Value(op, (Ref(1), *args), (), ("s0", 1), "int64"),
        Value("aten.gather.default", (Ref(0), 1, Ref(2)), (), ("s0", 1), "float32"),
    ]  # fmt: skip
    return Chain.build(values, [3])


def test_indices_that_are_computed_are_not_guessed() -> None:
    assert index_bounds(gathers("aten.clone.default"), {"s0": 4}) == {1: 9}
    with pytest.raises(InputError, match=r"computed by add.*--arg"):
        index_bounds(gathers("aten.add.Tensor", 8), {"s0": 4})


def test_the_plainest_strides_of_a_layout_are_taken_and_none_where_there_are_none() -> None:
    value = Value("input", (), (), ("s0", 64), "float32")
    assert strides_of(value, (6, 64), "c:1:a") == ((64, 1), 0)
    assert strides_of(value, (6, 64), "c:1:u") == ((64, 1), 4)
    two = Value("input", (), (), ("s0", "s1", 64), "float32")
    assert strides_of(two, (4, 3, 64), "s:1:a") == ((256, 64, 1), 0)  # a slice before rows that change places
    for layout in ("", "q:1:a", "c:7:a", "c:1,1:a", "s:1:a"):
        assert strides_of(value, (6, 64), layout) is None


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("graph", "{}", "cannot be read"), ("graph", "no JSON", "cannot be read"), ("extents", [], "cannot be read"),
        ("dtypes", "[]", "cannot be read"), ("sizes", {}, "cannot be read"),
        ("chain_key", "f" * 32, "not the one that its key names"),
        ("layouts", '["c:1:a"]', "not the one"), ("layouts", '["x", "c:1:a"]', "no tensor of 6x64 with the layout 'x'"),
        ("workload_uid", "f" * 32, "are another workload"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_ours_is_an_input_error(store: Store, column: str, value: Any, told: str) -> None:
    row = row_of(store, norm_act, torch.randn(6, 64), torch.randn(64))
    with pytest.raises(InputError, match=told):
        case_of({**row, column: value}, "cpu", 0)


def test_a_stored_chain_refuses_other_shapes(store: Store) -> None:
    chain, _ = case_of(row_of(store, norm_act, torch.randn(6, 64), torch.randn(64)), "cpu", 0)
    for args in ((torch.randn(6, 64),), (torch.randn(6, 65), torch.randn(64)), (torch.randn(6), torch.randn(64))):
        with pytest.raises(InputError, match=r"norm_act in the store takes \(s0, 64\) float32, \(64\) float32, not "):
            chain(*args)
    torch.testing.assert_close(chain(torch.ones(3, 64), torch.ones(64)), norm_act(torch.ones(3, 64), torch.ones(64)))


# ---- the search


class Search:
    """Stands in for Tuner.tune: notes what it is given, ends in the states that the test wants."""

    def __init__(self, states: dict[int, str]) -> None:
        self.states, self.rows, self.given = states, [], {}  # type: ignore[var-annotated]

    def __call__(self, fn: Stored, cases: Any, *, name: str, **given: Any) -> TuneResult:
        [(x, *_)] = cases
        assert isinstance(fn, Stored) and fn.name == name
        self.given = given
        self.rows.append(len(x))
        state = self.states.get(len(x), "done")
        best = None if state == "failed" else 1.0
        return TuneResult((Tuned(name, "", "cpu", 2.0, 2.0, best, 0.5, "", 1, state, ""),))


Found = tuple[Search, tuple[list[Tuned], bool], list[str]]


def searched(store: Store, monkeypatch: pytest.MonkeyPatch, states: dict[int, str], limit: int = 10) -> Found:
    url, search, notes = store.engine.url.render_as_string(), Search(states), []  # type: ignore[var-annotated]
    with Tuner(url) as tuner:
        monkeypatch.setattr(tuner, "tune", search)
        return search, tune_demand(tuner, "cpu", limit, notes.append, trials=3, seconds=2.0, seed=5, math="exact"), notes


def missed(*rows: int) -> list[DemandRecord]:
    """Of each row count, the first with most time lost."""
    return [record(norm_act, (torch.randn(n, 64), torch.randn(64)), 1, 10.0 - k) for k, n in enumerate(rows)]


def test_most_lost_is_tuned_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_demand(missed(5, 3, 4))
    search, (rows, failed), notes = searched(store, monkeypatch, {}, limit=2)
    assert (search.rows, len(rows), failed, notes) == ([5, 3], 2, False, [])
    assert {k: search.given[k] for k in ("trials", "seconds", "seed", "math", "device")} == {
        "trials": 3, "seconds": 2.0, "seed": 5, "math": "exact", "device": "cpu",
    }  # fmt: skip


def test_a_workload_of_several_tiers_is_tuned_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_demand([*missed(5, 3), *(replace(m, tier="near rows") for m in missed(3, 5))])
    search, _, _ = searched(store, monkeypatch, {})
    assert search.rows == [5, 3]


def test_an_interruption_ends_it_and_a_failure_does_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_demand(missed(5, 3, 4))
    search, (rows, failed), _ = searched(store, monkeypatch, {5: "failed", 3: "interrupted"})
    assert (search.rows, [r.state for r in rows], failed) == ([5, 3], ["failed", "interrupted"], False)


def test_what_cannot_be_made_is_told_by_name_and_the_rest_is_tuned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = missed(5, 3)
    store.add_demand([replace(first, sizes={}), second])
    search, (_, failed), notes = searched(store, monkeypatch, {})
    assert (search.rows, failed) == ([3], True)
    [note] = notes
    assert note.startswith(
        f"autofuse: norm_act at rows 5 ({first.workload.uid}) is left out: its chain in the store cannot be read"
    )


def test_a_store_that_fails_ends_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any, **_named: Any) -> None:
        raise StoreError("the disk is full")

    store.add_demand(missed(5))
    with Tuner(store.engine.url.render_as_string()) as tuner, pytest.raises(StoreError, match="disk is full"):
        monkeypatch.setattr(tuner, "tune", full)
        tune_demand(tuner, "cpu", 10, print)


@pytest.mark.usefixtures("own_store")
def test_calls_that_were_missed_find_what_their_demand_made(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_DEMAND", "1")
    monkeypatch.setattr(demand, "_counters", {})
    monkeypatch.setattr(demand, "_start", lambda: None)
    fused = {"norm": autofuse.fuse(norm_act), "loss": autofuse.fuse(loss)}
    weight = torch.randn(256)
    calls: list[tuple[str, Args]] = [
        ("norm", (torch.randn(4, 5, 256).transpose(0, 1), weight)),
        ("norm", (off_by(1, 64, 256), weight)),
        ("loss", (torch.randn(64, 100), torch.randint(0, 100, (64,)))),
    ]
    for name, args in calls:
        fused[name](*args)
        assert fused[name].explain(*args).tier == "heuristic"
    demand.flush()
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with Tuner(url) as tuner:
        rows, failed = tune_demand(tuner, "cpu", 10, print, trials=2, seconds=20.0)
    assert len(rows) == 3 and not failed
    dispatch.reload()
    for name, args in calls:
        assert fused[name].explain(*args).tier == "exact"
        torch.testing.assert_close(fused[name](*args), fused[name].fn(*args))
    with Store.open(url) as store:
        assert store.demand() == []
        assert {json.dumps(r["layouts"]) for r in store.best()} and len(store.best()) == 3
