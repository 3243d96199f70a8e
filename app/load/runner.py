"""Sends a load: open loops keep to their times whatever the server does, closed loops wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from app.load.arrivals import Arrival
from app.load.client import LoadClient
from app.load.prompts import PromptLine, write_prompt
from app.load.sample import Sample
from core.errors import CoterieError

FEW_WORDS, MANY_WORDS = 8, 256
"""Prompts that show how many tokens a word has; short loads use shorter ones."""
WARM_UP_SEED = -1
START_DELAY_S = 0.05
"""Between making an open loop and its first request, so that its times can be kept."""


class LoadRunner:
    """Runs loads over one client. `seed` decides prompts and the requests' own seeds."""

    def __init__(self, client: LoadClient, seed: int) -> None:
        self._client = client
        self._seed = seed
        self._number = 0
        self._line = PromptLine(0.0, 1.0)

    async def calibrate(self, longest_prompt_tokens: int) -> None:
        """Learns tokens per word from the server's own count. Raises CoterieError if refused."""
        many = max(3 * FEW_WORDS, min(MANY_WORDS, longest_prompt_tokens))
        few_tokens = await self._count_prompt(FEW_WORDS)
        self._line = PromptLine.through(
            (FEW_WORDS, few_tokens), (many, await self._count_prompt(many))
        )

    async def warm_up(self, requests: int, arrival: Arrival) -> None:
        """Sends `requests` like `arrival` all at once; nobody counts them."""
        await asyncio.gather(*(self._ask(arrival, time.monotonic()) for _ in range(requests)))

    async def open_loop(self, arrivals: Sequence[Arrival]) -> list[Sample]:
        """Each request at its time, even while earlier ones wait; their samples in that order."""
        start_s = time.monotonic() + START_DELAY_S
        tasks = []
        for arrival in arrivals:
            due_s = start_s + arrival.at_s
            # Late is late: nothing is skipped, and the delay counts in the request's TTFT.
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._ask(arrival, due_s)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(
        self, clients: int, arrivals: Iterable[Arrival], duration_s: float | None
    ) -> list[Sample]:
        """`clients` that each ask again when they are answered, until nothing is left to ask."""
        shared = iter(arrivals)
        deadline_s = None if duration_s is None else time.monotonic() + duration_s
        found = await asyncio.gather(
            *(self._keep_asking(shared, deadline_s) for _ in range(clients))
        )
        return sorted((x for samples in found for x in samples), key=lambda x: x.due_s)

    async def _keep_asking(
        self, arrivals: Iterator[Arrival], deadline_s: float | None
    ) -> list[Sample]:
        samples: list[Sample] = []
        while deadline_s is None or time.monotonic() < deadline_s:
            arrival = next(arrivals, None)
            if arrival is None:
                break
            samples.append(await self._ask(arrival, time.monotonic()))
        return samples

    async def _ask(self, arrival: Arrival, due_s: float) -> Sample:
        number, self._number = self._number, self._number + 1
        prompt = write_prompt(self._line.words(arrival.prompt_tokens), self._seed, number)
        return await self._client.ask(prompt, arrival.output_tokens, self._seed + number, due_s)

    async def _count_prompt(self, words: int) -> int:
        prompt = write_prompt(words, WARM_UP_SEED, words)
        sample = await self._client.ask(prompt, 1, self._seed, time.monotonic())
        if not sample.ok:
            raise CoterieError(
                f"{self._client.target.url} does not answer a first request ({sample.error}): "
                f"{sample.message}"
            )
        return sample.prompt_tokens
