"""What aiohttp answers by itself, before any handler of ours: in our form as well."""

from aiohttp import http_exceptions, web

from services.gateway import failures, gauges
from services.gateway.connection_clock import clock_of
from services.gateway.failures import Failure
from shared.logs import get_logger

_log = get_logger("http")


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection; its errors are OpenAI's JSON, not plain text."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Bytes that are no request, or a handler that failed.

        Raises: ConnectionError if an answer has begun: it can only break off.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent")
        if isinstance(exc, http_exceptions.HttpProcessingError):
            return _answer(failures.of_bad_http(exc))
        _log.error("request_failed", exc_info=exc)  # a bug in our middleware
        failure = failures.internal()
        failure.close = True
        return _answer(failure)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, or what aiohttp refused ahead of our middleware (`Expect`).

        What comes after it has been sent, and not before, belongs to the next request.
        """
        if isinstance(resp, web.HTTPException):
            resp = _answer(failures.of_http(resp))
        finished = await super().finish_response(request, resp, start_time)
        clock = clock_of(self.transport)
        if clock is not None and request.content.is_eof():
            clock.request_ended()
        return finished


def _answer(failure: Failure) -> web.Response:
    gauges.REQUESTS_REJECTED.labels(reason=failure.code).inc()
    return failure.response()
