"""/health while huge prompts arrive: `python -m benchmarks.health_under_load --json`.

Senders post prompts of 60,000 tokens and of 2 MB of text without a pause, while another connection
asks for /health every few milliseconds. Right is: no answer takes 100 ms or longer, and at least
one comes between any two of the prompts. The demo model's context is shorter than the prompts, so
each is read whole and then refused with a 400, never with a 5xx.

Senders and the asker run on the same machine, and share its cores with the service.
"""

from __future__ import annotations

import argparse
import bisect
import http.client
import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from app.load.prompts import write_prompt
from app.load.summary import percentile
from app.measurement import emit, quiet_monitor
from benchmarks.live_service import live_service

LIMIT_MS = 100.0
PROBE_GAP_S = 0.005
TIMEOUT_S = 60.0
TOKENS = 60_000
TEXT_BYTES = 2 * 1024**2


def bodies(model: str) -> dict[str, bytes]:
    """Kinds of huge prompts, as bodies of /v1/completions."""
    ids = [number % 4000 + 10 for number in range(TOKENS)]
    words = write_prompt(TEXT_BYTES // 4, 0, 0)[:TEXT_BYTES]
    # Text without any space is the worst case of many tokenizers.
    unbroken = "ab" * (TEXT_BYTES // 2)
    prompts = {"60k token ids": ids, "2 MB of words": words, "2 MB without a space": unbroken}
    return {
        kind: json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode()
        for kind, prompt in prompts.items()
    }


class Sender(threading.Thread):
    """Posts one body again and again; `ends` are when its answers came."""

    def __init__(self, port: int, body: bytes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._body, self._stop_asked = port, body, stop
        self.ends: list[float] = []
        self.statuses: Counter[int] = Counter()

    def run(self) -> None:
        """Until asked to stop."""
        while not self._stop_asked.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
            head = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", self._body, head)
            answer = connection.getresponse()
            answer.read()
            connection.close()
            self.statuses[answer.status] += 1
            self.ends.append(time.monotonic())


def probe(port: int, seconds: float) -> list[tuple[float, float]]:
    """(sent, answered) of each /health asked within `seconds`, over one kept connection."""
    found = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    end_s = time.monotonic() + seconds
    while (sent_s := time.monotonic()) < end_s:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"/health answered {answer.status}")
        found.append((sent_s, time.monotonic()))
        time.sleep(PROBE_GAP_S)
    connection.close()
    return found


def measure(
    port: int, kind: str, body: bytes | None, senders: int, seconds: float
) -> dict[str, Any]:
    """One row; without a body, the idle service."""
    stop = threading.Event()
    threads = [Sender(port, body, stop) for _ in range(senders)] if body else []
    for thread in threads:
        thread.start()
    probes = probe(port, seconds)
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    latencies_ms = [(answered - sent) * 1e3 for sent, answered in probes]
    ends = sorted(end for thread in threads for end in thread.ends if end <= probes[-1][1])
    answered = [moment for _, moment in probes]
    alone = [
        bisect.bisect(answered, first) == bisect.bisect(answered, second)
        for first, second in itertools.pairwise(ends)
        # Two that end together, of two senders, leave no time in between.
        if (second - first) * 1e3 >= LIMIT_MS
    ]
    statuses = sum((thread.statuses for thread in threads), Counter[int]())
    return {
        "prompts": kind,
        "senders": senders if body else 0,
        "sent": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "health_asked": len(probes),
        "health_p50_ms": percentile(latencies_ms, 50),
        "health_p99_ms": percentile(latencies_ms, 99),
        "health_max_ms": percentile(latencies_ms, 100),
        "over_limit": sum(x >= LIMIT_MS for x in latencies_ms),
        "pairs_without_health": sum(alone),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--senders", type=int, default=2)
    options = parser.parse_args()
    model_dir = Path(options.model).resolve()
    with live_service(model_dir, options.port) as port, quiet_monitor() as monitor:
        kinds: dict[str, bytes | None] = {"none": None, **bodies(model_dir.name)}
        rows = [
            measure(port, kind, body, options.senders, options.seconds)
            for kind, body in kinds.items()
        ]
    emit("health_under_load", rows, monitor, options.json)


if __name__ == "__main__":
    main()
