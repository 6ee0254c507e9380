"""The command line: what pools this user has, cleaning up, and flushing.

Needs typer and rich, which the extra ``ecpool[cli]`` brings; nothing else of ecpool does.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The program ``ecpool``."""
    try:
        from ecpool.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"ecpool's command line needs {error.name}, which is not installed: "
            "pip install 'ecpool[cli]'"
        )
    app(prog_name="ecpool")
