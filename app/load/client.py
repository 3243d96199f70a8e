"""The HTTP client of a load: one streamed request, timed, and whatever goes wrong as a sample."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from app.load.event_stream import END_MARK, EventParser
from app.load.sample import Sample
from core.errors import CoterieError

Endpoint = Literal["chat", "completions"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_PROBE_TIMEOUT_S = 10.0
_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load goes. `url` is the service's root, without /v1; `api_key` may be empty."""

    url: str
    endpoint: Endpoint
    model: str
    api_key: str
    timeout_s: float
    ignore_eos: bool

    def body(self, prompt: str, output_tokens: int, seed: int) -> dict[str, Any]:
        """The JSON of one streamed request that asks for its usage."""
        said: dict[str, Any] = {"prompt": prompt}
        if self.endpoint == "chat":
            said = {"messages": [{"role": "user", "content": prompt}]}
        # Other servers refuse the field; it is sent only where it changes something.
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            **said,
            "max_tokens": output_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **eos,
        }


def root_of(url: str) -> str:
    """The service's root, where `url` may also end in /v1 or a slash, or be HOST:PORT."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")


def headers_for(api_key: str) -> dict[str, str]:
    """Authorisation where there is a key."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def first_model(url: str, api_key: str) -> str:
    """The first model that the service lists. Raises CoterieError."""
    address = f"{url}/v1/models"
    try:
        answer = httpx.get(
            address, headers=headers_for(api_key), timeout=_PROBE_TIMEOUT_S, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CoterieError(f"no answer from {address}: {error}") from error
    if answer.status_code != 200:
        hint = " Set COTERIE_API_KEY to a key of the service." if answer.status_code == 401 else ""
        raise CoterieError(
            f"{address} answered {answer.status_code}: {message_of(answer.content)}{hint}"
        )
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise CoterieError(f"{address} lists no model; name one with --model") from error


class LoadClient:
    """An async context manager over one pool of connections that never makes a request wait."""

    def __init__(self, target: Target) -> None:
        self.target = target

    async def __aenter__(self) -> LoadClient:
        self._http = httpx.AsyncClient(
            headers={"accept-encoding": "identity", **headers_for(self.target.api_key)},
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy from the environment is for the outside; a load goes where it is told to.
            trust_env=False,
        )
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, output_tokens: int, seed: int, due_s: float) -> Sample:
        """Send one request now and read its answer to the end. Raises nothing but cancellation."""
        sample = Sample(due_s, sent_s=time.monotonic())
        body = json.dumps(self.target.body(prompt, output_tokens, seed)).encode()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._stream(body, sample)
        except TimeoutError:
            _failed(sample, "timeout", f"not answered within {self.target.timeout_s:g} s")
        except httpx.RemoteProtocolError as error:
            _failed(sample, "cut off", str(error))
        except (httpx.HTTPError, OSError) as error:
            _failed(sample, "connection", str(error) or type(error).__name__)
        sample.ended_s = time.monotonic()
        return sample

    async def _stream(self, body: bytes, sample: Sample) -> None:
        address = self.target.url + _PATHS[self.target.endpoint]
        head = {"content-type": "application/json"}
        async with self._http.stream("POST", address, content=body, headers=head) as answer:
            if answer.status_code != 200:
                sample.retry_after_s = _seconds(answer.headers.get("retry-after"))
                _failed(sample, str(answer.status_code), message_of(await answer.aread()))
                return
            parser = EventParser()
            ended = False
            async for part in answer.aiter_raw():
                now_s = time.monotonic()
                for data in parser.feed(part):
                    ended = ended or data == END_MARK
                    if data != END_MARK:
                        _read_chunk(data, now_s, sample)
            if not ended and sample.ok:
                _failed(sample, "cut off", "the stream ended without its end mark")
            if sample.ok and not sample.prompt_tokens:
                _failed(sample, "no usage", "the stream ended without counting its tokens")


def _read_chunk(data: bytes, now_s: float, sample: Sample) -> None:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict) or "error" in chunk:
        _failed(sample, "stream", message_of(data))
        return
    if usage := chunk.get("usage"):
        sample.prompt_tokens = int(usage.get("prompt_tokens", 0))
        sample.output_tokens = int(usage.get("completion_tokens", 0))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        # A role alone is no text: it may be sent before anything was computed.
        texts = ("content", "text", "reasoning_content", "tool_calls")
        if any(delta.get(name) for name in texts) or choice.get("finish_reason"):
            sample.first_s = now_s if sample.first_s is None else sample.first_s
            sample.last_s = now_s


def message_of(body: bytes) -> str:
    """The message of an OpenAI error object, or the beginning of what was sent instead."""
    try:
        return str(json.loads(body)["error"]["message"])[:_MESSAGE_CHARS]
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:_MESSAGE_CHARS]


def _failed(sample: Sample, kind: str, message: str) -> None:
    sample.error, sample.message = kind, message


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
