"""Which tests run here: `gpu` ones with a CUDA device, `interpret` ones with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest


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
