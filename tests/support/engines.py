"""vLLM engines in processes of their own: started, used and stopped by tests, the demo and the
benches.

Every engine lives in a subprocess, so that its memory is returned and its death is nobody else's.
What it prints goes to a log file, whose end is shown when something fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from support.encoder_probe import PROBE_FILE, EncoderRun, read_probe
from support.images import data_url, make_image
from support.requests import Outcome, Request
from support.tiny_model import REPOSITORY

LOOPBACK = "127.0.0.1"
START_SECONDS = 300
ANSWER_SECONDS = 180
STOP_SECONDS = 30


class EngineError(RuntimeError):
    """The engine failed: the message holds its own error or the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a scenario changes about an engine; the rest is chosen to start fast and to repeat
    exactly.

    vLLM's own encoder cache stands in front of the connector. By default it holds 256 embedding
    rows, which is four pictures of 64, or twice that where vLLM makes room for embeddings that a
    client may send.
    """

    model: Path
    ec_transfer: Mapping[str, Any] | None = None
    in_process: bool = True
    tensor_parallel: int = 1
    data_parallel: int = 1
    batched_tokens: int = 256
    images_per_prompt: int = 4
    prefix_caching: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": "float32",
            "seed": 0,
            "max_model_len": 512,
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": 8,
            "enable_prefix_caching": self.prefix_caching,
            "limit_mm_per_prompt": {"image": self.images_per_prompt, "video": 0},
            "enforce_eager": True,
            "tensor_parallel_size": self.tensor_parallel,
            "worker_extension_cls": "support.encoder_probe.EncoderProbe",
        }
        if self.in_process:
            arguments["distributed_executor_backend"] = "uni"
        if self.ec_transfer is not None:
            arguments["ec_transfer_config"] = dict(self.ec_transfer)
        return arguments | dict(self.extra)

    def variables(self, probe: Path) -> dict[str, str]:
        """Environment variables: those of this process, and what vLLM on a CPU needs."""
        path = os.pathsep.join(
            part for part in (str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")) if part
        )
        variables = {
            **os.environ,
            "PYTHONPATH": path,
            PROBE_FILE: str(probe),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 needs Triton on a device
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.in_process else "1",
            "VLLM_HOST_IP": LOOPBACK,
            "TORCH_COMPILE_DISABLE": "1",  # compiling the sampler takes longer than a test
        }
        if self.tensor_parallel > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(rank) for rank in range(self.tensor_parallel)
            )
        return variables | dict(self.environment)


class _Subprocess:
    """One process group with a log file and a probe file of its own."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.log = directory / "engine.log"
        self.probe = directory / "encoder-runs.jsonl"
        self._process: subprocess.Popen[bytes] | None = None

    def _spawn(self, command: Sequence[str], keep_open: Sequence[int] = ()) -> None:
        self._spawned = time.time()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self.config.variables(self.probe),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(keep_open),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def returncode(self) -> int | None:
        """Its exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def encoder_runs(self) -> list[EncoderRun]:
        """Every run of the encoder so far, in all of the engine's processes."""
        return read_probe(self.probe)

    def encoded(self, since: int = 0, rank: int = 0) -> int:
        """How many items the encoder worked on from run number `since` on, as one tensor-parallel
        rank saw it.
        """
        return sum(len(run.rows) for run in self.encoder_runs()[since:] if run.rank == rank)

    @contextlib.contextmanager
    def counting(self, rank: int = 0) -> Iterator[EncodedItems]:
        """Counts the items that are encoded inside the `with` block."""
        since = len(self.encoder_runs())
        counter = EncodedItems()
        yield counter
        counter.items = self.encoded(since, rank)

    def log_text(self) -> str:
        """All that the engine's processes have printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def failure(self, what: str) -> EngineError:
        return EngineError(f"{what}\n--- end of {self.log} ---\n{self.log_tail()}")

    def kill(self) -> None:
        """Kill the whole process group, at once and without its knowing."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self.config.in_process:
            _remove_channels(since=self._spawned)

    def _wait(self, seconds: float) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@dataclass(slots=True)
class EncodedItems:
    """The result of `counting`, complete when the `with` block has ended."""

    items: int = -1


@dataclass(frozen=True, slots=True)
class PoolReport:
    """See `Driver.pool`."""

    counts: Mapping[str, int]
    stats: Mapping[str, int]
    violations: list[str]


class EngineProcess(_Subprocess):
    """A `vllm.LLM` in a subprocess, driven over a pipe. Use it as a context manager."""

    def __enter__(self) -> Self:
        self._pipe, theirs = Pipe()
        self._spawn(
            [sys.executable, "-m", "support.engine_driver", str(theirs.fileno())],
            keep_open=[theirs.fileno()],
        )
        theirs.close()
        try:
            self._exchange("start", self.config.arguments(), START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers in the order of the requests; all are handed in at once."""
        result: list[Outcome] = self._exchange("generate", (list(requests),))
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        """Any other method of the driver."""
        return self._exchange(name, arguments)

    def pool(self) -> PoolReport:
        """What the pool holds and has done, as the engine's scheduler sees it (in-process
        engines).
        """
        return PoolReport(**self._exchange("pool", ()))

    def close(self) -> None:
        """Let the engine end by itself, and kill whatever is left of it."""
        self._pipe.close()
        self._wait(STOP_SECONDS)
        self.kill()

    def _exchange(self, name: str, arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        try:
            self._pipe.send((name, arguments))
            if not self._pipe.poll(seconds):
                raise self.failure(f"no answer to {name!r} within {seconds} s")
            status, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._wait(STOP_SECONDS)
            raise self.failure(f"the engine died during {name!r} (exit status {code})") from error
        if status == "error":
            # What went wrong in another process is in the log alone.
            raise EngineError(result) if self.config.in_process else self.failure(result)
        return result


class ServerProcess(_Subprocess):
    """vLLM's OpenAI-compatible server on the loopback address. Use it as a context manager."""

    def __enter__(self) -> Self:
        self.port = _free_port()
        self._spawn([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags()])
        try:
            self._wait_until_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def terminate(self) -> int | None:
        """Stop it as an operator does, with SIGTERM; its exit status, or None if it had to be
        killed.
        """
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self._wait(STOP_SECONDS)
        self.kill()
        return code

    def chat(self, request: Request, *, data_parallel_rank: int | None = None) -> Outcome:
        """One chat completion over HTTP; the tokens come back as ids."""
        content: list[dict[str, Any]] = []
        if request.before:
            content.append({"type": "text", "text": request.before})
        content += [
            {
                "type": "image_url",
                "image_url": {
                    "url": data_url(make_image(p.seed, tokens_high=p.high, tokens_wide=p.wide))
                },
            }
            for p in request.images
        ]
        content.append({"type": "text", "text": request.text})
        body = {
            "model": str(self.config.model),
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        headers = {}
        if data_parallel_rank is not None:
            headers["X-data-parallel-rank"] = str(data_parallel_rank)
        started = time.perf_counter()
        answer = self._post("/v1/chat/completions", body, headers)
        seconds = time.perf_counter() - started
        choice = answer["choices"][0]
        logprob = sum(token["logprob"] for token in choice["logprobs"]["content"])
        return Outcome(tuple(choice["token_ids"]), logprob, seconds)

    def metrics(self) -> str:
        """The text of the server's `/metrics`."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
        return text

    @property
    def _url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def _flags(self) -> list[str]:
        flags = ["--host", LOOPBACK, "--port", str(self.port)]
        for name, value in self.config.arguments().items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                flags.append(flag)
            elif value is False:
                flags.append(flag.replace("--", "--no-", 1))
            else:
                flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        if self.config.data_parallel > 1:
            flags += ["--data-parallel-size", str(self.config.data_parallel)]
        return flags

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.returncode() is not None:
                raise self.failure(
                    f"the server ended with status {self.returncode()} before it was ready"
                )
            if self._is_healthy():
                return
            time.sleep(0.25)
        raise self.failure(f"the server was not ready within {START_SECONDS} s")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                result: dict[str, Any] = json.load(answer)
                return result
        except urllib.error.HTTPError as error:
            raise self.failure(f"{path}: HTTP {error.code}: {error.read().decode()}") from error
        except OSError as error:
            raise self.failure(f"{path}: {error}") from error


def ec_transfer(
    role: str = "ec_both", capacity: str | int = "4MiB", **settings: Any
) -> dict[str, Any]:
    """vLLM's `ec_transfer_config` with ecpool's connector; the keywords are ecpool's settings.

    Its `engine_id` is new each time, and the files of that engine's private pool have it in their
    names.
    """
    return {
        "ec_connector": "ECPoolConnector",
        "ec_connector_module_path": "ecpool.vllm",
        "ec_role": role,
        "ec_connector_extra_config": {"capacity": capacity, **settings},
        "engine_id": secrets.token_hex(8),
    }


def pool_files(transfer: Mapping[str, Any]) -> list[str]:
    """What lies in shared memory of the private pools of the engine with these settings."""
    return [str(path) for path in Path("/dev/shm").rglob(f"*{transfer['engine_id']}*")]


def _remove_channels(since: float) -> None:
    """Remove what vLLM's processes leave in shared memory when they are killed.

    since: seconds of the epoch; what is older, or in somebody's memory map, is not ours to remove.
    """
    shared = Path("/dev/shm")
    # Not semaphores: a map shows another name of theirs, so nobody can tell whether one is in use.
    made = [*shared.glob("vllm_dist_*"), *shared.glob("psm_*")]
    with contextlib.suppress(FileNotFoundError):
        young = [path for path in made if path.stat().st_ctime >= since]
        used = [path for path in young if any(str(path) in maps for maps in _memory_maps())]
        for path in set(young).difference(used):
            path.unlink(missing_ok=True)


def _memory_maps() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield maps.read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
