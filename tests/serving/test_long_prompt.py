"""A long prompt passes layer by layer behind the real HTTP API while others stream."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from deployments.settings import ServingSettings
from engine.engine import Engine, open_engine
from tests.serving.local_server import MODEL, LocalServer

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"


def open_offloaded(settings: dict[str, Any]) -> Engine:
    return open_engine({**settings, "pool": {"expert_memory": "50%", "hot_start_s": 0}})


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def test_a_stream_goes_on_while_a_long_prompt_passes_and_one_is_cancelled() -> None:
    engine = {"max_sequences": 4, "max_step_tokens": 16, "context_tokens": 512}
    factory = f"{__name__}:open_offloaded"
    with LocalServer(DEMO_MODEL, ServingSettings(), engine, factory) as server:
        url = f"{server.url}/v1/completions"
        long = "Once there was a fox who lived by the river. " * 12
        alone = httpx.post(url, json=body(long, 8), timeout=60).json()
        assert alone["choices"][0]["text"]
        pieces: list[str] = []

        def stream() -> None:
            wanted = body("A story:", 60, stream=True, ignore_eos=True)
            with httpx.stream("POST", url, json=wanted, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line[6:])["choices"][0]["text"])

        thread = threading.Thread(target=stream)
        thread.start()
        for number in range(3):
            with httpx.stream(
                "POST", url, json=body(f"{number} {long}", 50, stream=True), timeout=60
            ) as response:
                assert response.status_code == 200  # and leave: it is cancelled
            again = httpx.post(url, json=body(f"{number}. {long}", 8), timeout=60)
            assert again.json()["usage"]["completion_tokens"] > 0
        thread.join(60)
        assert len("".join(pieces)) > 60
        deadline = time.monotonic() + 20
        while server.status()["running"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.status()["running"] == 0
        assert server.status().get("kv_blocks_used", 0) == 0
