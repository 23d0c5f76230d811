"""HTTP errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import http_exceptions, web

from shared.errors import ErrorCode, RequestError
from shared.messages import Finished, Refused

RETRY_AFTER_S: Final = 5
CLIENT_GONE: Final = 499  # nginx's number; only in logs and metrics

_LONGEST_WAIT_S: Final = 3600
_NO_STORY: Final = "the model failed on this request"
_STATUS: Final = {
    ErrorCode.INVALID: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.CONTEXT_LENGTH: 400,
    ErrorCode.NEVER_FITS: 400,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.DEADLINE: 408,
    ErrorCode.PREFIX_BUDGET: 400,
    ErrorCode.UNKNOWN_PREFIX: 404,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNKNOWN_REQUEST: 404,
    ErrorCode.UNKNOWN_STREAM: 404,
    ErrorCode.MOVED: 409,
    ErrorCode.DRAINING: 503,
    ErrorCode.INTERNAL: 500,
}


class Failure(Exception):
    """An answer that is an error. `code` is also the reason in metrics and logs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.close = close

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of the answer, or of an event in a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> web.Response:
        """The answer of a request that has not begun to stream."""
        response = web.Response(
            status=self.status,
            text=json.dumps(self.fields, ensure_ascii=False),
            content_type="application/json",
            headers=self.headers,
        )
        if self.close:
            response.force_close()
        return response


def deadline_passed(deadline_s: float, why: str) -> Failure:
    """The client's own deadline passed before its answer was whole."""
    return _with_headers(ErrorCode.DEADLINE, f"deadline_s of {deadline_s:g} s passed {why}")


def of_request_error(error: RequestError) -> Failure:
    """A field the client must change."""
    return Failure(_STATUS[error.code], error.message, error.code.value, error.param)


def of_refusal(refused: Refused) -> Failure:
    """The scheduler did not take the request, or gave it up."""
    return _with_headers(refused.code, refused.message, refused.param, refused.retry_after_s)


def of_finish(finished: Finished) -> Failure:
    """The scheduler took the request, and it ended with an error."""
    return _with_headers(finished.code or ErrorCode.INTERNAL, finished.error or _NO_STORY)


def _with_headers(
    code: ErrorCode, message: str, param: str | None = None, retry_after_s: float | None = None
) -> Failure:
    """What tells a client, by status and headers, whether another try is worth it, and when."""
    headers, status = {}, _STATUS[code]
    if status == 400 and retry_after_s is not None:
        status = 429  # the request is right, only not now; clients try a 400 never again
    if status in (429, 503) or retry_after_s is not None:
        wait_s = RETRY_AFTER_S if retry_after_s is None else retry_after_s
        if not 1 <= wait_s <= _LONGEST_WAIT_S:  # nor is NaN
            wait_s = _LONGEST_WAIT_S if wait_s > _LONGEST_WAIT_S else 1
        headers["Retry-After"] = str(round(wait_s))
    if code is ErrorCode.DEADLINE:
        headers["x-should-retry"] = "false"  # OpenAI's clients ask again after any other 408
    return Failure(status, message, code.value, param, headers=headers)


def unavailable(message: str) -> Failure:
    """Not ready, or no longer; worth another try soon."""
    return Failure(
        503,
        message,
        ErrorCode.UNAVAILABLE.value,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def unknown_prefix(pin_id: str) -> Failure:
    """No prefix of that id, or not one of this key."""
    return Failure(
        404,
        f"no prefix {pin_id[:64]!r} is pinned; GET /v1/prefixes lists those that are",
        ErrorCode.UNKNOWN_PREFIX.value,
        "id",
    )


def no_key() -> Failure:
    """No key was sent."""
    return _unauthorized("this server needs an API key: send it as Authorization: Bearer KEY")


def wrong_key() -> Failure:
    """A key that is not good; it is told to nobody."""
    return _unauthorized(
        "incorrect API key: send one of this server's (its --api-key or --api-key-file)"
    )


def _unauthorized(message: str) -> Failure:
    return Failure(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def rate_limited(limit: str, what: str, wait_s: int) -> Failure:
    """The key has reached one of its limits, by name."""
    return Failure(
        429,
        f"this API key may ask {what} ({limit}); try again in {wait_s} s",
        "rate_limit_exceeded",
        headers={"Retry-After": str(min(wait_s, _LONGEST_WAIT_S))},
    )


def internal() -> Failure:
    """A bug of ours; the log has its story."""
    return Failure(
        500, "the server failed on this request; its log says why", ErrorCode.INTERNAL.value
    )


def of_http(error: web.HTTPException) -> Failure:
    """What aiohttp itself refuses: paths, methods, bodies over the limit."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    match error.status:
        case 404:
            message, code = (
                "there is nothing at this path; /openapi.json lists what there is",
                "not_found",
            )
        case 405:
            message, code = f"this path takes {headers.get('Allow')}", "method_not_allowed"
        case 413:
            return too_large(None)
        case 417:
            return expectation_failed()
        case _:
            message, code = error.reason, "bad_request"
    return Failure(error.status, message, code, headers=headers)


def of_bad_http(error: http_exceptions.HttpProcessingError) -> Failure:
    """Bytes that are no HTTP request; only what is ours or the parser's is repeated."""
    match error:
        case http_exceptions.ContentEncodingError():
            return unsupported_encoding()
        case http_exceptions.LineTooLong(args=(_, limit, *_)):
            message = f"a line of the request's head is over {limit} bytes; shorten it"
        case http_exceptions.InvalidURLError():
            message = "the request's URL cannot be read"
        case http_exceptions.BadStatusLine():
            message = "the request line cannot be read: this server speaks HTTP/1.1, without TLS"
        case _:
            told = error.message.partition("\n")[0].partition(":")[0]  # the client's bytes follow
            message = f"the request is no HTTP/1.1 that can be read ({told})"
    return Failure(400, message, "bad_request", close=True)


def unsupported_encoding() -> Failure:
    """A body that is compressed in a way we have no means to undo."""
    return Failure(
        415,
        "this Content-Encoding is not taken: send gzip, deflate or none",
        "unsupported_media_type",
        close=True,
    )


def expectation_failed() -> Failure:
    """An `Expect` that nobody knows."""
    return Failure(
        417, "of Expect, only 100-continue is known; leave it out", "expectation_failed", close=True
    )


def too_large(limit: int | None) -> Failure:
    """The body is over the limit."""
    allowed = "" if limit is None else f"; at most {limit} bytes are taken (--max-body-bytes)"
    return Failure(
        413, f"the request's body is too large{allowed}", "request_too_large", close=True
    )


def read_timeout(limit_s: float) -> Failure:
    """The client sent a part of a request and then nothing."""
    return Failure(
        408,
        f"the request did not arrive within {limit_s:g} s; send it whole",
        "request_timeout",
        close=True,
    )


def shutting_down() -> Failure:
    """This gateway is about to leave."""
    return _leaving("this gateway is shutting down; try again")


def draining(stream_id: str | None) -> Failure:
    """It leaves before this answer is whole; None: which nobody can go on with."""
    if stream_id is None:
        return _leaving("this gateway shut down before the answer was whole; send it again")
    return _leaving(
        "this gateway is shutting down; the stream goes on at the others: GET "
        f"/v1/streams/{stream_id}, or this request again, with the last event's id as Last-Event-ID"
    )


def _leaving(message: str) -> Failure:
    return Failure(
        503,
        message,
        ErrorCode.DRAINING.value,
        headers={"Retry-After": str(RETRY_AFTER_S)},
        close=True,
    )


def unknown_stream(message: str) -> Failure:
    """No stream of that id, or not one of this key."""
    return Failure(404, message, ErrorCode.UNKNOWN_STREAM.value, "id")


def bad_event_id(message: str) -> Failure:
    """A Last-Event-ID that is none."""
    return Failure(400, f"Last-Event-ID: {message}", ErrorCode.INVALID.value, "Last-Event-ID")
