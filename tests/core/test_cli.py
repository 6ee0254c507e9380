"""The command line, run in this process; the dead are real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from core.helpers import store
from typer.testing import CliRunner

from ecpool import EmbeddingCache, Region
from ecpool.cli.app import app

ENGINE = "some/model bfloat16 vllm 1 [0123abcd]\n{}"

# Opens a region as one engine's client, claims a save in it, and waits to be killed.
VICTIM = """
import sys, time
from ecpool import EmbeddingCache, Region
name, directory, lifetime, role, group, claims = sys.argv[1:]
region = Region.open(name, capacity=1 << 20, block_size=4096, directory=directory,
                     lifetime=lifetime, role=role, group=group)
cache = EmbeddingCache(region=region)
if claims == "claims":
    save = cache.begin_save("half", rows=4, row_bytes=4096)
    cache.claim_saves(0, [(save.id, (4, 4096), "uint8")])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(pools: Path) -> Callable[..., Any]:
    """`run("status", ...)` in the test's directory; the result, after the exit code was checked."""

    def run_one(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--directory", str(pools)])
        assert result.exit_code == code, result.output
        return result

    return run_one


@pytest.fixture
def kill_one(pools: Path) -> Callable[..., None]:
    """Lets a process open a region and die of SIGKILL."""

    def kill(
        name: str,
        lifetime: str = "shared",
        role: str = "pool",
        group: str = "",
        claims: bool = False,
    ) -> None:
        word = "claims" if claims else "-"
        command = [sys.executable, "-c", VICTIM, name, str(pools), lifetime, role, group, word]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "ready\n"
            victim.kill()

    return kill


def names(pools: Path) -> set[str]:
    return {each.name.split(".")[0] for each in pools.glob("*.region")} if pools.exists() else set()


class TestStatus:
    def test_no_pools(self, run: Callable[..., Any]) -> None:
        assert run("status").output == "there are no pools\n"
        assert json.loads(run("status", "--json").output) == {"pools": []}

    def test_what_machines_read(
        self, run: Callable[..., Any], open_region: Callable[..., Region]
    ) -> None:
        region = open_region("host", role="scheduler", group="engine-1", lifetime="persistent")
        cache = EmbeddingCache(region=region, namespace=ENGINE)
        store(cache, "x", rows=3)
        cache.lease("x")
        cache.lease("absent")
        (pool,) = json.loads(run("status", "--json").output)["pools"]
        assert (pool["name"], pool["state"], pool["lifetime"]) == ("host", "alive", "persistent")
        assert pool["problem"] is None
        contents = pool["contents"]
        assert contents["sums"]["ready"] == 1
        assert contents["sums"]["num_blocks"] - contents["sums"]["free_blocks"] == 3
        # This program itself is no client worth telling of.
        assert [each["group"] for each in contents["clients"]] == ["engine-1"]
        assert [(n["name"], n["entries"]) for n in contents["namespaces"]] == [(ENGINE, 1)]
        assert (contents["counters"]["hits"], contents["counters"]["misses"]) == (1, 1)

    def test_what_people_read(
        self, run: Callable[..., Any], open_region: Callable[..., Region]
    ) -> None:
        store(EmbeddingCache(region=open_region("host"), namespace=ENGINE), "x")
        open_region("other")
        overview = run("status").output
        assert "host" in overview
        assert "other" in overview
        assert "1 MiB" in overview
        detail = run("status", "host").output
        assert "some/model bfloat16 vllm 1 [0123abcd]" in detail
        assert "other" not in detail

    def test_looking_changes_nothing(
        self, run: Callable[..., Any], open_region: Callable[..., Region], pools: Path
    ) -> None:
        kept = open_region("kept", lifetime="persistent")
        store(EmbeddingCache(region=kept), "x")
        kept.close()
        for _ in range(3):
            (pool,) = json.loads(run("status", "--json").output)["pools"]
            assert pool["state"] == "idle"
            assert pool["contents"]["sums"]["ready"] == 1
        assert names(pools) == {"kept"}

    def test_dead_and_strange_files(
        self, run: Callable[..., Any], kill_one: Callable[..., None], pools: Path
    ) -> None:
        kill_one("gone")
        (pools / "older.v99.region").touch(mode=0o600)
        (pools / "junk.txt").touch(mode=0o600)
        found = {p["name"]: p for p in json.loads(run("status", "--json").output)["pools"]}
        assert set(found) == {"gone", "older"}
        assert found["gone"]["state"] == "dead"
        assert "another version" in found["older"]["problem"]
        assert "clean" in run("status").output

    def test_an_unknown_pool(
        self, run: Callable[..., Any], open_region: Callable[..., Region]
    ) -> None:
        open_region("host")
        assert "no pool is called 'hots' (there are: host)" in run("status", "hots", code=1).stderr

    def test_a_directory_that_cannot_be_used(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        result = CliRunner().invoke(app, ["status", "--directory", str(file)])
        assert result.exit_code == 1
        assert result.stderr.startswith("ecpool: ")
        assert result.stderr.count("\n") == 1


class TestClean:
    def test_pools_of_the_dead_go_and_others_stay(
        self,
        run: Callable[..., Any],
        kill_one: Callable[..., None],
        open_region: Callable[..., Region],
        pools: Path,
    ) -> None:
        open_region("used")
        kept = open_region("kept", lifetime="persistent")
        kept.close()
        kill_one("gone")
        would = run("clean", "--dry-run").output
        assert "would remove pool gone" in would
        assert names(pools) == {"used", "kept", "gone"}
        assert "removed pool gone" in run("clean").output
        assert names(pools) == {"used", "kept"}
        assert "nothing would be removed" in run("clean", "--dry-run").output

    def test_what_the_dead_were_writing_comes_back(
        self,
        run: Callable[..., Any],
        kill_one: Callable[..., None],
        open_region: Callable[..., Region],
    ) -> None:
        region = open_region("host")
        kill_one("host", claims=True)
        begun = time.monotonic()
        assert "1 dead clients were found" in run("clean").output
        assert time.monotonic() - begun > 2.0, "nobody may have it before the quarantine is over"
        status = region.status()
        assert (status["orphaned"], status["holds"]) == (0, 0)
        assert status["free_blocks"] == status["num_blocks"]

    def test_what_a_living_engine_may_still_write_stays(
        self,
        run: Callable[..., Any],
        kill_one: Callable[..., None],
        open_region: Callable[..., Region],
    ) -> None:
        region = open_region("host", role="worker", group="engine")
        kill_one("host", role="scheduler", group="engine", claims=True)
        assert "a process of their engine still runs" in run("clean").output
        assert region.status()["orphaned"] == 1

    def test_a_persistent_pool_goes_when_it_is_named(
        self, run: Callable[..., Any], open_region: Callable[..., Region], pools: Path
    ) -> None:
        region = open_region("kept", lifetime="persistent")
        assert "1 clients use it" in run("clean", "--pool", "kept", code=1).stderr
        region.close()
        assert "would remove" in run("clean", "--pool", "kept", "--dry-run").output
        assert names(pools) == {"kept"}
        run("clean", "--pool", "kept")
        assert names(pools) == set()
        assert "no pool is called 'kept'" in run("clean", "--pool", "kept", code=1).stderr


class TestFlush:
    def test_every_namespace(
        self, run: Callable[..., Any], open_region: Callable[..., Region]
    ) -> None:
        region = open_region("host")
        caches = [EmbeddingCache(region=region, namespace=each) for each in ("a", "b", "")]
        for cache in caches:
            store(cache, "x")
        run("flush", "host", "--all", "--dry-run")
        assert all(cache.contains("x") for cache in caches)
        assert run("flush", "host", "--all").output.count("dropped 1 entries") == 3
        assert not any(cache.contains("x") for cache in caches)
        store(caches[0], "x")

    @pytest.mark.parametrize("wanted", ["some/model", "0123abcd", ENGINE])
    def test_one_namespace(
        self, run: Callable[..., Any], open_region: Callable[..., Region], wanted: str
    ) -> None:
        region = open_region("host")
        one, other, unnamed = (
            EmbeddingCache(region=region, namespace=each) for each in (ENGINE, "other/model", "")
        )
        for cache in (one, other, unnamed):
            store(cache, "x")
        assert "some/model" in run("flush", "host", "--namespace", wanted).output
        assert [cache.contains("x") for cache in (one, other, unnamed)] == [False, True, True]
        run("flush", "host", "--namespace", "")
        assert [cache.contains("x") for cache in (other, unnamed)] == [True, False]

    def test_mistakes(self, run: Callable[..., Any], open_region: Callable[..., Region]) -> None:
        store(EmbeddingCache(region=open_region("host"), namespace="a"), "x")
        assert "'b' (there are: 'a')" in run("flush", "host", "--namespace", "b", code=1).stderr
        assert "no pool is called" in run("flush", "hots", "--all", code=1).stderr
        run("flush", "host", code=2)
        run("flush", "host", "--all", "--namespace", "a", code=2)

    def test_a_pool_of_dead_users(
        self, run: Callable[..., Any], kill_one: Callable[..., None]
    ) -> None:
        kill_one("gone")
        assert "cannot be flushed" in run("flush", "gone", "--all", code=1).stderr


def test_the_program_and_the_module() -> None:
    for command in (["-m", "ecpool"], ["-c", "from ecpool.cli import main; main()"]):
        done = subprocess.run(
            [sys.executable, *command, "--version"], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.startswith("ecpool ")
        assert done.returncode == 0


def test_without_what_it_needs() -> None:
    code = "import sys; sys.modules['typer'] = None; from ecpool.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ecpool[cli]" in done.stderr
