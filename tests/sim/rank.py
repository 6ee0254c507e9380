"""One worker process of the simulated engine:

vLLM's own connector code around the real worker, one encoder cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from sim.content import Content, Variant, Violation
from sim.copies import Device
from sim.scheduler import Read, Step
from sim.settings import Settings


class StepError(Exception):
    """What a step of the model raises, for once."""


class Rank:
    """Runs steps in the order of vLLM's model runners.

    ``connector`` is the real one, in the worker's role.
    """

    def __init__(
        self,
        number: int,
        settings: Settings,
        connector: Any,
        device: Device,
        content: Content,
        rng: random.Random,
    ) -> None:
        self.number = number
        self.settings = settings
        self.connector = connector
        self.device = device
        self.cache: dict[str, torch.Tensor] = {}
        self._content = content
        self._rng = rng
        self.raise_next: str | None = None
        self.trusts = True  # false from an error until everything is made anew
        self.marks: dict[int, int] = {}

    def run(self, step: Step) -> None:
        """One step. Raises StepError where it was told to."""
        for key in step.freed:
            self.cache.pop(key, None)
        raises, self.raise_next = self.raise_next, None
        encoder_only = not self.settings.consumes and self.settings.runner == "v1"
        if self.settings.runner == "v1" and not encoder_only and step.tokens == 0:
            return
        try:
            with self._connector_at_work(step):
                self._encode(step, raises)
                if not encoder_only:
                    self._gather(step)
                if raises is not None:
                    raise StepError(raises)
        finally:
            self.marks[step.number] = self.device.mark

    @contextmanager
    def _connector_at_work(self, step: Step) -> Iterator[None]:
        ec_transfer_state._EC_CONNECTOR_AGENT = self.connector
        try:
            if self.settings.runner == "v1":
                entered: Any = ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
                    step.output, encoder_cache=self.cache
                )
            else:
                from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

                entered = ActiveECConnector(None, self.cache).maybe_get_output(step.output)
            with entered as told:
                yield
            if (told.finished_sending, told.finished_recving) != (None, None):
                raise Violation(f"the worker tells vLLM to wait: {told}")
        finally:
            ec_transfer_state._EC_CONNECTOR_AGENT = None

    def _encode(self, step: Step, raises: str | None) -> None:
        todo = [each for each in step.encoded() if self._is_to_encode(each)]
        stop = self._rng.randrange(len(todo)) if raises == "encoder" and todo else len(todo)
        for number, variant in enumerate(todo):
            if number == stop:
                raise StepError(raises)
            self.cache[variant.key] = self._output(variant)
            if self.settings.runner == "v1":
                ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, variant.key)

    def _is_to_encode(self, variant: Variant) -> bool:
        return self.settings.runner == "v1" or variant.key not in self.cache

    def _output(self, variant: Variant) -> torch.Tensor:
        """An encoder output; its bytes come when the device gets to them."""
        right = self._content.variant(variant)
        if self.settings.copies == "real":
            return right.clone()
        tensor = torch.full(variant.shape, -2.0, dtype=variant.dtype)

        def compute() -> None:
            tensor.copy_(right)

        self.device.compute(compute)
        return tensor

    def _gather(self, step: Step) -> None:
        for read in step.reads.values():
            self._gather_request(step, read)

    def _gather_request(self, step: Step, read: Read) -> None:
        request = read.request
        for index in request.overlapping(read.start, read.end):
            if request.has_rows_in(index, read.start, read.end):
                self._read(step, request.items[index], request.request_id)

    def _read(self, step: Step, variant: Variant, reader: str) -> None:
        where = f"rank {self.number} reads {variant.key} for {reader} in step {step.number}"
        tensor = self.cache.get(variant.key)
        if not self.trusts or variant.key in step.not_encoded:
            return
        if tensor is None:
            raise Violation(f"{where}: encoder cache miss")
        if tuple(tensor.shape) != variant.shape or tensor.dtype != variant.dtype:
            raise Violation(f"{where}: {tuple(tensor.shape)} {tensor.dtype}, not {variant}")
        found = tensor

        def compute() -> None:
            self._content.check(found, variant.key, where)

        if self.settings.copies == "real":
            compute()
        else:
            self.device.compute(compute)
