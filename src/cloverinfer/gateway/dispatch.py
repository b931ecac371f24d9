"""Sends a request to an instance, or to a pair of them, until one attempt has answered.

Decode is sent first and prefill at once after it: the one's blocks exist when the other starts. A
failed prefill is tried on another instance while decode waits; a failed decode ends both, and a new
pair is tried, as it is where prefill stands still. Whatever ends one side ends the other.
``docs/vllm.md`` has what the two are told.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from ..core.errors import CloverError
from .asked import CHAT, Asked
from .instances import Instance
from .router import Route, Router, Wanted
from .sink import Sink
from .stages import Stages, UsageEvents, amend, fields_of
from .upstream import Answer, Attempt, AttemptError, HungError, Upstream, passed, whole

LATE = 5.0
"""Seconds that a prefill may take to answer after its decode did."""


@dataclass
class Job:
    """A request on its way."""

    asked: Asked
    wanted: Wanted
    sink: Sink
    stages: Stages


class PrefillFailedError(Exception):
    """No prefill instance did its part; ``last`` is what the last one said."""

    def __init__(self, last: AttemptError | Answer) -> None:
        super().__init__(str(last))
        self.last = last


class Dispatcher:
    """One for all requests."""

    def __init__(
        self, router: Router, upstream: Upstream, attempts: int, key: str | None, usage_stages: bool
    ) -> None:
        """``key``: the instances' bearer token; None: the client's header goes on."""
        self._router = router
        self._upstream = upstream
        self._attempts = attempts
        self._authorization = f"Bearer {key}" if key else None
        self._usage_stages = usage_stages
        self._late: set[asyncio.Future[Any]] = set()

    async def run(self, job: Job) -> None:
        """Answers the client, the answer of an instance that refuses the request included.

        Raises ``AttemptError`` where every attempt failed (if the answer has begun, the client has
        not been told), ``PrefillFailedError``, and what ``Router.route`` raises at first.
        """
        tried: list[str] = []
        route = self._router.route(job.wanted)
        while True:
            try:
                await self._attempt(job, route)
                return
            except AttemptError as failure:
                tried.append(failure.url)
                if job.sink.started or len(tried) >= self._attempts:
                    raise
                try:
                    route = self._router.route(job.wanted, tried)
                except CloverError:
                    raise failure from None  # what went wrong says more than that none is left

    async def _attempt(self, job: Job, route: Route) -> None:
        job.stages.sent = job.stages.clock()
        job.stages.prefill_sent = job.stages.prefilled = None
        if route.prefill is None:
            await self._ask(job, route.target, job.asked.body)
            return
        await self._pair(job, route.target, route.prefill)

    async def _pair(self, job: Job, decode: Instance, prefill: Instance) -> None:
        transfer = uuid.uuid4().hex
        claim = {"do_remote_prefill": True, "transfer_id": transfer}
        body = job.asked.with_fields(kv_transfer_params=claim)
        give = {
            "do_remote_decode": True,
            "transfer_id": transfer,
            "decode_address": decode.told.kv_address,
        }
        first = asyncio.ensure_future(self._ask(job, decode, body, paired=True))
        second = asyncio.ensure_future(self._prefill(job, prefill, give))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            # What decode has begun to answer needs its prefill no more.
            if not first.done() and second.exception() is not None and not job.sink.started:
                second.result()
            await first
            if job.sink.status == 200:
                self._let_end(second)
        finally:
            first.cancel()
            if second not in self._late:
                second.cancel()
                # What these raise now concerns nobody: the attempt has ended.
                await asyncio.gather(first, second, return_exceptions=True)

    def _let_end(self, prefill: asyncio.Future[None]) -> None:
        """Decode has answered: prefill did its part, and its own answer is on its way."""
        late = asyncio.ensure_future(asyncio.wait({prefill}, timeout=LATE))
        self._late |= {prefill, late}

        def end(_: object) -> None:
            if not prefill.cancel() and not prefill.cancelled():
                prefill.exception()  # concerns nobody any more
            self._late -= {prefill, late}

        late.add_done_callback(end)

    async def close(self) -> None:
        """Ends what is still waited for."""
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _prefill(self, job: Job, instance: Instance, give: Mapping[str, Any]) -> None:
        """Has the prompt prefilled, by one instance after another until one has done it.

        Raises ``PrefillFailedError``, and ``HungError`` where decode must begin anew too.
        """
        tried: list[str] = []
        while True:
            body = _prompt_only(job.asked, {**give, "attempt": len(tried)})
            job.stages.prefill_sent = job.stages.clock()
            try:
                async with self._upstream.post(
                    instance, job.asked.path, body, self._headers(job.asked)
                ) as (attempt, response):
                    answer = await whole(response)
                    attempt.works()
                if answer.status != 200:
                    raise PrefillFailedError(answer)
                job.stages.prefilled = job.stages.clock()
                return
            except HungError:
                raise  # it may write into decode's blocks once it goes on: a new pair gets others
            except AttemptError as error:
                tried.append(error.url)
                other = self._router.another_prefill(job.wanted, tried)
                if other is None or len(tried) >= self._attempts or job.sink.started:
                    raise PrefillFailedError(error) from error
                instance = other

    async def _ask(self, job: Job, instance: Instance, body: bytes, paired: bool = False) -> None:
        """Has the request answered, and hands the answer on."""
        headers = self._headers(job.asked)
        async with self._upstream.post(instance, job.asked.path, body, headers) as (
            attempt,
            response,
        ):
            if response.content_type == "text/event-stream":
                await self._stream(job, attempt, response)
                return
            answer = await whole(response)
            attempt.works()
        await job.sink.whole(self._told(job, answer, paired))

    async def _stream(self, job: Job, attempt: Attempt, response: aiohttp.ClientResponse) -> None:
        sink = job.sink
        events = UsageEvents(job.stages) if self._amends(job) else None
        async for data in response.content.iter_any():
            if not sink.started:
                attempt.works()
                job.stages.first_piece = job.stages.clock()
                await sink.head(response.status, passed(response))
            await sink.piece(data if events is None else events.feed(data))
        if not sink.started:
            await sink.head(response.status, passed(response))
        if events is not None:
            await sink.piece(events.rest())
        await sink.end()

    def _amends(self, job: Job) -> bool:
        return self._usage_stages and job.asked.include_usage

    def _told(self, job: Job, answer: Answer, paired: bool) -> Answer:
        """A whole answer as the client gets it."""
        fields = fields_of(answer.body) if answer.status == 200 else None
        if fields is None or not (self._usage_stages or paired):
            return answer
        if paired:
            job.stages.transfer = _transfer_seconds(fields)
            # What instances tell each other through here is not the client's.
            fields["kv_transfer_params"] = msgspec.Raw(b"null")
        body = amend(fields, job.stages) if self._usage_stages else msgspec.json.encode(fields)
        return Answer(answer.status, answer.headers, body)

    def _headers(self, asked: Asked) -> dict[str, str]:
        # An id of its own for every attempt: instances refuse one that they are serving already.
        headers = {"X-Request-Id": f"{asked.id[:64]}-{uuid.uuid4().hex[:12]}"}
        authorization = self._authorization or asked.authorization
        return headers if authorization is None else {**headers, "Authorization": authorization}


def _prompt_only(asked: Asked, give: Mapping[str, Any]) -> bytes:
    """The same prompt with one token to make, which is thrown away."""
    chat = {"max_completion_tokens": 1} if asked.path == CHAT else {}
    return asked.with_fields(
        max_tokens=1,
        min_tokens=None,
        stream=False,
        stream_options=None,
        kv_transfer_params=give,
        **chat,
    )


class _Loaded(msgspec.Struct):
    transfer_seconds: float | None = None


def _transfer_seconds(fields: Mapping[str, msgspec.Raw]) -> float | None:
    try:
        loaded = msgspec.json.decode(fields["kv_transfer_params"], type=_Loaded | None)
    except (KeyError, msgspec.MsgspecError, ValueError):
        return None
    return None if loaded is None else loaded.transfer_seconds
