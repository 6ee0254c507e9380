"""The class that vLLM loads: each of its methods goes to the half that this process has.

It is the boundary as well: after construction nothing it does raises, whatever happens inside.
Methods that only newer vLLM calls are here for all, and arguments that older or newer vLLM adds are
accepted and left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from ecpool.vllm.boundary import contained
from ecpool.vllm.metadata import ECPoolMetadata

if TYPE_CHECKING:
    import torch

    from ecpool.vllm.scheduler import ECCPUScheduler
    from ecpool.vllm.worker import ECCPUWorker


def _nothing() -> None:
    return None


class ECPoolConnector(ECConnectorBase):
    """Reuses encoder outputs through one pool of host memory.

    Raises InvalidArgumentError (a ValueError) for wrong settings and for engines that a pool cannot
    serve, and NoSpaceError or RegionError (OSErrors) when the host cannot hold the pool.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self.connector_scheduler: ECCPUScheduler | None = None
        self.connector_worker: ECCPUWorker | None = None
        if role == ECConnectorRole.SCHEDULER:
            from ecpool.vllm.scheduler import ECCPUScheduler

            self.connector_scheduler = ECCPUScheduler(vllm_config)
            self.boundary = self.connector_scheduler.boundary
        else:
            from ecpool.vllm.worker import ECCPUWorker

            self.connector_worker = ECCPUWorker(vllm_config)
            self.boundary = self.connector_worker.boundary

    # Worker.

    @contained(_nothing)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self.connector_worker is not None and isinstance(connector_metadata, ECPoolMetadata):
            self.connector_worker.bind(connector_metadata)

    @contained(_nothing)
    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()
        if self.connector_worker is not None:
            self.connector_worker.clear()

    @contained(_nothing)
    def start_save_caches(self, encoder_cache: Any = None, **kwargs: Any) -> None:
        """Before the model runs (vLLM 0.30+, producers)."""
        if self.connector_worker is not None:
            self.connector_worker.start_save_caches(encoder_cache)

    @contained(_nothing)
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Before the model runs (consumers): puts what was promised into ``encoder_cache``."""
        if self.connector_worker is not None:
            self.connector_worker.start_load_caches(encoder_cache)

    @contained(_nothing)
    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str = "", **kwargs: Any
    ) -> None:
        """An item was encoded. Some model runners call this with nothing bound."""
        if self.connector_worker is not None:
            self.connector_worker.save_caches(encoder_cache, mm_hash)

    @contained(lambda: (None, None))
    def get_finished(
        self, finished_req_ids: set[str], **kwargs: Any
    ) -> tuple[set[str] | None, set[str] | None]:
        """The step's work is queued: saves go out. No request ever waits for a transfer."""
        if self.connector_worker is not None:
            self.connector_worker.get_finished()
        return None, None

    def build_connector_worker_meta(self) -> None:
        """Nothing: workers tell the index themselves."""
        return None

    def register_caches(self, ec_caches: Any, **kwargs: Any) -> None:
        """Nothing is to be registered of vLLM's own cache."""

    def start_worker_services(self, **kwargs: Any) -> None:
        """There are none."""

    # Scheduler.

    @contained(lambda: False)
    def has_cache_item(self, identifier: str, **kwargs: Any) -> bool:
        """Whether the pool has the item; True is kept until this step's metadata."""
        return self.connector_scheduler is not None and self.connector_scheduler.has_cache_item(
            identifier
        )

    @contained(lambda: True)
    def ensure_cache_available(
        self, request: Any, num_computed_tokens: int = 0, **kwargs: Any
    ) -> bool:
        """False only for a moment, while another engine encodes what the request needs."""
        return self.connector_scheduler is None or self.connector_scheduler.ensure_cache_available(
            request, num_computed_tokens
        )

    @contained(_nothing)
    def update_state_after_alloc(self, request: Any, index: int, **kwargs: Any) -> None:
        """An item has its place in vLLM's encoder cache."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.update_state_after_alloc(request, index)

    def update_state_after_free(self, request: Any, index: int, **kwargs: Any) -> None:
        """Nothing depends on when a request has read its item."""

    @contained(ECPoolMetadata)
    def build_connector_meta(self, scheduler_output: Any, **kwargs: Any) -> ECPoolMetadata:
        """The step's transfers."""
        if self.connector_scheduler is None:
            return ECPoolMetadata()
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    @contained(_nothing)
    def update_connector_output(self, connector_output: Any, **kwargs: Any) -> None:
        """Nothing is to be learned from it."""

    @contained(lambda: (False, None))
    def request_finished(self, request: Any, **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the release of a request's blocks."""
        if self.connector_scheduler is None:
            return False, None
        return self.connector_scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        """Never: copies need no further steps."""
        return False

    def take_unavailable_requests(self) -> set[str]:
        """None, ever: what the pool lacks is encoded."""
        return set()

    # Both.

    def get_ec_connector_stats(self) -> None:
        """None: the pool's counters are in the region, for every tool to read."""
        return None

    @contained(_nothing)
    def shutdown(self) -> None:
        """Leave the region. Nothing depends on it: a server's ordinary stop does not call it."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
