"""The kernel kinds, in the order in which they are tried. A new kind is one line here."""

from __future__ import annotations

from ..errors import Infeasible
from .base import Kind, Task
from .colreduce import ColReduce
from .pointwise import Pointwise
from .rowreduce import RowReduce

KINDS: tuple[Kind, ...] = (ColReduce(), Pointwise(), RowReduce())
BY_NAME: dict[str, Kind] = {k.name: k for k in KINDS}


def kind_of(task: Task) -> Kind:
    """The kind that makes a segment. Raises Infeasible where none does."""
    for kind in KINDS:
        if kind.match(task):
            return kind
    raise Infeasible("no kernel kind makes this segment")
