"""The scheduler half: which requests load from elsewhere, which are sent, and what a step is about.

It sees vLLM's requests and block tables and makes a ``StepPlan`` per step. It touches no memory and
no network; how transfers go is known to it by what the worker half reports.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from ...core.errors import RequestError
from .plan import Loaded, LoadStart, Progress, SendStart, StepPlan
from .settings import Load, Send, wish_of

log = logging.getLogger(__name__)


@dataclass
class _Loading:
    """A request at decode, from its blocks' allocation to its end."""

    transfer: str
    end: int
    start: int
    over: bool = False
    """The worker half has reported it."""
    ended: bool = False
    """The request was aborted before that."""
    computed: int = 0
    """Prompt tokens that this engine computed itself."""
    result: Loaded | None = None


@dataclass
class _Sending:
    """A request at prefill, from its first step to the last byte."""

    wish: Send
    end: int
    finished: bool = False


@dataclass
class SchedulerHalf:
    """``sends`` and ``loads``: what the engine's role allows."""

    block_size: int
    sends: bool
    loads: bool
    _loading: dict[str, _Loading] = field(default_factory=dict)
    _sending: dict[str, _Sending] = field(default_factory=dict)
    _wishes: dict[str, Union[Load, Send, None]] = field(default_factory=dict)
    _plan: StepPlan = field(default_factory=StepPlan)

    def matched(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Prompt tokens beyond ``num_computed`` that come from elsewhere, and whether they are
        waited for. May be asked any number of times."""
        if request.request_id in self._loading or not isinstance(
            self._wish(request.request_id, request.kv_transfer_params), Load
        ):
            return 0, False
        count = request.num_prompt_tokens - num_computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """``blocks``: the request's whole table. Also called when a load has ended: not again."""
        name = request.request_id
        wish = self._wish(name, request.kv_transfer_params)
        if num_external <= 0 or not isinstance(wish, Load) or name in self._loading:
            return
        end = request.num_prompt_tokens
        start = end - num_external
        first, last = start // self.block_size, -(-end // self.block_size)
        self._loading[name] = _Loading(wish.transfer, end, start)
        self._plan.loads.append(
            LoadStart(
                name,
                wish.transfer,
                list(blocks[first:last]),
                start,
                end,
                digest_of(request.prompt_token_ids),
            )
        )

    def build(self, output: Any) -> StepPlan:
        """The plan of a step that was scheduled."""
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._advance(new.req_id, new.num_computed_tokens, counts)
            self._begin(new)
            self._progress(new.req_id, new.block_ids, new.num_computed_tokens, counts)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if name in self._loading or name in self._sending:
                at = cached.num_computed_tokens[i]
                self._advance(name, at, counts)
                anew = _resumed(cached, i)
                self._progress(name, cached.new_block_ids[i] or ([],), at, counts, anew)
        preempted = getattr(output, "preempted_req_ids", None) or ()
        self._plan.preempted += [name for name in preempted if name in self._sending]
        plan, self._plan = self._plan, StepPlan()
        return plan

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks must stay until the worker half reports it, and what the answer
        says."""
        name = request.request_id
        self._wishes.pop(name, None)
        if name in self._sending:
            sending = self._sending[name]
            sending.finished = True
            self._plan.ended.append(name)
            return True, {
                "transfer_id": sending.wish.transfer,
                "attempt": sending.wish.attempt,
                "prompt_tokens": sending.end,
            }
        loading = self._loading.get(name)
        if loading is None:
            return False, None
        loading.ended = True
        if loading.over:
            del self._loading[name]
        else:
            self._plan.ended.append(name)
        return not loading.over, _answer(loading)

    def reported(
        self, sent: Iterable[str], loaded: Iterable[str], results: Mapping[str, Loaded]
    ) -> None:
        """What the worker half said after a step."""
        for name in sent:
            self._sending.pop(name, None)
        for name in loaded:
            loading = self._loading.get(name)
            if loading is not None:
                loading.over = True
                loading.result = results.get(name)
                if loading.ended:
                    del self._loading[name]

    @property
    def pending(self) -> bool:
        """Steps are needed although there may be nothing to compute."""
        return any(sending.finished for sending in self._sending.values())

    # -- steps

    def _wish(self, name: str, params: Any) -> Union[Load, Send, None]:
        """Of a request; what makes no sense is said once, and the engine serves it alone."""
        if name not in self._wishes:
            try:
                wish = wish_of(params)
            except RequestError as problem:
                log.error("request %s is served without its hand-over: %s", name, problem)
                wish = None
            if (isinstance(wish, Load) and not self.loads) or (
                isinstance(wish, Send) and not self.sends
            ):
                log.error("request %s asks for what this engine's kv_role excludes", name)
                wish = None
            self._wishes[name] = wish
        return self._wishes[name]

    def _begin(self, new: Any) -> None:
        if new.sampling_params is None or new.prompt_token_ids is None:
            return
        extra = new.sampling_params.extra_args or {}
        wish = self._wish(new.req_id, extra.get("kv_transfer_params"))
        if not isinstance(wish, Send) or new.req_id in self._sending:
            return
        end = len(new.prompt_token_ids)
        self._sending[new.req_id] = _Sending(wish, end)
        self._plan.sends.append(
            SendStart(
                new.req_id,
                wish.transfer,
                wish.attempt,
                wish.host,
                wish.port,
                end,
                digest_of(new.prompt_token_ids),
            )
        )

    def _progress(
        self,
        name: str,
        block_ids: Sequence[Sequence[int]],
        at: int,
        counts: Mapping[str, int],
        anew: bool = True,
    ) -> None:
        sending = self._sending.get(name)
        if sending is None:
            return
        computed = min(at + counts.get(name, 0), sending.end)
        self._plan.progress.append(Progress(name, list(block_ids[0]), anew, computed))

    def _advance(self, name: str, at: int, counts: Mapping[str, int]) -> None:
        loading = self._loading.get(name)
        if loading is not None:
            upto = min(at + counts.get(name, 0), loading.end)
            loading.computed += max(upto - at, 0)


def digest_of(tokens: Sequence[int] | None) -> int:
    """Of the prompt's tokens; the same on every host. 0 for prompts that are not tokens."""
    return zlib.crc32(np.asarray(tokens, "<i8").tobytes()) if tokens else 0


def _resumed(cached: Any, i: int) -> bool:
    """Whether the row's blocks are all of its table; versions of vLLM say it in two ways."""
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return cached.req_ids[i] in resumed
    return bool(cached.resumed_from_preemption[i])


def _answer(loading: _Loading) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "transfer_id": loading.transfer,
        "computed_prompt_tokens": loading.computed,
    }
    result = loading.result
    if result is not None and result.error:
        answer |= {"loaded_tokens": 0, "error": result.error}
    elif result is not None:
        answer |= {
            "attempt": result.attempt,
            "loaded_tokens": result.tokens,
            "transfer_seconds": result.seconds,
        }
    return answer
