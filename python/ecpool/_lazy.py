"""Names of a package that are imported from their modules only when somebody asks for them."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of ``package``; ``homes`` has each name's module."""
    names = vars(sys.modules[package])

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = names[name] = getattr(importlib.import_module(home), name)
        return value

    return find, lambda: sorted({*names, *homes})
