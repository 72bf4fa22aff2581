"""Which tests run here (`gpu` ones with a CUDA device, `interpret` ones with TRITON_INTERPRET=1), and the store they use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of the test's own, that does not exist yet; what was warned of once may be warned of again."""
    from autofuse import dispatch, lookup

    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setattr(lookup, "_warned", set())
    dispatch.reload()
    yield
    dispatch.reload()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    not_interpreting = pytest.mark.skip(reason="runs with TRITON_INTERPRET=1")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if interpreting or not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(without_gpu)
    for item in items:
        if item.get_closest_marker("interpret") and not interpreting:
            item.add_marker(not_interpreting)
