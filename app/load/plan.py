"""The loads of one run, and running them one after the other against one service."""

from __future__ import annotations

from dataclasses import dataclass

from app.load.arrivals import Arrival, Lengths, closed_arrivals
from app.load.client import LoadClient, Target
from app.load.runner import LoadRunner
from app.load.sample import Sample


@dataclass(frozen=True, slots=True)
class Load:
    """One row to measure: a closed loop of `clients`, or arrivals that wait for nobody."""

    clients: int | None = None
    rate: float | None = None
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All rows of a run and what they have in common."""

    loads: tuple[Load, ...]
    lengths: Lengths
    requests: int | None
    duration_s: float | None
    warm_up: int
    seed: int


async def run_plan(target: Target, plan: LoadPlan) -> list[list[Sample]]:
    """The samples of each load, one load after the other. Raises CoterieError."""
    async with LoadClient(target) as client:
        runner = LoadRunner(client, plan.seed)
        known = [x for load in plan.loads for x in load.arrivals]
        prompts = [x.prompt_tokens for x in known] or [plan.lengths.prompt.highest]
        outputs = [x.output_tokens for x in known] or [plan.lengths.output.highest]
        await runner.calibrate(max(prompts))
        await runner.warm_up(plan.warm_up, Arrival(0.0, min(prompts), min(outputs)))
        found = []
        for load in plan.loads:
            if load.clients is None:
                found.append(await runner.open_loop(load.arrivals))
            else:
                made = closed_arrivals(plan.lengths, plan.seed, plan.requests)
                found.append(await runner.closed_loop(load.clients, made, plan.duration_s))
        return found
