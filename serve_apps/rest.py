"""The REST side of the endpoint: sessions, their memory and transcripts, and questions about them. No Ray of its own.

Whatever is refused is `{"error": {"code": ..., "message": ...}}` with the status that fits.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray.exceptions import RayActorError

from serve_apps.call import GatewayConfig, Sessions
from serve_apps.fleet import Engines
from serve_apps.limits import MAX_BODY_BYTES, Bucket, WireError
from serve_apps.messages import Failure, View

ANSWER_S = 5.0  # an actor that does not answer by then is shown as far as it is known
BODY_S = 10.0
QUERY_S = 60.0
LONG = ("transcript", "system_prompt")
STATUS = {
    "origin_not_allowed": 403,
    "session_not_found": 404,
    "body_timeout": 408,
    "body_too_large": 413,
    "rate_limited": 429,
    "busy": 503,
    "no_engine": 503,
    "no_row": 503,
    "not_live": 503,
    "engine_failed": 503,
    "api_key_required": 401,
    "invalid_api_key": 401,
}  # anything else is a 400


class Rest:
    """`placement` is a handle (`placement.method.remote(...)`) to a Placement."""

    def __init__(self, placement: Any, sessions: Sessions, engines: Engines, config: GatewayConfig):
        self._placement, self._sessions, self._engines, self._config = placement, sessions, engines, config
        self._questions = Bucket(config.questions_per_s, 2 * config.questions_per_s)

    async def health(self) -> JSONResponse:
        """Needs no key: load balancers have none."""
        loads = await self._engines.loads()
        engines = [{"name": e.name, "rows": e.rows, "free": e.rows_free, "unit_ms": round(e.unit_ms, 2)} for e in loads]
        if not engines:
            return JSONResponse({"status": "no engine", "engines": []}, 503)
        return JSONResponse({"status": "ok", "engines": engines})

    async def models(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        data = [{"id": name, "object": "model", "owned_by": "a2t"} for name in self._config.models]
        return JSONResponse({"object": "list", "data": data})

    async def list_sessions(self, request: Request) -> JSONResponse:
        """Waiting, live and recently closed sessions, without their texts."""
        if refusal := self._refusal(request):
            return refusal
        directory = await self._placement.directory.remote()
        live = await asyncio.gather(*(self._live(s, engine) for s, engine in directory["placed"].items()))
        views = [*directory["queued"], *live, *directory["records"]]
        return JSONResponse({"data": [{k: v for k, v in view.items() if k not in LONG} for view in views]})

    async def show_session(self, session_id: str, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        try:
            return JSONResponse(await self._find(session_id))
        except WireError as problem:
            return refused(problem)

    async def query_session(self, session_id: str, request: Request) -> JSONResponse:
        """`{"question": TEXT}`: answered from the transcript, encoded anew beside the conversation, whose own cache
        stays as it is; after its end, from the record that is kept."""
        if refusal := self._refusal(request):
            return refusal
        try:
            question = _question(await _body(request))
            if not self._questions.take():
                raise WireError("rate_limited", "too many questions at once; ask again in a second")
            view = await self._find(session_id)
            if view["state"] == "queued":
                raise WireError("session_not_found", "this session still waits for a row; it has heard nothing")
            answer = await asyncio.wait_for(self._answer(view, question), QUERY_S)
        except WireError as problem:
            return refused(problem)
        except (TimeoutError, RayActorError):
            return refused(WireError("busy", "the engine could not answer now; ask again"))
        from_record = view["state"] == "closed"
        shown = {"session_id": session_id, "question": question, "answer": answer, "from_record": from_record}
        return JSONResponse(shown)

    async def end_session(self, session_id: str, request: Request) -> Response:
        """Ends a conversation, or takes it out of the line; what is kept of a closed one is forgotten."""
        if refusal := self._refusal(request):
            return refusal
        try:
            view = await self._find(session_id)
        except WireError as problem:
            return refused(problem)
        if view["state"] == "closed":
            await self._placement.forget.remote(session_id)
        elif view["state"] == "queued":
            await self._placement.leave.remote(session_id, None)
        elif (actor := await self._sessions.find(session_id)) is not None:
            with suppress(RayActorError):  # it has ended by itself
                await actor.finish.remote("deleted")
        return Response(status_code=204)

    async def _find(self, session_id: str) -> View:
        """Raises WireError if there is no such session."""
        for last_try in (False, True):  # it may close while it is being looked up
            directory = await self._placement.directory.remote()
            known = {view["id"]: view for view in [*directory["queued"], *directory["records"]]}
            if session_id in directory["placed"]:
                view = await self._live(session_id, directory["placed"][session_id])
                if "units" in view or last_try:
                    return view
            elif session_id in known:
                return known[session_id]
        raise WireError("session_not_found", f"no session {session_id[:64]!r} is known here")

    async def _live(self, session_id: str, engine: str) -> View:
        try:
            actor = await self._sessions.find(session_id)
            if actor is not None:
                view: View = await asyncio.wait_for(actor.view.remote(), ANSWER_S)
                return view
        except (RayActorError, TimeoutError):  # gone, or stuck
            pass
        return {"id": session_id, "state": "live", "engine": engine}

    async def _answer(self, view: View, question: str) -> str:
        """Scratch rows are few: while they are busy the question waits."""
        while True:
            actor = None if view["state"] == "closed" else await self._sessions.find(view["id"])
            if actor is not None:
                answer: str | Failure = await actor.query.remote(question)
            else:
                heard = " ".join(line["transcript"] for line in view.get("transcript", []) if line["transcript"])
                engine = await self._engine()
                answer = await engine.query_record.remote(view.get("system_prompt"), heard, question)
            if not isinstance(answer, Failure):
                return answer
            if answer.code not in ("busy", "not_live"):  # being moved or restored
                raise WireError(answer.code, answer.message)
            await asyncio.sleep(0.2)

    async def _engine(self) -> Any:
        """The one with the most time to spare. Raises WireError without any."""
        loads = await self._engines.loads()
        for load in sorted(loads, key=lambda e: (len(e.sessions) * e.unit_ms, e.name)):
            if (engine := await self._engines.handle(load.name)) is not None:
                return engine
        raise WireError("no_engine", "no engine runs now; ask again when one does")

    def _refusal(self, request: Request) -> JSONResponse | None:
        try:
            self._config.access.check(request.client.host if request.client else None, request.headers)
        except WireError as refusal:
            return refused(refusal)
        return None


def refused(problem: WireError) -> JSONResponse:
    status = STATUS.get(problem.code, 400)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse({"error": {"code": problem.code, "message": problem.message}}, status, headers)


async def _body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES, whatever its Content-Length says."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise WireError("body_too_large", f"send at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise WireError("body_timeout", f"the body did not arrive within {BODY_S:.0f} s") from None
    return body


def _question(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    question = content.get("question") if isinstance(content, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise WireError("invalid_question", 'send {"question": TEXT}')
    return question
