"""What it costs to label a request with its domain, and how often the label is right.

    python -m benchmarks.domain_classifier [--json] [--weights FILE] [--data FOLDER]

Rows `guess, N characters`: one guess of a text of that many, on one thread, wall and CPU time;
`labels of a request` adds the client's hint and the hash of its session. With --data (or the
folder that COTERIE_DATA names, its part `domains`), `accuracy` rows tell how often the bundled
weights are right on the tenth of record groups that their training held out, of whole records and
of first characters; a text that is not guessed at counts as wrong. The texts that are timed are
made of words, seeded.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.domain_records import HELD_OUT, read_records
from app.domain_report import report
from app.measurement import emit, quiet_monitor
from deployments.caller import Caller
from deployments.domain_classifier import DomainClassifier, DomainGuesser
from deployments.domain_settings import DomainSettings
from deployments.domain_weights import BUNDLED, DomainWeights
from deployments.request_labels import Labeller

SIZES = (0, 20, 200, 2_000, 200_000)
CALLS = 4_000
TEXTS = 16


def texts(size: int) -> list[str]:
    draw = random.Random(size)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(2_000)]
    return [" ".join(draw.choices(words, k=size // 3 + 1))[:size] for _ in range(TEXTS)]


def timed(name: str, call: Callable[[str], Any], chosen: list[str]) -> dict[str, Any]:
    for text in chosen * 4:
        call(text)
    wall_ns, cpu_ns = [], []
    for number in range(CALLS):
        text = chosen[number % len(chosen)]
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call(text)
        cpu_ns.append(time.thread_time_ns() - cpu)
        wall_ns.append(time.perf_counter_ns() - wall)
    row: dict[str, Any] = {"what": name, "calls": CALLS}
    for clock, spent in (("wall", wall_ns), ("cpu", cpu_ns)):
        for share in (50, 99):
            row[f"{clock}_us_p{share}"] = round(float(np.percentile(spent, share)) / 1e3, 1)
    return row


def accuracy(classifier: DomainClassifier, folder: Path) -> list[dict[str, Any]]:
    def progress(what: str, done: int, total: int) -> None:
        if done % 3000 == 0:
            print(f"{what}: {done} of {total}", file=sys.stderr)

    held_out = [record for record in read_records(folder) if record.part == HELD_OUT]
    rows = []
    for each in report(classifier, held_out, progress):
        worst = min(each.domains, key=lambda name: each.domains[name].accuracy)
        rows.append(
            {
                "what": f"accuracy, {'whole records' if each.chars is None else each.chars}",
                "texts": each.texts,
                "accuracy": each.accuracy,
                "worst": f"{worst} {each.domains[worst].accuracy}",
                "no_guess": each.unknown,
                "calibration_error": each.calibration_error,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--weights", type=Path, default=BUNDLED, help="default: the bundled ones")
    parser.add_argument("--data", type=Path, help="folder of DOMAIN/*.jsonl")
    arguments = parser.parse_args()
    folder = arguments.data
    if folder is None and "COTERIE_DATA" in os.environ:
        folder = Path(os.environ["COTERIE_DATA"]) / "domains"
    classifier = DomainClassifier(DomainWeights.read(arguments.weights))
    labeller = Labeller(DomainGuesser(classifier), DomainSettings())
    caller = Caller(tenant="t", domain_hint=classifier.labels[0], session_id="conversation 7")
    with quiet_monitor() as monitor:
        rows = []
        for size in SIZES:
            print(f"guesses of {size} characters", file=sys.stderr)
            rows.append(timed(f"guess, {size} characters", classifier.guess, texts(size)))
        rows.append(
            timed(
                "labels of a request, 2000 characters",
                lambda text: labeller.labels_of(caller, None, text),
                texts(2_000),
            )
        )
        if folder is not None:
            rows += accuracy(classifier, folder)
    emit("domain_classifier", rows, monitor, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
