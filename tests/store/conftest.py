"""The store's suite runs over SQLite, and over PostgreSQL too if AUTOFUSE_TEST_POSTGRES holds the URL of a database in
which schemas may be made (postgresql://user@host/name)."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofuse.store.store import Store

POSTGRES = os.environ.get("AUTOFUSE_TEST_POSTGRES", "")
Together = Callable[..., list[Any]]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database that is not there yet (of an empty schema, on PostgreSQL)."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'results.db'}"
        return
    if not POSTGRES:
        pytest.skip("AUTOFUSE_TEST_POSTGRES names no PostgreSQL database")
    import psycopg

    name = f"autofuse_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
        yield f"{POSTGRES}?options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite file that is not there yet."""
    return tmp_path / "results.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def _call(work: Callable[..., Any], number: int, args: tuple[Any, ...], gate: Any, results: Any) -> None:
    gate.wait()
    try:
        results.put((number, work(number, *args), None))
    except BaseException as error:
        results.put((number, None, f"{type(error).__name__}: {error}"))


@pytest.fixture
def together() -> Together:
    """Call `work(number, *args)` in `count` processes that start at the same moment; the results in order."""

    def run(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        context = multiprocessing.get_context("fork")
        gate, results = context.Barrier(count), context.Queue()
        processes = [context.Process(target=_call, args=(work, i, args, gate, results)) for i in range(count)]
        for process in processes:
            process.start()
        answers = sorted((results.get(timeout=60) for _ in processes), key=lambda answer: answer[0])
        for process in processes:
            process.join(60)
        assert [error for _, _, error in answers if error] == []
        return [value for _, value, _ in answers]

    return run
