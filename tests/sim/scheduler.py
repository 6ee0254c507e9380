"""vLLM's scheduler as the encoder cache and the connector see it: its calls and what it believes.

In front is vLLM's own `EncoderCacheManager`. What is left out has no meaning for them: tokens are
numbers, the KV cache is a count of tokens, and prefix hits and shortages of KV blocks fall from the
sky.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from sim.content import Variant, Violation
from sim.requests import FINISHED, PAUSED, PREEMPTED, RUNNING, WAITING, Request, Turn
from sim.settings import COUNTS_EMBEDDINGS, Settings

MAX_RUNNING = 5


@dataclass
class Read:
    """A request's part of a step: it reads the embeddings of its items between two positions."""

    request: Request
    start: int
    end: int
    times_preempted: int
    samples: bool = False


@dataclass
class Step:
    """What a scheduler hands to its workers, and what the simulator expects of it."""

    number: int
    output: Any = None
    reads: dict[str, Read] = field(default_factory=dict)
    encode: dict[str, list[int]] = field(default_factory=dict)
    promised: list[Variant] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    # What vLLM itself believes to be there and is not: it took the encoding back.
    not_encoded: frozenset[str] = frozenset()
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(each.end - each.start for each in self.reads.values())

    def encoded(self) -> Iterator[Variant]:
        """What the encoder makes: an item that comes without data it leaves out."""
        for request_id, indices in self.encode.items():
            request = self.requests[request_id]
            if request.with_data:
                yield from (request.items[index] for index in indices)


@dataclass
class Plan:
    """What a request would get in this step."""

    tokens: int
    budget: int
    encode: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)


class SimScheduler:
    """Makes steps. ``connector`` is asked and told exactly as vLLM does it."""

    def __init__(self, settings: Settings, connector: Any, rng: random.Random) -> None:
        self.settings = settings
        self.connector = connector
        self.rng = rng
        self.manager = EncoderCacheManager(cache_size=settings.encoder_cache)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.paused: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._kv: Counter[str] = Counter()
        self._finished_ids: set[str] = set()
        self._rows: dict[str, int] = {}
        self._not_encoded: set[str] = set()
        self._number = 0

    # Requests come, go, and grow.

    def add(self, request: Request) -> None:
        request.arrival = self._number
        self.waiting.append(request)

    def live(self) -> list[Request]:
        return [*self.running, *self.waiting, *self.paused]

    def has_requests(self) -> bool:
        """vLLM makes no steps without; a finished one is worth one step more."""
        return bool(self.running or self.waiting or self._finished_ids)

    def finish(self, request: Request) -> None:
        """At its end, or when it is aborted, whatever it is doing."""
        for queue in (self.running, self.waiting, self.paused):
            if request in queue:
                queue.remove(request)
        request.status = FINISHED
        answer = self.connector.request_finished(request)
        if answer[0]:
            raise Violation(f"request_finished of {request.request_id} keeps its blocks: {answer}")
        self.manager.free(request)
        self._kv.pop(request.request_id, None)
        self._finished_ids.add(request.request_id)

    def grow(self, request: Request, turn: Turn) -> None:
        """More input for a streaming request:

        at once if it waits for some, else after its present turn.
        """
        if request.status != PAUSED:
            request.turns.append(turn)
            return
        self.paused.remove(request)
        self._resume(request, turn)

    def _resume(self, request: Request, turn: Turn) -> None:
        request.extend(turn)
        request.status = WAITING
        self.waiting.append(request)

    def reset_encoder_cache(self) -> None:
        self.manager.reset()
        self._not_encoded.clear()
        self._rows.clear()

    # One step.

    def schedule(self) -> Step:
        self._number += 1
        step = Step(self._number)
        self._tokens = self.settings.token_budget
        self._budget = self.settings.encoder_budget
        preempted = self._schedule_running(step)
        if not preempted:
            self._schedule_waiting(step)
        self._repair(step)
        return self._finish_step(step)

    def _schedule_running(self, step: Step) -> bool:
        self._preempted = False
        self._index = 0
        while self._index < len(self.running) and self._tokens > 0:
            request = self.running[self._index]
            if request.outputs + request.num_output_placeholders >= request.max_tokens:
                self._index += 1
                continue
            if self.settings.asks_running and not self._may_run(request):
                self._index += 1
                continue
            plan = self._plan(request, request.num_computed_tokens)
            if plan.tokens == 0:
                self._index += 1
                continue
            if not self._make_kv(step, request, plan.tokens):
                break
            self._index += 1
            self._commit(step, request, plan)
        return self._preempted

    def _make_kv(self, step: Step, request: Request, tokens: int) -> bool:
        """KV blocks for a running request, at others' cost; False if it has to go itself."""
        while not self._allocate_kv(request, tokens):
            victim = self.running[-1]
            if self.settings.priority:
                victim = max(self.running, key=lambda each: (each.priority, each.arrival))
                place = self.running.index(victim)
                self._index -= place < self._index
                self._take_back(step, victim)
            self.running.remove(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _take_back(self, step: Step, victim: Request) -> None:
        """What was planned for it in this step is not done; nobody tells the connector."""
        read = step.reads.pop(victim.request_id, None)
        if read is None:
            return
        self._tokens += read.end - read.start
        for index in step.encode.pop(victim.request_id, []):
            self._budget += victim.items[index].rows
            self._not_encoded.add(victim.items[index].key)
            self.counts["withdrawn"] += 1

    def _preempt(self, request: Request) -> None:
        self._preempted = True
        self.counts["preempted"] += 1
        self._kv.pop(request.request_id, None)
        self.manager.free(request)
        request.status = PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.times_preempted += 1
        self.waiting.appendleft(request)

    def _schedule_waiting(self, step: Step) -> None:
        skipped: list[Request] = []
        while self.waiting and self._tokens > 0 and len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            computed = request.num_computed_tokens or self._prefix_hit(request)
            asks = self.settings.asks_running or request.num_computed_tokens == 0
            if asks and not self._may_run(request):
                skipped.append(self.waiting.popleft())
                continue
            plan = self._plan(request, computed)
            if plan.tokens == 0:
                break
            if not self._allocate_kv(request, computed - request.num_computed_tokens + plan.tokens):
                self.manager.free(request)
                self.counts["no_kv"] += 1
                break
            self.waiting.popleft()
            self.running.append(request)
            request.status = RUNNING
            request.num_computed_tokens = computed
            self._commit(step, request, plan)
        self.waiting.extendleft(reversed(skipped))

    def _prefix_hit(self, request: Request) -> int:
        """Tokens whose KV some other request has left: none, or some, or nearly all."""
        if self.rng.random() < 0.8:
            return 0
        return self.rng.randrange(0, request.num_tokens)

    def _may_run(self, request: Request) -> bool:
        placeholders = request.num_output_placeholders
        if not request.mm_features:
            return True
        available = self.connector.ensure_cache_available(
            request, request.num_computed_tokens - placeholders
        )
        return bool(available)

    def _allocate_kv(self, request: Request, tokens: int) -> bool:
        used = sum(self._kv.values())
        alone = used == self._kv[request.request_id]
        if not alone and self.rng.random() < self.settings.kv_trouble:
            return False
        if used + tokens > self.settings.kv_tokens and not alone:
            return False
        self._kv[request.request_id] += tokens
        return True

    def _commit(self, step: Step, request: Request, plan: Plan) -> None:
        start = request.num_computed_tokens
        end = start + plan.tokens
        self._tokens -= plan.tokens
        step.requests[request.request_id] = request
        step.reads[request.request_id] = Read(request, start, end, request.times_preempted)
        if plan.encode:
            step.encode[request.request_id] = plan.encode
            self._budget = plan.budget
        for index in plan.encode + plan.load:
            self.manager.allocate(request, index)
            item = request.items[index]
            self._rows[item.key] = item.rows
            self._not_encoded.discard(item.key)
            self.connector.update_state_after_alloc(request, index)
        step.promised += [request.items[index] for index in plan.load]
        if COUNTS_EMBEDDINGS:
            for index in plan.repeated:
                self.manager.check_and_update_cache(request, index)

    # Which encoder inputs a request needs in this step.

    def _plan(self, request: Request, computed: int) -> Plan:
        wanted = request.num_tokens + request.num_output_placeholders - computed
        if self.settings.chunk:
            wanted = min(wanted, self.settings.chunk)
        plan = Plan(min(wanted, self._tokens), self._budget)
        if plan.tokens and request.has_encoder_inputs:
            self._plan_inputs(request, computed, plan)
        return plan

    def _plan_inputs(self, request: Request, computed: int, plan: Plan) -> None:
        ahead = self.settings.lookahead
        window = computed + plan.tokens + ahead
        planned: dict[str, int] = {}
        rows = 0
        for index in list(request.overlapping(computed, window)):
            item = request.items[index]
            offset = request.offset(index)
            if COUNTS_EMBEDDINGS and self._must_not_split(plan, computed, offset, item):
                break
            if item.key in planned:
                if planned[item.key] != item.rows:
                    return self._refuse(request, plan)
                plan.repeated.append(index)
                continue
            if self._is_other(item):
                return self._refuse(request, plan)
            if self.manager.check_and_update_cache(request, index):
                continue
            if not COUNTS_EMBEDDINGS and self._must_not_split(plan, computed, offset, item):
                break
            if not self.manager.can_allocate(request, index, plan.budget, rows):
                plan.tokens = max(0, offset - (computed + ahead))
                break
            end = window if COUNTS_EMBEDDINGS else computed + plan.tokens
            if not request.has_rows_in(index, computed, end):
                continue
            planned[item.key] = item.rows
            rows += item.rows
            if self.connector.has_cache_item(item.key):
                plan.load.append(index)
                continue
            plan.budget -= item.rows
            plan.encode.append(index)
        return None

    def _must_not_split(self, plan: Plan, computed: int, offset: int, item: Variant) -> bool:
        if self.settings.split_items or computed >= offset:
            return False
        if computed + plan.tokens >= offset + item.placeholder:
            return False
        plan.tokens = max(0, offset - (computed + self.settings.lookahead))
        return True

    def _is_other(self, item: Variant) -> bool:
        """Whether vLLM's own cache has (or had, until a moment ago) another item under this name.

        Older vLLM does not notice, and reads the wrong one; that is not the connector's doing, so
        it is left out here.
        """
        known = item.key in self.manager.cached or item.key in self.manager.freed
        return known and self._rows.get(item.key, item.rows) != item.rows

    def _refuse(self, request: Request, plan: Plan) -> None:
        self.counts["mismatched"] += 1
        request.mismatched = True
        plan.tokens, plan.encode, plan.load, plan.repeated = 0, [], [], []

    # The end of a step.

    def _repair(self, step: Step) -> None:
        """What vLLM believes to be encoded and is not, it would trip over.

        Here it forgets it as soon as nobody holds it.
        """
        step.not_encoded = frozenset(self._not_encoded)
        for key in list(self._not_encoded):
            if key not in self.manager.cached:
                self._not_encoded.discard(key)
            elif not self.manager.cached[key]:
                self._evict(key)
                self._not_encoded.discard(key)

    def _evict(self, key: str) -> None:
        manager = self.manager
        manager.num_free_slots += manager.freeable.pop(key)
        del manager.cached[key]
        getattr(manager, "num_embeds_by_hash", {}).pop(key, None)
        manager.freed.append(key)

    def _finish_step(self, step: Step) -> Step:
        freed = list(dict.fromkeys(self.manager.freed))
        self.manager.freed = []
        if not self.settings.names_taken_again:
            freed = [key for key in freed if key not in self.manager.cached]
        step.freed = freed
        finished, self._finished_ids = self._finished_ids, set()
        step.output = SimpleNamespace(
            scheduled_encoder_inputs=step.encode,
            total_num_scheduled_tokens=step.tokens,
            free_encoder_mm_hashes=freed,
            finished_req_ids=finished,
        )
        step.output.ec_connector_metadata = self.connector.build_connector_meta(step.output)
        self._advance(step)
        return step

    def _advance(self, step: Step) -> None:
        for read in step.reads.values():
            request = read.request
            request.num_computed_tokens = read.end
            if read.end >= request.num_tokens + request.num_output_placeholders:
                read.samples = True
                request.num_output_placeholders += 1

    def take_output(self, step: Step) -> list[Request]:
        """The step has run everywhere:

        what it read is free, what it sampled is there. Returns who has finished.
        """
        ended = [each for each in self.live() if each.mismatched]
        for read in step.reads.values():
            request = read.request
            if request.finished or request.times_preempted != read.times_preempted:
                continue
            self._free_read(request)
            if read.samples:
                request.num_output_placeholders -= 1
                request.num_tokens += 1
                request.outputs += 1
                if request.outputs >= request.max_tokens and self._has_ended(request):
                    ended.append(request)
        for request in ended:
            if not request.finished:
                self.finish(request)
        return ended

    def _free_read(self, request: Request) -> None:
        read_up_to = request.num_computed_tokens - request.num_output_placeholders
        for index in list(self.manager.get_cached_input_ids(request)):
            end = request.offset(index) + request.items[index].placeholder
            if end + self.settings.lookahead <= read_up_to:
                self.manager.free_encoder_input(request, index)
                if self.settings.asks_running:
                    self.connector.update_state_after_free(request, index)

    def _has_ended(self, request: Request) -> bool:
        """A streaming request goes on with its next turn, or waits for one."""
        if not request.resumable:
            return True
        self.running.remove(request)
        request.num_computed_tokens -= request.num_output_placeholders
        request.num_output_placeholders = 0
        request.times_preempted += 1  # what is under way for it is stale
        if request.turns:
            self._resume(request, request.turns.pop(0))
        else:
            request.status = PAUSED
            self.paused.append(request)
        return False
