"""A server that says hello, for the runner's tests: python fake_contestant.py PORT [refuse]."""

import json
import sys

from aiohttp import web

TOKENS = 5


async def health(_request):
    return web.Response()


async def models(_request):
    return web.json_response({"data": [{"id": "fake"}]})


async def chat(request):
    body = await request.json()
    if "refused" in sys.argv:
        return web.Response(status=500, text="I would rather not")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index in range(body.get("n", 1)):
        for _ in range(TOKENS):
            choice = {"index": index, "delta": {"content": "x"}, "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    usage = {"prompt_tokens": 1, "completion_tokens": TOKENS * body.get("n", 1)}
    last = json.dumps({"choices": [], "usage": usage}).encode()
    await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
    return response


def main():
    if "dies" in sys.argv:
        sys.exit("no memory for the weights")
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
