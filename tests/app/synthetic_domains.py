"""Small labelled texts of three made-up domains, always the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = {
    "garden": "soil seed rose hedge prune compost lawn bulb shovel frost bloom root",
    "music": "chord tempo melody piano rhythm octave violin lyric concert tune drum bass",
    "sailing": "anchor sail keel tide harbour mast rudder breeze knot deck buoy crew",
}
COMMON = "the a of in and with my how is it when should I we do this for on what can"


def lines(count: int = 60, seed: int = 0) -> list[dict[str, str]]:
    """`count` of each domain, shuffled."""
    draw = random.Random(seed)
    common = COMMON.split()
    made = []
    for label, words in WORDS.items():
        own = words.split()
        for _ in range(count):
            size = draw.randint(6, 30)
            text = " ".join(
                draw.choice(own if draw.random() < 0.4 else common) for _ in range(size)
            )
            made.append({"text": text, "label": label})
    draw.shuffle(made)
    return made


def write_lines(path: Path, records: list[dict[str, str]]) -> Path:
    """As a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
