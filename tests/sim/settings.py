"""One simulated engine, described by a few numbers that all come from one seed."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

HAS_V2 = importlib.util.find_spec("vllm.v1.worker.gpu.ec_connector") is not None
# Newer vLLM keeps the number of embeddings of what it has cached, and turns a request away that
# expects another.
COUNTS_EMBEDDINGS = hasattr(EncoderCacheManager, "get_cached_num_encoder_embeds")
ASKS_RUNNING = hasattr(ECConnectorBase, "take_unavailable_requests")


@dataclass(frozen=True)
class Settings:
    """How the engine is built, how large everything is, and which kinds of trouble come.

    runner: whose order of calls, "v1" or "v2". role: vLLM's. ranks: tensor-parallel workers.
    that may be scheduled before the first has run. completion: the connector's setting. copies:
    "late" (done when the schedule says) or "real" (the real transfer engine, on CPU). blocks: of
    the region. encoder_cache, encoder_budget: of vLLM, in embeddings. token_budget, kv_tokens: of a
    step, of the KV cache. priority: preempt by priority, else last come first. split_items: chunks
    may end within an item. lookahead: tokens that a drafter reads ahead. asks_running:
    `ensure_cache_available` for running requests. names_taken_again: the list of freed keys names
    those that were taken again in the same pass (older vLLM). keys: in the catalogue of items.
    kv_trouble: how often KV blocks are short. chunk: most tokens of a request in a step, 0 for no
    limit. items: most items of a prompt. haste: of devices. The rest switches kinds of trouble on.
    """

    seed: int = 0
    runner: str = "v1"
    role: str = "ec_both"
    ranks: int = 2
    batches: int = 1
    completion: str = "events"
    copies: str = "late"
    blocks: int = 24
    encoder_cache: int = 12
    encoder_budget: int = 10
    token_budget: int = 24
    kv_tokens: int = 120
    priority: bool = False
    split_items: bool = True
    lookahead: int = 0
    asks_running: bool = ASKS_RUNNING
    names_taken_again: bool = False
    keys: int = 14
    stalls: bool = True
    raises: bool = True
    flushes: bool = True
    failing_copies: bool = True
    neighbours: bool = True
    restarts: bool = False
    kv_trouble: float = 0.04
    chunk: int = 0
    items: int = 3
    haste: float = 60.0

    @property
    def consumes(self) -> bool:
        return self.role != "ec_producer"

    @property
    def produces(self) -> bool:
        return self.role != "ec_consumer"

    @property
    def is_gathered(self) -> bool:
        """Whether anybody reads what the encoder makes: not where vLLM only fills the pool."""
        return self.consumes or self.runner == "v2"

    @classmethod
    def draw(cls, seed: int, **fixed: Any) -> Settings:
        """The settings of this seed; ``fixed`` ones are as given, which changes no others."""
        rng = random.Random(f"settings {seed}")
        drawn = cls(
            seed=seed,
            runner=rng.choice(["v1", "v2"]) if HAS_V2 else "v1",
            role=rng.choice(["ec_both"] * 6 + ["ec_producer", "ec_consumer"]),
            ranks=rng.choice([1, 2, 2, 3]),
            batches=rng.choice([1, 2]),
            completion=rng.choice(["events"] * 5 + ["steps"]),
            copies=rng.choice(["late"] * 4 + ["real"]),
            blocks=rng.randrange(6, 60),
            encoder_cache=rng.randrange(8, 20),
            encoder_budget=rng.randrange(8, 16),
            token_budget=rng.randrange(6, 48),
            kv_tokens=rng.randrange(60, 240),
            priority=rng.random() < 0.5,
            split_items=rng.random() < 0.7,
            lookahead=rng.choice([0, 0, 0, 1]),
            asks_running=rng.random() < 0.5,
            names_taken_again=rng.random() < 0.5,
            keys=rng.randrange(6, 24),
            stalls=rng.random() < 0.5,
            raises=rng.random() < 0.5,
            flushes=rng.random() < 0.5,
            failing_copies=rng.random() < 0.5,
            neighbours=rng.random() < 0.5,
            kv_trouble=rng.choice([0.01, 0.04, 0.15]),
            chunk=rng.choice([0, 0, rng.randrange(3, 14)]),
            items=rng.choice([3, 3, 6]),
            haste=rng.choice([60.0, 60.0, 15.0]),
        )
        return replace(drawn, **fixed).consistent()

    def consistent(self) -> Settings:
        """Without combinations that vLLM does not have."""
        # Counting steps needs copies that are over when the step is: it is for pools whose copies
        # are synchronous.
        copies = "real" if self.completion == "steps" else self.copies
        # A step must have room for the longest item.
        if self.split_items:
            return replace(self, copies=copies)
        tokens, chunk = max(self.token_budget, 14), max(self.chunk, 14) if self.chunk else 0
        return replace(self, copies=copies, token_budget=tokens, chunk=chunk)

    def changed(self) -> str:
        """The settings that differ from the defaults, as arguments."""
        default = Settings()
        told = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(default, each.name)
        ]
        return ", ".join(told)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
