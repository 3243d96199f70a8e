"""Routing of the demo model on texts of nine domains: made once, kept in a cache folder.

    COTERIE_DATA=FOLDER python -m benchmarks.domain_traces OUT.npz [--prompts 40]

As `coterie profile --trace` does, one prompt at a time, greedy; beside the experts the file says of
each document its domain, how many rows are prompt, and its text. Texts are drawn by seed from
$COTERIE_DATA/domains/DOMAIN/*.jsonl ({"prompt", "answer"} or {"text"}), the same number from each
file of a domain as far as it goes, cut to at most PROMPT_TOKENS tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.errors import SettingsError

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
PROMPTS = 40
"""Texts of each domain."""
PROMPT_TOKENS = 64
NEW_TOKENS = 48
_CHARS = 1200


def domain_texts(folder: Path, number: int, seed: int = 0) -> dict[str, list[str]]:
    """`number` texts of each domain, by its name. Raises SettingsError where there are too few."""
    texts: dict[str, list[str]] = {}
    for domain in sorted(path for path in folder.glob("*") if path.is_dir()):
        draw = np.random.default_rng([seed, len(texts)])
        files = []
        for path in sorted(domain.glob("*.jsonl")):
            # Not splitlines: texts hold characters that it takes for ends of lines.
            lines = [x for x in path.read_text(encoding="utf-8").split("\n") if x.strip()]
            files.append([lines[at] for at in draw.permutation(len(lines)).tolist()])
        found: list[str] = []
        while len(found) < number and any(files):
            for lines in files:
                if lines and len(found) < number:
                    text = _text(lines.pop())
                    if len(text) >= 40 and text not in found:
                        found.append(text)
        if len(found) < number:
            raise SettingsError(f"{domain}: expected {number} texts, found {len(found)}")
        texts[domain.name] = found
    if len(texts) < 2:
        raise SettingsError(f"{folder}: expected a folder for each domain, found {len(texts)}")
    return texts


def _text(line: str) -> str:
    record = json.loads(line)
    parts = [str(record[name]) for name in ("text", "prompt", "answer") if record.get(name)]
    return "\n".join(parts)[:_CHARS].replace("\ufeff", "")


def make_traces(model: Path, texts: dict[str, list[str]], out: Path) -> None:
    """Run every text through the model, all experts resident, and save what its routers chose."""
    from transformers.utils import logging

    from deployments.model_files import open_tokenizer
    from engine.engine import Engine
    from engine.profile import Profiler

    logging.disable_progress_bar()
    tokenizer = open_tokenizer(model)
    engine = Engine.open(model, engine={"threads": 1, "max_sequences": 1, "kv_memory": "64MiB"})
    try:
        profiler = Profiler(engine)
        documents, domains, prompt_rows, kept = [], [], [], []
        for domain, text in _interleaved(texts):
            cut = _cut(tokenizer, text)
            ids = tokenizer.encode(cut, add_special_tokens=True).ids
            run = profiler.run(domain, list(ids), NEW_TOKENS)
            documents.append(run.expert_ids)
            domains.append(domain)
            prompt_rows.append(len(ids))
            kept.append(cut)
            if len(kept) % 20 == 0:
                _say(f"{out.name}: {len(kept)} of {sum(map(len, texts.values()))} texts")
        lengths = [len(document) for document in documents]
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part.npz")
        np.savez_compressed(
            part,
            expert_ids=np.concatenate(documents),
            doc_offsets=np.cumsum([0, *lengths[:-1]]),
            num_experts=np.array(profiler.num_experts),
            domains=np.array(domains),
            prompt_rows=np.array(prompt_rows),
            texts=np.array(kept),
        )
        part.replace(out)
    finally:
        engine.close()


def ensure_traces(cache: Path, data: Path, prompts: int = PROMPTS) -> Path:
    """The file for the demo model, made where it is missing: minutes, once."""
    path = cache / f"demo-domains-{prompts}.npz"
    if not path.is_file():
        _say(f"making {path}, once: {prompts} texts of each domain through the demo model")
        make_traces(DEMO_MODEL, domain_texts(data / "domains", prompts), path)
    return path


def data_folder() -> Path:
    """$COTERIE_DATA. Raises SettingsError where it is not set."""
    data = os.environ.get("COTERIE_DATA")
    if not data:
        raise SettingsError("set COTERIE_DATA to the folder that holds routing, traces and domains")
    return Path(data)


def cache_folder() -> Path:
    """Where traces are kept unless told otherwise."""
    return Path(os.environ.get("COTERIE_CACHE", "~/.cache/coterie")).expanduser() / "traces"


def _interleaved(texts: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    for row in zip(*texts.values(), strict=True):
        yield from zip(texts, row, strict=True)


def _cut(tokenizer: object, text: str) -> str:
    """The beginning of a text that is PROMPT_TOKENS tokens at most."""
    encoding = tokenizer.encode(text, add_special_tokens=True)  # type: ignore[attr-defined]
    if len(encoding.ids) <= PROMPT_TOKENS:
        return text
    end = encoding.offsets[PROMPT_TOKENS - 1][1]
    while len(tokenizer.encode(text[:end], add_special_tokens=True).ids) > PROMPT_TOKENS:  # type: ignore[attr-defined]
        end -= 1
    return text[:end]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="texts of each domain")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = domain_texts(data_folder() / "domains", options.prompts, options.seed)
    make_traces(options.model, texts, options.out)


if __name__ == "__main__":
    main()
