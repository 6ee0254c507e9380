"""The commands.

Exit codes: 0 when it was done, 1 when it could not be (one line on the error output says why), 2
for a command line that makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from ecpool import __version__
from ecpool.cli import pools
from ecpool.cli.show import make_console, show_pool, show_pools
from ecpool.errors import EcpoolError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pools of encoder outputs on this host: look at them, clean up, flush.",
)

Directory = Annotated[
    str | None,
    typer.Option(
        "--directory",
        metavar="DIR",
        help="Where the pools' files are, if not where ecpool puts them by itself.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON.")]


@contextmanager
def _told() -> Iterator[None]:
    """Turns the library's errors into one line and exit code 1."""
    try:
        yield
    except EcpoolError as error:
        typer.echo(f"ecpool: {error}", err=True)
        raise typer.Exit(1) from error


def _say(text: str) -> None:
    typer.echo(text)


def _print_version(wanted: bool) -> None:
    if wanted:
        _say(f"ecpool {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def options(version: Version = False) -> None:
    """What comes before a command."""


@app.command()
def status(
    pool: Annotated[
        str | None, typer.Argument(metavar="[POOL]", help="Everything about this one.")
    ] = None,
    as_json: AsJson = False,
    directory: Directory = None,
) -> None:
    """Show the pools of this user: who uses them, and what is in them."""
    with _told():
        found = [pools.find_pool(pool, directory)] if pool else pools.find_pools(directory)
    if as_json:
        _say(json.dumps({"pools": [each.as_json() for each in found]}, indent=2))
    elif not found:
        _say("there are no pools")
    else:
        console: Console = make_console()
        if pool is None:
            show_pools(console, found)
        else:
            show_pool(console, found[0])


@app.command()
def clean(
    pool: Annotated[
        str | None,
        typer.Option("--pool", metavar="NAME", help="Remove this pool, persistent or not."),
    ] = None,
    dry_run: DryRun = False,
    directory: Directory = None,
) -> None:
    """Remove pools whose users are dead, and what the dead left in the others.

    Persistent pools stay unless they are named, and none goes that somebody uses.
    """
    with _told():
        if pool is not None:
            pools.remove(pool, directory, dry_run=dry_run)
            _say(f"{'would remove' if dry_run else 'removed'} pool {pool}")
            return
        cleaned = pools.clean(directory, dry_run=dry_run)
    _tell_cleaned(cleaned, dry_run=dry_run)
    if cleaned.problems:
        raise typer.Exit(1)


def _tell_cleaned(cleaned: pools.Cleaned, *, dry_run: bool) -> None:
    for name in cleaned.removed:
        _say(f"{'would remove' if dry_run else 'removed'} pool {name}, whose users are dead")
    for name, done in cleaned.reclaimed.items():
        if done.dead:
            _say(f"{name}: {done.dead} dead clients were found, and what they had left taken back")
        if done.waiting:
            _say(
                f"{name}: what {done.waiting} dead clients were writing stays for now: "
                "a process of their engine still runs"
            )
    for name, problem in cleaned.problems.items():
        typer.echo(f"ecpool: {name}: {problem}", err=True)
    if not cleaned.removed and not cleaned.problems and not dry_run:
        _say("no pool of dead users is left")
    elif dry_run and not cleaned.removed:
        _say("nothing would be removed")


@app.command()
def flush(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="The pool.")],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="The beginning of namespaces' names, or the eight characters in brackets at their "
            "end; `ecpool status POOL` lists them.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    dry_run: DryRun = False,
    directory: Directory = None,
) -> None:
    """Forget what a pool holds, in every process that uses it, at once.

    For weights that were changed under the same name: an adapter loaded again, a model updated in
    place. Engines go on; what they need again is encoded again.
    """
    if every == (namespace is not None):
        raise typer.BadParameter("give either --namespace NAME or --all")
    with _told():
        flushed = pools.flush(pool, directory, namespace=namespace, dry_run=dry_run)
    for name, dropped in flushed:
        verb = "would drop" if dry_run else "dropped"
        _say(f"{pools.title(name) or '(no name)'}: {verb} {dropped} entries")
    if not flushed:
        _say(f"pool {pool} has no namespaces yet")
