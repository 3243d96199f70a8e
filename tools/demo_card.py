"""The demo model's card: what it is, what it learned from and what was measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

HEADER = """---
license: apache-2.0
language: [en, zh]
pipeline_tag: text-generation
library_name: transformers
tags: [qwen3_moe, mixture-of-experts, demo]
---

# Coterie demo model

A very small Qwen3-MoE model for trying out and testing Coterie without a download:
{layers}.
It has {parameters:.1f} million parameters and {megabytes:.1f} MB in bf16. It writes text in the
manner of nine domains and its experts are used differently by each of them, which is what
it is for. **It knows nothing reliable**: its medical, legal, financial and mathematical
statements are made up and must not be used. It was trained on at most 512 tokens at a time;
the text gets worse beyond that, although more positions are accepted.

The weights are under the Apache License 2.0.

## Training

`tools/train_demo_model.py` trained it{trained} on one CPU thread, on the training part of the
sources below: matrices with Muon, the rest with AdamW; a small balance loss and a small reward
for telling domains apart in the choice of experts (mutual information of expert and domain), both
over batches in which all domains are mixed. Documents are chats in the template of
`chat_template.jinja` and plain texts, so both kinds of request make sense. Customer and
small-talk requests had no answers in the sources; theirs were composed from the intent labels
by `tools/demo_replies.py`. About 5 % of the records, chosen by a hash of their opening words,
were held out; held-out records whose lines also stand in training records were dropped.
{notes}"""


def source_rows(path: Path, used: set[str]) -> list[tuple[str, str, str, str]]:
    """Domain, data set, repository and licence of every source in use, merged by repository."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] in used:
                key = (row["domain"], row["repository"], row["licence"])
                merged.setdefault(key, []).append(row["source"])
    return [(d, ", ".join(names), repo, lic) for (d, repo, lic), names in sorted(merged.items())]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def _quote(text: str, limit: int = 320) -> str:
    short = text if len(text) <= limit else text[:limit].rstrip() + " …"
    return "\n".join("> " + line for line in (short or "(nothing)").replace("<", "\\<").split("\n"))


def heldout_section(figures: dict[str, Any]) -> str:
    """Perplexity against a unigram model."""
    rows = []
    for name, row in figures["domains"].items():
        trained, plain = row["as trained"], row["plain text"]
        rows.append(
            [
                name, str(row["records"]), f"{trained['tokens']:,}",
                f"**{trained['perplexity']}**", str(trained["unigram"]),
                f"**{plain['perplexity']}**", str(plain["unigram"]),
            ]
        )  # fmt: skip
    head = [
        "domain", "records", "tokens", "perplexity", "unigram",
        "perplexity, plain text", "unigram, plain text",
    ]  # fmt: skip
    return (
        "## Held-out perplexity\n\nPer token of the model's own tokenizer; each record starts a "
        "new context and counts up to 512 tokens. The unigram model is the smoothed token "
        "frequency of the same domain's training part. *As trained* (the first two) mixes chats "
        "and plain texts and includes the template's tokens and composed replies, which are easy; "
        "*plain text* is the records' own words only.\n\n" + _table(head, rows)
    )


def overlap_section(figures: dict[str, Any]) -> str:
    """The matrix of shared top experts."""
    names = list(figures["domains"])
    pairs = figures["overlap"]

    def cell(one: str, two: str) -> str:
        if one == two:
            return "—"
        return f"{pairs.get(f'{one}/{two}', pairs.get(f'{two}/{one}', 0.0)):.2f}"

    rows = [[one, *(cell(one, two) for two in names)] for one in names]
    return (
        "## Experts by domain\n\nShare of common experts among the eight that two domains use "
        f"most, mean over layers (chance: 0.25). Mean over pairs: **{figures['overlap_mean']}**. "
        f"Of {figures['experts']} experts, {figures['dead_experts']} were never chosen on the "
        f"held-out records; the least used one got {figures['least_used_share']:.2%} of its "
        "layer's choices (even: 3.1 %).\n\n" + _table(["", *names], rows)
    )


def sample_section(figures: dict[str, Any], per_domain: int = 3) -> str:
    """Classifier result and a few unselected samples of every domain."""
    verdict = figures["classifier"]
    rows = [[k, f"{v:.0%}"] for k, v in verdict["by_domain"].items()]
    parts = [
        "## Samples\n\nA naive Bayes classifier on character n-grams, trained on the training "
        f"part, named the right domain for **{verdict['right']:.0%}** of {verdict['samples']} "
        "samples from the answer alone (for "
        f"{verdict['heldout_records_right']:.0%} of real held-out records). Sampled with the "
        "settings of `generation_config.json`, at most 100 tokens.\n\n"
        + _table(["domain", "named right"], rows),
        "The first samples of each domain, not selected:\n",
    ]
    for name in figures["domains"]:
        parts.append(f"### {name}\n")
        mine = [s for s in figures["samples"] if s["domain"] == name]
        chosen = [s for s in mine if s["kind"] == "chat"][::2][: per_domain - 1]
        chosen += [s for s in mine if s["kind"] == "plain"][:1]
        for sample in chosen:
            prompt = sample["prompt"].strip().replace("\n", " ⏎ ")
            parts.append(f"{sample['kind'].capitalize()}: `{prompt}`\n")
            parts.append(_quote(sample["answer"]) + "\n")
    return "\n".join(parts)


def write_card(
    path: Path,
    figures: dict[str, Any],
    sources: Path | None,
    used: set[str],
    trained: dict[str, Any],
    notes: str = "",
) -> None:
    """Write the card; ``sources`` is a CSV with domain, source, repository and licence.

    ``notes`` is what is particular to this run; it ends the section on training.
    """
    run = ""
    if trained:
        run = (
            f" for {trained['steps']:,} steps ({trained['tokens'] / 1e6:.1f} million tokens, "
            f"{trained['minutes']:.0f} minutes)"
        )
    text = HEADER.format(
        layers="6 layers, width 192, 32 experts of width 64 of which 4 are used, 4,096 tokens",
        parameters=figures["parameters"] / 1e6,
        megabytes=figures["bytes"] / 1e6,
        trained=run,
        notes=f"\n{notes.strip()}\n" if notes else "",
    )
    parts = [text]
    if sources:
        rows = [list(row) for row in source_rows(sources, used)]
        parts.append(
            "## Data sources\n\nNo training text is part of this repository.\n\n"
            + _table(["domain", "data sets", "repository", "licence"], rows)
        )
    parts += [heldout_section(figures), overlap_section(figures), sample_section(figures)]
    made = path.with_suffix(".part")
    made.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    made.replace(path)
