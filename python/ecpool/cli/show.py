"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecpool.cli.pools import Contents, Pool, title
from ecpool.sizes import format_size

_WIDTH = 120  # where the output is no terminal
_STYLES = {"alive": "green", "idle": "cyan", "busy": "yellow", "dead": "red"}


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def show_pools(console: Console, pools: Sequence[Pool]) -> None:
    """One line per pool, and below what could not be looked into."""
    table = _table("pool", "state", "lifetime", "clients", "size", "used", "entries", "hit rate")
    for pool in pools:
        table.add_row(pool.name, _state(pool), pool.lifetime or "?", *_numbers(pool))
    console.print(table)
    for pool in pools:
        if pool.problem is not None:
            console.print(Text(f"{pool.name}: {pool.problem}"))


def show_pool(console: Console, pool: Pool) -> None:
    """Everything about one pool."""
    show_pools(console, [pool])
    console.print(Text(f"file: {pool.path} ({format_size(pool.bytes)})"))
    if pool.contents is not None:
        _show_namespaces(console, pool.contents)
        _show_clients(console, pool.contents)
        _show_counters(console, pool.contents)


def _table(*columns: str, right: Iterable[str] = ("clients", "size", "used", "entries")) -> Table:
    table = Table(title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _state(pool: Pool) -> Text:
    return Text(pool.state, style=_STYLES.get(pool.state, ""))


def _numbers(pool: Pool) -> list[str]:
    contents = pool.contents
    if contents is None:
        return ["", format_size(pool.bytes), "", "", ""]
    used = 100 * contents.used / contents.capacity if contents.capacity else 0
    return [
        str(len(contents.clients)),
        format_size(contents.capacity),
        f"{format_size(contents.used)} ({used:.0f}%)",
        str(contents.sums["entries"]),
        _hit_rate(contents),
    ]


def _hit_rate(contents: Contents) -> str:
    hits, misses = contents.counters.get("hits", 0), contents.counters.get("misses", 0)
    return f"{100 * hits / (hits + misses):.0f}%" if hits + misses else ""


def _show_namespaces(console: Console, contents: Contents) -> None:
    table = _table("namespace", "entries", "used", "flushed")
    for each in contents.namespaces:
        used = format_size(each["blocks"] * contents.block_size)
        name = title(each["name"]) or "(no name)"
        table.add_row(Text(name), str(each["entries"]), used, f"{each['epoch']} times")
    if contents.namespaces:
        console.print(table)


def _show_clients(console: Console, contents: Contents) -> None:
    table = _table("role", "rank", "process", "engine", "since")
    for each in contents.clients:
        since = datetime.fromtimestamp(each["attached_at"]).isoformat(" ", "seconds")
        role = each["role"] if each["live"] else f"{each['role']} (dead)"
        table.add_row(role, str(each["rank"]), str(each["pid"]), Text(each["group"]), since)
    if contents.clients:
        console.print(table)


def _show_counters(console: Console, contents: Contents) -> None:
    table = _table("counted since the pool was made", "", right=("",))
    for name, value in contents.counters.items():
        if value:
            table.add_row(name.replace("_", " "), f"{value:,}")
    if table.row_count:
        console.print(table)
