"""ecpool in vLLM: an encoder-cache connector.

Name it in vLLM's configuration as ``ec_connector="ECPoolConnector"``; where vLLM's plugins are
switched off, add ``ec_connector_module_path="ecpool.vllm"``. Importing this module is cheap: vLLM's
API server does so too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecpool.vllm.connector import ECPoolConnector
    from ecpool.vllm.scheduler import ECCPUScheduler
    from ecpool.vllm.worker import ECCPUWorker

__all__ = ["ECCPUScheduler", "ECCPUWorker", "ECPoolConnector"]

_HOMES = {
    "ECPoolConnector": "ecpool.vllm.connector",
    "ECCPUScheduler": "ecpool.vllm.scheduler",
    "ECCPUWorker": "ecpool.vllm.worker",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
