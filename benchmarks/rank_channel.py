"""A local socket against a streaming actor call: `python -m benchmarks.rank_channel --json`.

Both carry what a rank sends up: one StepResult a step, 32 sequences, from an actor to a process
on the same node. `delay` is from the send to the receipt of single messages sent 2 ms apart;
`rate` is of messages sent without pause.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from app.measurement import emit, quiet_monitor
from core.step import SequenceOutput, StepResult, StepStats
from deployments.rank_channel import RankSocket, Step, frame, read_messages

SEQUENCES = 32
MESSAGES = 500
PAUSE_S = 0.002


def step_result(paused: bool) -> Iterator[StepResult]:
    """Step results stamped with the time they are made."""
    outputs = tuple(
        SequenceOutput(request_id=f"cmpl-{number:032x}", index=0, token_ids=(number,))
        for number in range(SEQUENCES)
    )
    for step in range(MESSAGES):
        if paused:
            time.sleep(PAUSE_S)
        yield StepResult(outputs=outputs, stats=StepStats(step=step, step_s=time.time()))


class Sender:
    """The actor's side of both ways."""

    def over_socket(self, path: str, paused: bool) -> None:
        """Send all messages to a Unix socket."""
        with RankSocket(path) as link:
            for result in step_result(paused):
                link.send(Step(result))

    def over_call(self, paused: bool) -> Iterator[bytes]:
        """Yield all messages from a streaming actor call."""
        for result in step_result(paused):
            yield frame(Step(result))


async def _socket_messages(actor: Any, paused: bool) -> AsyncIterator[StepResult]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_unix_server(lambda r, w: arrived.put_nowait((r, w)), path)
        running = actor.over_socket.remote(path, paused)
        reader, writer = await arrived.get()
        async for message in read_messages(reader):
            if isinstance(message, Step):
                yield message.result
        writer.close()
        server.close()
        await running


async def _call_messages(actor: Any, paused: bool) -> AsyncIterator[StepResult]:
    async for reference in actor.over_call.options(num_returns="streaming").remote(paused):
        reader = asyncio.StreamReader()
        reader.feed_data(await reference)
        reader.feed_eof()
        async for message in read_messages(reader):
            if isinstance(message, Step):
                yield message.result


async def measure(actor: Any, way: str) -> dict[str, Any]:
    """One row."""
    messages = _socket_messages if way == "socket" else _call_messages
    delays_ms = []
    async for result in messages(actor, True):
        delays_ms.append((time.time() - result.stats.step_s) * 1e3)
    delays_ms = sorted(delays_ms[MESSAGES // 10 :])
    began = 0.0
    count = 0
    async for _ in messages(actor, False):
        began = began or time.perf_counter()
        count += 1
    return {
        "way": way,
        "delay_p50_ms": round(statistics.median(delays_ms), 3),
        "delay_p99_ms": round(delays_ms[int(len(delays_ms) * 0.99)], 3),
        "messages_s": round((count - 1) / (time.perf_counter() - began)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    from app.local_ray import local_ray, prepare_environment

    prepare_environment(1 << 20)
    import ray

    with local_ray(num_cpus=2), quiet_monitor() as monitor:
        actor = ray.remote(Sender).options(num_cpus=0).remote()
        rows = [asyncio.run(measure(actor, way)) for way in ("socket", "actor call") * 2]
    emit("rank_channel", rows, monitor, options.json)


if __name__ == "__main__":
    main()
