"""What gateway, supervisor and rank add to an engine: `python -m benchmarks.gateway --json`.

The engine answers at once. Added TTFT is the time from sending a request over an open connection
to its first text, less the same request's first token from a direct call of the engine in this
process. Token rates are summed over streams of 256 tokens. The load generator runs on the same
machine and shares its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from app.measurement import emit, quiet_monitor
from benchmarks.instant_engine import InstantEngine
from core.request import Request, SamplingParams

CLIENTS = (1, 8, 32)
MAX_SEQUENCES = 64
MODEL = "instant"
STREAM_TOKENS = 256
TTFT_REQUESTS = 200
WARM_UP_REQUESTS = 20
PROMPT = "What is the capital of France, and what should one see there in two days?"


class Connection:
    """One kept-alive HTTP/1.1 connection that reads streams as they come."""

    def __init__(self, port: int, prefix: str = "") -> None:
        self._port = port
        self._path = f"{prefix}/v1/completions"

    async def open(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def stream(self, max_tokens: int) -> float:
        """Run one streamed request to its end; seconds until its first text."""
        body = json.dumps(
            {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
        ).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"expected a stream, found {status[:200]!r}")
        first_s = 0.0
        while True:
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size + 2)
            if not first_s and b'"text"' in data:
                first_s = time.perf_counter() - began
            if size == 0:
                return first_s


def direct_ttft_s() -> float:
    """Median seconds to the first token of an engine called in this process."""
    engine = InstantEngine(MAX_SEQUENCES)
    params = SamplingParams(max_tokens=4)
    times = []
    for number in range(TTFT_REQUESTS):
        request = Request(request_id=str(number), prompt_ids=(1, 2, 3), params=params)
        began = time.perf_counter()
        engine.add(request)
        engine.step()
        times.append(time.perf_counter() - began)
        engine.cancel(str(number))
    return statistics.median(times)


async def measure(port: int, clients: int, direct_s: float) -> dict[str, Any]:
    """One row: TTFT with `clients` that each ask again and again, then their token rate."""
    connections = [await Connection(port).open() for _ in range(clients)]
    each = max(1, TTFT_REQUESTS // clients)

    async def ask(connection: Connection, count: int) -> list[float]:
        return [await connection.stream(4) for _ in range(count)]

    await asyncio.gather(*(ask(x, max(1, WARM_UP_REQUESTS // clients)) for x in connections))
    found = await asyncio.gather(*(ask(x, each) for x in connections))
    added_ms = sorted((x - direct_s) * 1e3 for times in found for x in times)
    began = time.perf_counter()
    await asyncio.gather(*(x.stream(STREAM_TOKENS) for x in connections))
    tokens_s = clients * STREAM_TOKENS / (time.perf_counter() - began)
    return {
        "clients": clients,
        "added_ttft_p50_ms": round(statistics.median(added_ms), 2),
        "added_ttft_p99_ms": round(added_ms[int(len(added_ms) * 0.99)], 2),
        "streams": clients,
        "tok_s": round(tokens_s),
    }


def run(model_dir: Path, port: int) -> tuple[list[dict[str, Any]], Any]:
    """Deploy on a Ray of our own and measure all rows."""
    from app.local_ray import local_ray, prepare_environment

    prepare_environment(1 << 20)
    from ray import serve

    from deployments.application import application
    from deployments.settings import ServingSettings

    engine = {"max_sequences": MAX_SEQUENCES}
    factory = "benchmarks.instant_engine:open_engine"
    built = application(MODEL, model_dir, ServingSettings(port=port), engine, {}, factory)
    with local_ray(num_cpus=4):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(built, name="benchmark", route_prefix="/")
        direct_s = direct_ttft_s()
        with quiet_monitor() as monitor:
            rows = [asyncio.run(measure(port, clients, direct_s)) for clients in CLIENTS]
        serve.shutdown()
    return rows, monitor


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="demo_model", help="folder of a tokenizer and template")
    parser.add_argument("--port", type=int, default=18321)
    options = parser.parse_args()
    rows, monitor = run(Path(options.model).resolve(), options.port)
    emit("gateway", rows, monitor, options.json)


if __name__ == "__main__":
    main()
