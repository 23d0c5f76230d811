"""A thin OpenAI server over OpenVINO GenAI's ContinuousBatchingPipeline, which has none of its own.

    PEER/bin/python openvino_server.py --folder HF_FOLDER --convert F16.gguf     once, before
    PEER/bin/python openvino_server.py --folder HF_FOLDER --port 8103

Runs in the peer's own environment (openvino-genai, aiohttp, tokenizers, jinja2) and imports nothing
of ours. Knows what a load needs: completions and chat, streamed, n, temperature, top_p, seed,
ignore_eos, max_tokens. A thread steps the pipeline; since a step holds Python's lock, the thread
waits after each until the event loop has sent the tokens, or they would bunch. Of n > 1 the
pipeline itself tells nothing before the end.
"""

import argparse
import asyncio
import itertools
import json
import os
import queue
import threading
import time
from pathlib import Path

import jinja2
import numpy as np
import openvino
import openvino_genai
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Pipeline:
    """The pipeline and the one thread that may touch it."""

    def __init__(self, folder, options):
        config = openvino_genai.SchedulerConfig()
        config.cache_size = options.cache_gib
        config.max_num_seqs = options.max_num_seqs
        config.max_num_batched_tokens = options.max_num_batched_tokens
        config.enable_prefix_caching = True
        properties = {
            "INFERENCE_PRECISION_HINT": options.precision,
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
            "ENABLE_HYPER_THREADING": True,  # or of two threads of one core it would use one
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), config, "CPU", properties
        )
        self._coming = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, ids, config):
        """A queue of (choice, new token ids, finish reason or None)."""
        answer = asyncio.Queue()
        self._coming.put((ids, config, answer))
        return answer

    def _work(self):
        running = []
        while True:
            while not (running and self._coming.empty()):
                ids, config, answer = self._coming.get()  # waits if there is nothing to do
                prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
                handle = self._pipeline.add_request(next(self._numbers), prompt, config)
                running.append((handle, answer, {}))
            self._pipeline.step()
            told = [part for one in running for part in self._read(one)]
            running = [one for one in running if _is_running(one[0])]
            if told:
                asyncio.run_coroutine_threadsafe(_tell(told), self._loop).result()

    @staticmethod
    def _read(one):
        handle, answer, choices = one
        while handle.can_read():
            for name, output in handle.read().items():
                index = choices.setdefault(name, len(choices))
                is_over = output.finish_reason != openvino_genai.GenerationFinishReason.NONE
                reason = output.finish_reason.name.lower() if is_over else None
                yield answer, (index, list(output.generated_ids), reason)
        if not _is_running(handle):
            yield answer, None


def _is_running(handle):
    return handle.get_status().name == "RUNNING"


async def _tell(told):
    for answer, part in told:
        answer.put_nowait(part)
    for _ in range(3):  # turns in which the handlers read and write
        await asyncio.sleep(0)


PIPELINE = web.AppKey("pipeline", Pipeline)


class Server:
    """The HTTP side."""

    def __init__(self, options):
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
        told = json.loads((options.folder / "tokenizer_config.json").read_text())
        generation = json.loads((options.folder / "generation_config.json").read_text())
        self._eos = generation["eos_token_id"]
        self._template = jinja2.Environment().from_string(told["chat_template"])

    async def start(self, app):
        """Load the model; only then does the server answer."""
        app[PIPELINE] = Pipeline(self._options.folder, self._options)

    async def models(self, _request):
        """The one there is."""
        return web.json_response({"data": [{"id": self._options.folder.parent.name}]})

    async def health(self, _request):
        """Up as soon as it listens."""
        return web.Response()

    async def chat(self, request):
        """POST /v1/chat/completions."""
        body = await request.json()
        text = self._template.render(messages=body["messages"], add_generation_prompt=True)
        return await self._answer(request, body, text, is_chat=True)

    async def completions(self, request):
        """POST /v1/completions."""
        body = await request.json()
        return await self._answer(request, body, body["prompt"], is_chat=False)

    async def _answer(self, request, body, text, *, is_chat):
        if not body.get("stream"):
            return web.json_response({"error": {"message": "only streams here"}}, status=400)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        parts = request.app[PIPELINE].submit(ids, _config(body, self._eos))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        base = {"id": "x", "object": kind, "created": int(time.time()), "model": body["model"]}
        streams, count = {}, 0
        while (part := await parts.get()) is not None:
            index, tokens, reason = part
            count += len(tokens)
            stream = streams.setdefault(index, DecodeStream(skip_special_tokens=True))
            said = "".join(stream.step(self._tokenizer, token) or "" for token in tokens)
            spoken = {"delta": {"content": said}} if is_chat else {"text": said}
            choice = {"index": index, "finish_reason": reason, **spoken}
            await response.write(_event({**base, "choices": [choice]}))
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "total_tokens": len(ids) + count,
        }
        await response.write(_event({**base, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _config(body, eos):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    config.ignore_eos = bool(body.get("ignore_eos"))
    config.eos_token_id = eos
    config.num_return_sequences = body.get("n") or 1
    temperature = body.get("temperature")
    if temperature is None or temperature > 0:
        config.do_sample = True
        config.temperature = 1.0 if temperature is None else temperature
        config.top_p = 1.0 if body.get("top_p") is None else body["top_p"]
        if body.get("seed") is not None:
            config.rng_seed = body["seed"]
    return config


def convert(gguf, folder):
    """Write OpenVINO's own form of a GGUF file into `folder`."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / gguf.name
        copy.symlink_to(gguf.resolve())
        openvino_genai.ContinuousBatchingPipeline(
            str(copy), openvino_genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True}
        )
        for file in sorted(Path(scratch).glob("openvino_model.*")):  # .bin, then .xml
            shutil.move(file, folder / file.name)


def application(options):
    """The routes."""
    server = Server(options)
    app = web.Application(client_max_size=2**26)
    app.on_startup.append(server.start)
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/completions", server.completions)
    return app


def main():
    """Read the command line and serve, or convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--convert", type=Path, metavar="GGUF")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cache-gib", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    options = parser.parse_args()
    if options.convert:
        convert(options.convert, options.folder)
        return
    web.run_app(application(options), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
