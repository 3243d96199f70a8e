"""`coterie profile`: which experts your prompts use, how fast, and what that means for a pool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from app.commands.options import settings_command
from app.plain_console import plain_console
from app.profile_groups import REPEATS, groups
from app.profile_report import ProfileReport
from app.settings_sources import LoadedSettings
from core.errors import CoterieError, SettingsError
from expert_pool.model_location import locate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTHS = (32, 256, 2048)


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that make one row."""

    label: str
    prompt_tokens: int | None
    prompts: list[list[int]]


def _profile(
    loaded: LoadedSettings,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE.jsonl", help='Lines {"text": ..., "label": ...}.'),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT.npz", help="For `coterie replay`.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Heat maps and curves.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generated after each prompt.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each bundled group.")] = REPEATS,
    bundled: Annotated[
        bool, typer.Option("--bundled/--no-bundled", help="Run the four bundled groups too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run prompts one by one and report which experts they use, how fast, and from where.

    Your own prompts are grouped by label, at their own length and cut to 32, 256 and 2,048
    tokens. Four bundled groups follow: minimal, long context, code, perturbed. Nothing is served;
    Ray is not started.

    \b
      coterie profile ./demo_model
      coterie profile MODEL --prompts mine.jsonl --expert-memory 25% --html heat.html
      coterie profile MODEL --prompts mine.jsonl --no-bundled --trace mine.npz --json
    """
    from transformers.utils import logging

    from deployments.model_files import open_tokenizer
    from engine.engine import Engine
    from engine.profile import Profiler

    logging.disable_progress_bar()
    settings = loaded.settings
    folder = locate(settings.model)
    texts = read_prompts(prompts) if prompts is not None else {}
    if not texts and not bundled:
        raise SettingsError("nothing to run: give --prompts, or leave --no-bundled out")
    tokenizer = open_tokenizer(folder)
    engine = Engine(folder, settings.engine, settings.pool)
    try:
        profiler = Profiler(engine)
        room = engine.limits.context_tokens - new_tokens
        if room < 1:
            raise SettingsError(f"--new-tokens {new_tokens} leaves no room for a prompt")
        layers = engine.pool.index.layers
        report = ProfileReport(profiler.num_experts, max(layer.top_k for layer in layers))
        todo = list(_groups(tokenizer, texts, groups(repeats) if bundled else {}, room))
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("prompts", total=sum(len(group.prompts) for group in todo))
            for group in todo:
                runs = []
                for ids in group.prompts:
                    runs.append(profiler.run(group.label, ids, new_tokens))
                    bar.advance(task)
                report.add(group.label, group.prompt_tokens, runs)
        if trace is not None:
            profiler.recorder.save(trace, profiler.num_experts)
    finally:
        engine.close()
    if html is not None:
        from app.profile_page import page

        html.write_text(page(f"Experts of {folder.name}", report), encoding="utf-8")
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)


def read_prompts(path: Path) -> dict[str, list[str]]:
    """Texts by label. Raises CoterieError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"{path}: cannot be read: {error}") from error
    texts: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise CoterieError(f"{path}, line {number}: not JSON: {error}") from error
        text = entry.get("text", entry.get("prompt")) if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise CoterieError(
                f'{path}, line {number}: expected {{"text": "...", "label": "..."}} with a text '
                "that is not empty"
            )
        texts.setdefault(str(entry.get("label", "prompts")), []).append(text)
    if not texts:
        raise CoterieError(f"{path}: holds no prompts")
    return texts


def _groups(
    tokenizer: Tokenizer, own: dict[str, list[str]], bundled: dict[str, list[str]], room: int
) -> Iterator[Group]:
    for label, texts in {**own, **bundled}.items():
        encoded = tokenizer.encode_batch(texts, add_special_tokens=True)
        prompts = [list(encoding.ids)[:room] for encoding in encoded if encoding.ids]
        if prompts:
            yield Group(label, None, prompts)
        if label not in own:
            continue
        for length in LENGTHS:
            cut = [ids[:length] for ids in prompts if len(ids) >= length]
            if cut:
                yield Group(label, length, cut)


def _print(report: ProfileReport) -> None:
    console = plain_console()
    if not console.is_terminal:
        console.width = 140
    table = Table("prompts", box=None, pad_edge=False)
    heads = ("tokens", "runs", "experts used", "entropy", "top 10 %", "top 30 %")
    for head in (*heads, "TTFT ms p50/p95", "TPOT ms p50/p95", "MB a token", "memory MB"):
        table.add_column(head, justify="right")
    for row in report.rows:
        table.add_row(
            row.label,
            "own" if row.prompt_tokens is None else str(row.prompt_tokens),
            str(row.runs),
            f"{row.sequence_activation_mean:.1%} ({row.sequence_activation_least:.0%}"
            f"-{row.sequence_activation_most:.0%})",
            f"{row.router_entropy:.3f}",
            f"{row.top_10_share:.1%}",
            f"{row.top_30_share:.1%}",
            f"{row.ttft_ms_p50:.0f}/{row.ttft_ms_p95:.0f}",
            f"{row.tpot_ms_p50:.1f}/{row.tpot_ms_p95:.1f}",
            f"{row.bytes_a_token / 1e6:.2f}",
            f"{row.memory_bytes / 1e6:.0f}",
        )
    console.print(table)
    for sentence in report.reading():
        console.print(f"- {sentence}")


profile = settings_command(_profile)
