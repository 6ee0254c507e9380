"""The settings of a pool, and what it must know of vLLM's configuration."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ecpool.errors import InvalidArgumentError
from ecpool.sizes import parse_size
from ecpool.vllm.log import get_logger

logger = get_logger("config")

EXAMPLE = '{"capacity": "4GiB"}'
PRIVATE_PREFIX = "private-"  # of the names of regions that are not shared
MIN_BLOCK, MAX_BLOCK = 4096, 1 << 30
MAX_SLOTS = 1 << 20
SINGLE_FLIGHT = 0.05  # seconds, by default; the encoder takes longer for all but small pictures
MAX_RANKS = 64  # bits of a transfer's set of ranks


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """``ec_connector_extra_config``, parsed and checked.

    capacity: bytes of the data area. block_size: bytes, a power of two. slots: entries at most,
    None for the region's own choice. completion: who says that a copy is done, its worker
    ("events") or the number of engine steps since ("steps"). populate: fill the memory at start,
    before it is needed: True waits, "background" does not. huge_pages: ask for huge pages, about
    two seconds per GiB. deadline: seconds that one call may wait for the pool's lock. directory:
    where the region's file lies, None for the shared-memory directory. salt: keeps pools of equal
    models apart. log_interval: seconds between two summaries in the log, 0 for none.

    pool: the name under which engines of this host share one region, None for a region of this
    engine's own. persist: the region stays when the last engine leaves. checksum: workers note a
    checksum of each item, and what was stored before a time without engines is compared with it
    when it is first used. single_flight: seconds that a request may be held back for an item which
    another engine is encoding, 0 for none. on_mismatch: what to do if the pool is in use by an
    engine whose encoder outputs are not interchangeable with this one's: "error" refuses to start,
    "separate" keeps the two apart in one region.
    """

    capacity: int
    block_size: int = 16384
    slots: int | None = None
    completion: str = "events"
    populate: bool | str = True
    huge_pages: bool = False
    deadline: float = 0.02
    directory: str | None = None
    salt: str = ""
    log_interval: float = 60.0
    pool: str | None = None
    persist: bool = False
    checksum: bool = False
    single_flight: float = 0.0
    on_mismatch: str = "error"

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> PoolConfig:
        """Check every key and value of a settings table.

        Raises InvalidArgumentError naming the setting, its value and what is allowed.
        """
        for key in settings:
            if key not in _SETTINGS:
                raise InvalidArgumentError(_unknown(key))
        values = {
            _SETTINGS[key].field: _SETTINGS[key].check(key, value)
            for key, value in settings.items()
            if key not in _CAPACITY_NAMES
        }
        _check_sharing(settings, values)
        config = cls(capacity=_capacity(settings), **values)
        if config.capacity < config.block_size:
            raise InvalidArgumentError(
                f"capacity is {config.capacity} bytes; it must be at least one block, "
                f"which is {config.block_size} bytes"
            )
        return config


def _check_sharing(settings: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Refuse settings of shared pools that do not go together; add what follows from the others."""
    if values.get("pool") is None:
        for key in ("persist", "checksum", "single_flight_ms", "on_mismatch"):
            if settings.get(key):
                raise InvalidArgumentError(
                    f"{key} is {settings[key]!r}, which needs a shared pool: give it a name, "
                    'such as "pool": "host"'
                )
        return
    if values.get("completion") == "steps":
        raise InvalidArgumentError(
            "completion is 'steps', which a shared pool cannot have: engines cannot count each "
            "other's steps; leave completion out, or leave pool out"
        )
    if values.get("checksum") and not values.get("persist"):
        raise InvalidArgumentError(
            "checksum is True, which needs persist: nothing of a pool that goes with its last "
            "engine is ever compared"
        )
    values.setdefault("checksum", values.get("persist", False))
    values.setdefault("single_flight", SINGLE_FLIGHT)


_CAPACITY_NAMES = ("capacity", "ec_cpu_bytes")  # the second is what vLLM's own connector calls it


def _capacity(settings: Mapping[str, Any]) -> int:
    given = {
        name: parse_size(settings[name], what=name) for name in _CAPACITY_NAMES if name in settings
    }
    if not given:
        raise InvalidArgumentError(
            "capacity is missing from ec_connector_extra_config; give the pool's size, "
            f"such as {EXAMPLE}"
        )
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name} is {settings[name]!r}" for name in given)
        raise InvalidArgumentError(f"{told}; they mean the same setting, so give only capacity")
    return next(iter(given.values()))


def _unknown(key: str) -> str:
    names = sorted(_SETTINGS)
    near = difflib.get_close_matches(str(key).lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {key!r} in ec_connector_extra_config{hint} (known: {', '.join(names)})"


def _refuse(name: str, value: object, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} is {value!r}; it must be {allowed}")


def _size(name: str, value: object) -> int:
    return parse_size(value, what=name)


def _block_size(name: str, value: object) -> int:
    size = parse_size(value, what=name)
    if size & (size - 1) or not MIN_BLOCK <= size <= MAX_BLOCK:
        raise _refuse(name, value, "a power of two from 4KiB to 1GiB")
    return size


def _slots(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SLOTS:
        raise _refuse(name, value, f"a whole number from 1 to {MAX_SLOTS}")
    return value


def _one_of(*allowed: str | bool) -> Callable[[str, object], Any]:
    def check(name: str, value: object) -> Any:
        # 1 == True in Python, and is not what this setting means.
        for each in allowed:
            if type(each) is type(value) and each == value:
                return value
        raise _refuse(name, value, " or ".join(json.dumps(each) for each in allowed))

    return check


def _number(
    low: float, high: float, *, scale: float = 1.0, unit: str
) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not plain or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
            raise _refuse(name, value, f"a number of {unit} from {low:g} to {high:g}")
        return float(value) * scale  # type: ignore[arg-type]

    return check


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "a text")
    return value


_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def _pool(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and ("/" in value or value.startswith(("~", "."))):
        raise InvalidArgumentError(
            f"{name} is {value!r}, which looks like a path; it must be a name, such as 'host': a "
            "pool lies in the host's shared memory, and pools on a disk are not supported"
        )
    fits = isinstance(value, str) and _POOL_NAME.fullmatch(value) is not None
    if not fits or str(value).startswith(PRIVATE_PREFIX):
        raise _refuse(
            name,
            value,
            "a name of up to 80 letters, digits, '.', '_' and '-', beginning with a letter or "
            f"digit, and not with {PRIVATE_PREFIX!r}",
        )
    return str(value)


def _directory(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise _refuse(name, value, "an absolute path")
    return value


@dataclass(frozen=True, slots=True)
class _Setting:
    field: str
    check: Callable[[str, object], Any]


_SETTINGS: dict[str, _Setting] = {
    "capacity": _Setting("capacity", _size),
    "ec_cpu_bytes": _Setting("capacity", _size),
    "block_size": _Setting("block_size", _block_size),
    "slots": _Setting("slots", _slots),
    "completion": _Setting("completion", _one_of("events", "steps")),
    "populate": _Setting("populate", _one_of(True, False, "background")),
    "huge_pages": _Setting("huge_pages", _one_of(True, False)),
    "deadline_ms": _Setting("deadline", _number(0.1, 10_000, scale=1e-3, unit="milliseconds")),
    "directory": _Setting("directory", _directory),
    "salt": _Setting("salt", _text),
    "log_interval": _Setting("log_interval", _number(0, 86_400, unit="seconds")),
    "pool": _Setting("pool", _pool),
    "persist": _Setting("persist", _one_of(True, False)),
    "checksum": _Setting("checksum", _one_of(True, False)),
    "single_flight_ms": _Setting(
        "single_flight", _number(0, 60_000, scale=1e-3, unit="milliseconds")
    ),
    "on_mismatch": _Setting("on_mismatch", _one_of("error", "separate")),
}


def pool_config(vllm_config: Any) -> PoolConfig:
    """The settings of this engine's pool, after refusing what no pool can serve.

    Raises InvalidArgumentError for a wrong setting and for engines that cannot have a pool; both
    roles call it.
    """
    config = PoolConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config or {})
    check_engine(vllm_config)
    return config


def check_engine(vllm_config: Any) -> None:
    """Refuse engines whose work a host-wide pool cannot serve, saying why.

    Raises InvalidArgumentError.
    """
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        raise InvalidArgumentError(
            "ECPoolConnector cannot serve encoder-decoder models: vLLM does not keep their encoder "
            "outputs between requests, so nothing could be reused; remove ec_transfer_config"
        )
    parallel = vllm_config.parallel_config
    nodes = _nodes(parallel)
    if nodes > 1:
        raise InvalidArgumentError(
            f"ECPoolConnector cannot serve an engine on {nodes} nodes: its pool is memory of one "
            "host, which ranks on another node cannot reach; run every engine (data-parallel rank) "
            "within one node"
        )
    if first_stage_ranks(parallel) > MAX_RANKS:
        raise InvalidArgumentError(
            f"ECPoolConnector serves at most {MAX_RANKS} ranks in a pipeline stage, "
            f"but this engine has {first_stage_ranks(parallel)}"
        )
    if _is_external_launcher(parallel) and world_size(parallel) > 1:
        raise InvalidArgumentError(
            "ECPoolConnector cannot serve several ranks of "
            "distributed_executor_backend='external_launcher': each has a scheduler of its own, "
            "all of which must decide alike, and a pool's answers depend on time"
        )


def first_stage_ranks(parallel_config: Any) -> int:
    """Ranks of the first pipeline stage, which are those that load; they are numbered from 0."""
    return int(parallel_config.tensor_parallel_size) * int(
        getattr(parallel_config, "prefill_context_parallel_size", 1)
    )


def world_size(parallel_config: Any) -> int:
    """Worker processes of one engine (one data-parallel rank)."""
    return first_stage_ranks(parallel_config) * int(
        getattr(parallel_config, "pipeline_parallel_size", 1)
    )


def _is_external_launcher(parallel_config: Any) -> bool:
    return getattr(parallel_config, "distributed_executor_backend", None) == "external_launcher"


def _nodes(parallel_config: Any) -> int:
    """Nodes that one engine spans, as far as its configuration tells."""
    told = getattr(parallel_config, "nnodes_within_dp", None)
    if told is None:
        told = getattr(parallel_config, "nnodes", 1)
    return max(int(told or 1), _ray_nodes(getattr(parallel_config, "placement_group", None)))


def _ray_nodes(placement_group: Any) -> int:
    if placement_group is None:
        return 1
    try:
        table = importlib.import_module("ray.util").placement_group_table(placement_group)
        return len(set(table["bundles_to_node_id"].values()))
    except Exception as error:
        logger.debug("ecpool: the nodes of the placement group are not known: %r", error)
        return 1


def keys_are_per_request(vllm_config: Any) -> bool:
    """Whether vLLM names items by request rather than by content, unless the client names them."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    cache_gb = getattr(multimodal, "mm_processor_cache_gb", None)
    cache = getattr(vllm_config, "cache_config", None)
    return cache_gb == 0 and not getattr(cache, "enable_prefix_caching", True)


PER_REQUEST_ADVICE = (
    "ecpool: the multimodal processor cache and prefix caching are both off, so vLLM gives every "
    "item a name of its own and nothing can be reused, except items that clients name by a uuid. "
    "Set mm_processor_cache_gb (vLLM's --mm-processor-cache-gb) above 0, or switch prefix "
    "caching on"
)
