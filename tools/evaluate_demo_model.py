"""Measure an exported demo model on the held-out records and write its model card."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo_card import write_card
from tools.demo_classifier import DomainClassifier
from tools.demo_corpus import BEGIN, END, STOP, Record, read_corpus, renderings, split
from tools.demo_measure import (
    ExpertUse,
    generate,
    perplexity,
    score,
    top_overlap,
    unigram_loss,
)
from tools.demo_prompts import CHAT, PLAIN

FORMS = ("as trained", "plain text")


def strip_marks(text: str) -> str:
    """A document without the chat template's marks and role names."""
    for mark in (STOP, END, *(f"{BEGIN}{role}\n" for role in ("system", "user", "assistant"))):
        text = text.replace(mark, "")
    return text


def documents(records: list[Record], form: str) -> list[str]:
    """The records as training documents, or as plain text only."""
    if form == "plain text":
        return [record.body + STOP for record in records]
    return list(renderings(records, 0))


def measure_heldout(
    model: Any, tokenizer: Any, parts: dict[str, tuple[list[Record], list[Record]]]
) -> dict[str, Any]:
    """Perplexities, unigram perplexities, overlaps and unused experts."""
    use = ExpertUse(model)
    stop = tokenizer.convert_tokens_to_ids(STOP)
    rows: dict[str, dict[str, Any]] = {}
    loads = {}
    for name, (train, heldout) in parts.items():
        row: dict[str, Any] = {"records": len(heldout)}
        for form in FORMS:
            ids = tokenizer(documents(heldout, form), add_special_tokens=False)["input_ids"]
            known = tokenizer(documents(train, form), add_special_tokens=False)["input_ids"]
            loss, count = score(model, ids, stop, use)
            if form == FORMS[0]:
                loads[name] = use.take()
            use.take()
            base = unigram_loss(known, ids, len(tokenizer))
            row[form] = {
                "tokens": count,
                "perplexity": round(perplexity(loss, count), 2),
                "unigram": round(perplexity(base, count), 1),
            }
        rows[name] = row
    use.close()
    pairs = {
        f"{one}/{two}": round(top_overlap(loads[one], loads[two]), 3)
        for one, two in itertools.combinations(loads, 2)
    }
    whole = torch.stack(list(loads.values())).sum(0)
    return {
        "domains": rows,
        "overlap": pairs,
        "overlap_mean": round(sum(pairs.values()) / max(1, len(pairs)), 3),
        "dead_experts": int((whole == 0).sum()),
        "experts": whole.numel(),
        "least_used_share": round(float((whole / whole.sum(1, keepdim=True)).min()), 5),
    }


def make_samples(model: Any, tokenizer: Any, length: int, seed: int) -> list[dict[str, str]]:
    """Two samples of each chat prompt and each plain prompt."""
    samples = []
    for domain in CHAT:
        asked = [("chat", p) for p in CHAT[domain]] + [("plain", p) for p in PLAIN[domain]]
        asked = [pair for pair in asked for _ in range(2)]
        rendered = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
            )
            if kind == "chat"
            else p
            for kind, p in asked
        ]
        texts = generate(model, tokenizer, rendered, length, seed)
        samples += [
            {"domain": domain, "kind": kind, "prompt": p, "answer": text}
            for (kind, p), text in zip(asked, texts, strict=True)
        ]
    return samples


def judge(
    samples: list[dict[str, str]], parts: dict[str, tuple[list[Record], list[Record]]], seed: int
) -> dict[str, Any]:
    """How often the classifier names the right domain of a sample's answer alone."""
    texts: dict[str, list[str]] = {}
    for name, (train, _) in parts.items():
        texts[name] = [strip_marks(text) for text in renderings(train, seed)]
    classifier = DomainClassifier()
    classifier.fit(texts)
    right: dict[str, list[bool]] = {name: [] for name in parts}
    for sample in samples:
        sample["named"] = classifier.classify(sample["answer"])
        right.setdefault(sample["domain"], []).append(sample["named"] == sample["domain"])
    control = []
    for name, (_, heldout) in parts.items():
        some = random.Random(seed).sample(heldout, min(60, len(heldout)))
        control += [classifier.classify(strip_marks(t)) == name for t in renderings(some, seed)]
    flat = [hit for hits in right.values() for hit in hits]
    return {
        "samples": len(flat),
        "right": round(sum(flat) / max(1, len(flat)), 3),
        "by_domain": {k: round(sum(v) / max(1, len(v)), 3) for k, v in right.items()},
        "heldout_records_right": round(sum(control) / max(1, len(control)), 3),
    }


def main(
    model_folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The exported model.")],
    folder: Annotated[Path, typer.Argument(help="The folder it was trained on.")],
    card: Annotated[Path | None, typer.Option(help="Write the model card here.")] = None,
    sources: Annotated[Path | None, typer.Option(help="CSV of data sources, for the card.")] = None,
    training: Annotated[Path | None, typer.Option(help="The trainer's JSON, for the card.")] = None,
    notes: Annotated[Path | None, typer.Option(help="Text about this run, for the card.")] = None,
    length: Annotated[int, typer.Option(help="Most tokens of a sample.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure a demo model: perplexity, expert overlap, samples and their domains.

    Example: evaluate_demo_model.py demo_model domains --card demo_model/README.md --json
    """
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    parts = {name: split(records) for name, records in read_corpus(folder).items()}
    figures = measure_heldout(model, tokenizer, parts)
    samples = make_samples(model, tokenizer, length, seed)
    figures["classifier"] = judge(samples, parts, seed)
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    figures["bytes"] = sum(p.stat().st_size for p in model_folder.iterdir() if p.is_file())
    figures["samples"] = samples
    if card:
        used = {r.source for train, _ in parts.values() for r in train}
        trained = json.loads(training.read_text()) if training else {}
        about = notes.read_text(encoding="utf-8") if notes else ""
        write_card(card, figures, sources, used, trained, about)
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    table = Table("domain", *(f"{form}: perplexity / unigram" for form in FORMS), "named right")
    for name, row in figures["domains"].items():
        cells = [f"{row[form]['perplexity']} / {row[form]['unigram']}" for form in FORMS]
        table.add_row(name, *cells, f"{figures['classifier']['by_domain'][name]:.0%}")
    Console().print(table)
    Console().print(
        f"mean overlap {figures['overlap_mean']}, unused experts {figures['dead_experts']}, "
        f"samples named right {figures['classifier']['right']:.0%}"
    )


if __name__ == "__main__":
    typer.run(main)
