"""The databases that a look-up asks: the user's own first, then those that a package or a site ships (AUTOFUSE_LAYERS).

One that cannot be read is a miss with one warning, and the others go on. Nothing is ever written here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import StoreError
from .reader import Reader
from .records import BestRecord, EntryRecord, GraphRecord

RETRY_S = 30.0
"""A database that failed is left alone for so long: each try may wait for a lock, and a call waits with it."""


class _Layer:
    def __init__(self, url: str, named: bool) -> None:
        self.url, self.named = url, named
        self.reader: Reader | None = None
        self.retry_at = 0.0
        self.found: dict[Any, list[Any]] = {}


class Layers:
    """The databases at these URLs, in order of precedence.

    warn: told a cause and a text, for one warning a cause. named: whether somebody named the first, so that its absence
    is worth a warning; each of the others is named by AUTOFUSE_LAYERS.
    """

    def __init__(self, urls: Sequence[str], warn: Callable[[str, str], None], named: bool) -> None:
        self._layers = [_Layer(url, named or k > 0) for k, url in enumerate(dict.fromkeys(urls))]
        self._warn = warn

    def best(self, family: str, device: str, arch: str) -> list[tuple[int, BestRecord]]:
        """What the layers have of a workload family on a device and on others of its architecture, each with the number
        of its layer."""
        asked = ("best", family, device, arch)
        return [(k, found) for k, layer in enumerate(self._layers) for found in self._ask(layer, asked)]

    def entries(self, chain_key: str, name: str, family: str, arch: str) -> list[EntryRecord]:
        """What the layers have of a chain, or of others of its name."""
        asked = ("entries", chain_key, name, family, arch)
        return [found for layer in self._layers for found in self._ask(layer, asked)]

    def graphs(self, name: str) -> list[GraphRecord]:
        """The tuned chains of a name in the layers, each once."""
        asked = ("graphs", name)
        return list(dict.fromkeys(found for layer in self._layers for found in self._ask(layer, asked)))

    def _ask(self, layer: _Layer, asked: tuple[str, ...]) -> list[Any]:
        if asked in layer.found:
            return layer.found[asked]
        if time.monotonic() < layer.retry_at:
            return []
        what = "store" if layer is self._layers[0] else "layer"
        try:
            if layer.reader is None:
                layer.reader = Reader(layer.url)
            found: list[Any] = getattr(layer.reader, asked[0])(*asked[1:])
        except StoreError as error:
            layer.retry_at = time.monotonic() + RETRY_S
            self._warn(f"{what} {layer.url}", f"the {what} is not used: {error}")
            return []
        if not layer.reader.absent:
            layer.found[asked] = found
        elif layer.named:
            remedy = "run `autofuse tune`, or set AUTOFUSE_STORE" if what == "store" else "correct AUTOFUSE_LAYERS"
            self._warn(f"{what} {layer.url}", f"the {what} is not used: {layer.reader.absent}: {remedy}")
        return found
