"""Completions and chats: read, sent on, answered; ended on both sides when the client leaves.

It is the boundary of a request: whatever goes wrong within becomes an answer of OpenAI's form.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..core.clock import Clock
from ..core.errors import CloverError, RequestError
from ..server.door import Door, record_of
from ..server.errors import RETRY_AFTER, error_body, own_path
from .asked import Asked, read
from .dispatch import Dispatcher, Job, PrefillFailedError
from .metrics import OrchestratorMetrics
from .prompts import Encode, hash_prompt
from .router import NoInstanceError, Router, UnknownModelError, Wanted
from .sink import Sink
from .stages import Stages
from .upstream import Answer, AttemptError

log = logging.getLogger(__name__)


@dataclass
class Entry:
    """An ASGI application for the two paths; the front door has read and bounded the body."""

    dispatcher: Dispatcher
    router: Router
    door: Door
    metrics: OrchestratorMetrics
    encode: Encode | None
    passes_key: bool
    """Whether the client's Authorization goes on to instances."""
    clock: Clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stages = Stages(self.clock, self.clock())
        sink = Sink(send)
        outcome = "cancelled"
        self.metrics.inside.inc()
        try:
            outcome = await self._answer(scope, receive, sink, stages)
        finally:
            self.metrics.inside.dec()
            self.metrics.end(outcome, stages)

    async def _answer(self, scope: Scope, receive: Receive, sink: Sink, stages: Stages) -> str:
        """How the request ended, as metrics have it."""
        message = await receive()
        if message["type"] == "http.disconnect":
            return "cancelled"
        work = asyncio.ensure_future(self._work(scope, message, sink, stages))
        gone = asyncio.ensure_future(_gone(receive))
        cut = asyncio.ensure_future(self.door.cut.wait())
        try:
            # Bounded by what the work itself waits for: instances have their timeouts.
            await asyncio.wait({work, gone, cut}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return await work
        finally:
            for task in (work, gone, cut):
                task.cancel()
            await asyncio.gather(work, gone, cut, return_exceptions=True)
        if gone.done() and not gone.cancelled():
            return "cancelled"
        text = "the orchestrator is shutting down"
        await sink.error(503, error_body(text, "service_unavailable", code="draining"))
        return "failed"

    async def _work(self, scope: Scope, message: Message, sink: Sink, stages: Stages) -> str:
        try:
            job = await self._job(scope, message["body"], sink, stages)
            await self.dispatcher.run(job)
            # Only now: what is no name of a model is a client's text, which no log should show.
            record_of(scope).model = job.wanted.model or "-"
        except UnknownModelError as error:
            body = error_body(
                str(error), "invalid_request_error", error.param, code="model_not_found"
            )
            await sink.error(404, body)
        except RequestError as error:
            await sink.error(400, error_body(str(error), "invalid_request_error", error.param))
        except NoInstanceError as error:
            body = error_body(str(error), "service_unavailable", code="no_instance")
            await sink.error(503, body, RETRY_AFTER)
        except (AttemptError, PrefillFailedError) as error:
            return await _failed(sink, error)
        except CloverError as error:
            log.error("%s: %s", own_path(scope), error)
            await sink.error(500, error_body(str(error), "server_error"))
        except Exception:
            log.exception("%s failed", own_path(scope))
            text = "internal error; see the orchestrator's log"
            await sink.error(500, error_body(text, "server_error"))
            return "failed"
        return "ok" if sink.status < 400 else "refused" if sink.status < 500 else "failed"

    async def _job(self, scope: Scope, body: bytes, sink: Sink, stages: Stages) -> Job:
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
            text = "the body must be JSON: send it with the header Content-Type: application/json"
            raise RequestError(text)
        key = headers.get("authorization") if self.passes_key else None
        asked = read(own_path(scope), body, record_of(scope).id, key)
        wanted = Wanted(asked.model, await self._blocks(asked), asked.paired())
        return Job(asked, wanted, sink, stages)

    async def _blocks(self, asked: Asked) -> list[bytes]:
        if not self.router.reads_blocks:
            return []
        if self.encode is None:
            return hash_prompt(asked.fields, None)
        # A long prompt takes a tokenizer milliseconds, in which others' tokens would wait.
        return await asyncio.to_thread(hash_prompt, asked.fields, self.encode)


async def _failed(sink: Sink, error: AttemptError | PrefillFailedError) -> str:
    """Every attempt failed: the client gets what the last instance said, if it said anything."""
    last = error.last if isinstance(error, PrefillFailedError) else error
    if isinstance(last, AttemptError):
        log.warning("%s", last)
    answer = last if isinstance(last, Answer) else last.answer
    if sink.started:
        await sink.broken(f"the answer broke off: {last}")
    elif answer is not None:
        await sink.whole(answer)
    else:
        text = f"every instance that was tried failed, the last one so: {last}"
        body = error_body(text, "service_unavailable", code="instances_failed")
        await sink.error(503, body, RETRY_AFTER)
    return "refused" if sink.status in range(400, 500) else "failed"


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        continue
