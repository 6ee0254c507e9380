"""ecpool in vLLM: an encoder-cache connector.

Name it in vLLM's configuration as ``ec_connector="ECPoolConnector"``; where vLLM's plugins are
switched off, add ``ec_connector_module_path="ecpool.vllm"``. Importing this module is cheap: vLLM's
API server does so too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecpool._lazy import lazy

if TYPE_CHECKING:
    from ecpool.vllm.connector import ECPoolConnector
    from ecpool.vllm.scheduler import ECCPUScheduler
    from ecpool.vllm.worker import ECCPUWorker

__all__ = ["ECCPUScheduler", "ECCPUWorker", "ECPoolConnector"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ECPoolConnector": "ecpool.vllm.connector",
        "ECCPUScheduler": "ecpool.vllm.scheduler",
        "ECCPUWorker": "ecpool.vllm.worker",
    },
)
