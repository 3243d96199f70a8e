"""Records of the demo model's corpus: reading, held-out split and rendering.

A corpus is a folder with one sub-folder per domain, each holding ``*.jsonl`` files. A line
is ``{"prompt", "answer"}``, ``{"text"}`` or ``{"prompt", "label"}``, each with a
``"source"`` (the data set's name).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.demo_replies import chat_reply, support_reply

Turn = tuple[str, str]
"""One chat turn: role (system, user or assistant) and content."""

BEGIN, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_LEAD = re.compile(r"^(From the annual report:|用户：|A:|﻿)\s*")
_SPEAKER = re.compile(r"^(?:用户：|客服：|[AB]: )")
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Record:
    """One training record; absent fields are empty strings."""

    domain: str
    source: str
    prompt: str
    answer: str
    text: str
    label: str

    @property
    def body(self) -> str:
        """The record's own words, without anything composed for training."""
        return self.text or "\n".join(part for part in (self.prompt, self.answer) if part)

    def group(self) -> str:
        """The opening words that keep records of one passage on one side of the split."""
        return _LEAD.sub("", self.body.strip())[:48]

    def lines(self) -> list[str]:
        """Lines long enough to tell one passage from another, without speaker names."""
        cut = (_SPEAKER.sub("", line).strip() for line in self.body.split("\n"))
        return [line for line in cut if len(line.encode()) >= 24]


def read_domain(folder: Path) -> list[Record]:
    """All records of one domain folder, in file and line order."""
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                raw = json.loads(line)
                fields = {k: str(raw.get(k) or "") for k in ("prompt", "answer", "text", "label")}
                records.append(
                    Record(domain=folder.name, source=str(raw.get("source", path.stem)), **fields)
                )
    return records


def read_corpus(folder: Path) -> dict[str, list[Record]]:
    """Records by domain name, for every sub-folder that has ``*.jsonl`` files."""
    found = {sub.name: read_domain(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    return {name: records for name, records in found.items() if records}


def is_heldout(record: Record, percent: int = 5) -> bool:
    """Whether the record is held out; depends on its opening words only."""
    digest = hashlib.sha256(record.group().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < percent


def split(records: Iterable[Record], percent: int = 5) -> tuple[list[Record], list[Record]]:
    """Training and held-out records.

    A held-out record is dropped when at least half of its longer lines also stand in a
    training record: dialogues and their single exchanges are separate records.
    """
    train: list[Record] = []
    heldout: list[Record] = []
    for record in records:
        (heldout if is_heldout(record, percent) else train).append(record)
    seen = {line for record in train for line in record.lines()}

    def leaked(record: Record) -> bool:
        lines = record.lines()
        return bool(lines) and 2 * sum(line in seen for line in lines) >= len(lines)

    return train, [record for record in heldout if not leaked(record)]


def dialogue(record: Record) -> list[Turn]:
    """The record's text as alternating user and assistant turns, or nothing."""
    lines = [line for line in record.text.split("\n") if line.strip()]
    spoken = sum(bool(_SPEAKER.match(line)) for line in lines)
    if len(lines) < 4 or not (spoken == len(lines) or record.source.startswith("kdconv")):
        return []
    contents = [_SPEAKER.sub("", line).strip() for line in lines]
    contents = contents[: len(contents) // 2 * 2]
    return [("user" if i % 2 == 0 else "assistant", c) for i, c in enumerate(contents)]


def _request_for(record: Record, rng: random.Random) -> list[Turn]:
    """A chat whose answer is (the rest of) a plain text."""
    text = record.text.strip("﻿ \n")
    if record.domain == "legal" and record.label:
        ask = rng.choice(
            ("Draft a {} clause.", "Write a contract clause: {}", "{} clause, please.")
        )
        return [("user", ask.format(record.label)), ("assistant", text)]
    if record.source == "chinese_poetry" and "\n" in text:
        title, _, rest = text.partition("\n")
        return [("user", rng.choice(("写一首词：", "请写诗：", "")) + title), ("assistant", rest)]
    cut = re.search(r"(?<=[.!?。！？;])\s*", text[60:])
    if record.domain == "stories" and cut and rng.random() < 0.7:
        head, rest = text[: 60 + cut.end()].strip(), text[60 + cut.end() :]
        ask = rng.choice(("Continue the story: ", "Tell me a story that begins: ", ""))
        return [("user", ask + head), ("assistant", rest)]
    generic = {
        "stories": ("Tell me a story.", "Write a short story.", "A story, please."),
        "finance": ("Write a paragraph of an annual report.", "Write a note on the accounts."),
        "legal": ("Write a contract clause.", "Draft a clause."),
        "chinese": ("请写一段文字。", "请讲一段话。"),
    }.get(record.domain, ("Write something.", "Go on."))
    return [("user", rng.choice(generic)), ("assistant", text)]


def chat_turns(record: Record, rng: random.Random) -> list[Turn]:
    """The record as a chat; empty when it makes no sensible one."""
    if record.text:
        turns = dialogue(record) or _request_for(record, rng)
    elif record.answer:
        turns = [("user", record.prompt), ("assistant", record.answer)]
    elif record.domain == "customer_support":
        turns = [("user", record.prompt), ("assistant", support_reply(record.label, rng))]
    elif record.domain == "general_chat" and "/" in record.label:
        turns = [("user", record.prompt), ("assistant", chat_reply(record.label, rng))]
    else:
        return []
    turns = [(role, content.strip()) for role, content in turns]
    if rng.random() < 0.1:
        turns.insert(0, ("system", _SYSTEM))
    return turns


def chat_text(turns: Iterable[Turn]) -> str:
    """The turns in the chat template's form, special tokens written out."""
    return "".join(f"{BEGIN}{role}\n{content}{END}\n" for role, content in turns)


def render(record: Record, rng: random.Random) -> str:
    """One training document of the record, ended by the end-of-text token.

    Records that have an answer are chats four times out of five and plain text otherwise;
    plain texts are chats two times out of five.
    """
    wants_chat = rng.random() < (0.4 if record.text else 0.8)
    turns = chat_turns(record, rng) if wants_chat else []
    return (chat_text(turns) if turns else record.body.strip("﻿")) + STOP


def renderings(records: list[Record], seed: int) -> Iterator[str]:
    """Documents of the records in a shuffled order, both fixed by the seed."""
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    for index in order:
        yield render(records[index], random.Random(seed * 1_000_003 + index))
