"""The program inside an `EngineProcess`: holds one vLLM engine and serves requests over a pipe.

    python -m support.engine_driver FILE_DESCRIPTOR

The first message holds the engine's settings; after that each message is the name of a method of
`Driver` with its arguments, answered by `("ok", result)` or `("error", traceback)`. It ends when
the other side closes the pipe, so an engine never outlives its test.
"""

from __future__ import annotations

import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.images import make_image
from support.requests import Outcome, Request, prompt_for


class Driver:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**settings)

    def generate(self, requests: list[Request]) -> list[Outcome]:
        """Hand all requests in at once and wait for all answers, in the order of the requests."""
        from vllm import SamplingParams

        prompts = [self._prompt(request) for request in requests]
        parameters = [
            SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, logprobs=0, ignore_eos=True
            )
            for request in requests
        ]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        return [
            Outcome(
                tokens=tuple(output.outputs[0].token_ids),
                logprob=float(output.outputs[0].cumulative_logprob or 0.0),
                seconds=seconds / len(requests),
            )
            for output in outputs
        ]

    def pool(self) -> dict[str, Any]:
        """What the scheduler's side of ecpool's connector knows (in-process engines).

        `counts` (its own events), `stats` (entries, blocks, holds) and `violations` (broken
        invariants of the index).
        """
        half = self._scheduler().ec_connector.connector_scheduler
        cache = half._cache
        return {"counts": dict(half.counts), "stats": cache.stats(), "violations": cache.check()}

    def stop_in_next_save(self, flag: str) -> None:
        """Let the worker stop for good in its next save, half of whose bytes are then copied
        (in-process engines on a CPU). It makes the file `flag` when it has come so far."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        worker = get_ec_transfer().connector_worker

        def save(items: Any) -> None:
            for item in items:
                content = item.tensor.contiguous().view(-1).numpy()
                worker._region.write(item.extents, content[: len(content) // 2])
            Path(flag).touch()
            while True:
                time.sleep(1)

        worker._engine.save = save

    def hold_next_save(self, flag: str) -> list[int]:
        """See `EncoderProbe.hold_next_save`; the workers' process ids."""
        return list(self._llm.collective_rpc("hold_next_save", args=(flag,)))

    def has_cache_item(self, identifier: str) -> bool:
        """What the connector answers to vLLM's scheduler (in-process engines)."""
        return bool(self._scheduler().ec_connector.has_cache_item(identifier))

    def encoder_cache_size(self) -> int:
        """Embedding rows that vLLM's own encoder cache holds (in-process engines)."""
        return int(self._scheduler().encoder_cache_manager.cache_size)

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    @staticmethod
    def _prompt(request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": prompt_for(request)}
        if request.images:
            images = [
                make_image(image.seed, tokens_high=image.high, tokens_wide=image.wide)
                for image in request.images
            ]
            prompt["multi_modal_data"] = {"image": images}
            if any(image.uuid for image in request.images):
                prompt["multi_modal_uuids"] = {"image": [image.uuid for image in request.images]}
        return prompt


def serve(pipe: Connection) -> None:
    """Build the engine from the first message, then answer until the pipe closes."""
    driver: Driver | None = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if driver is None:
                driver = Driver(arguments)
                result = None
            else:
                result = getattr(driver, name)(*arguments)
        except BaseException:
            answer: tuple[str, Any] = ("error", traceback.format_exc())
        else:
            answer = ("ok", result)
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
