"""Puts the migrations into the wheel. Not by `force-include`, which would copy them into editable installs too, where
the copy would go stale beside the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Migrations(BuildHookInterface):  # type: ignore[type-arg]
    """In a checkout the migrations lie beside the package; installed, inside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"]["migrations"] = "autofuse/migrations"
