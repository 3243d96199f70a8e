"""`coterie domains`: teach a classifier of domains, test it, and let a service take it up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from app.commands.admin import Address, App, Url, ask_all
from app.domain_records import HELD_OUT, PARTS, Record, RecordError, read_records
from app.domain_records import Progress as Note
from app.local_service import APPLICATION
from app.plain_console import plain_console, print_whole
from app.running_service import connected
from core.errors import CoterieError
from deployments.domain_weights import BUNDLED, DomainWeights

if TYPE_CHECKING:
    from app.domain_report import CutReport

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help='JSON lines {"text", "label"}, or a folder of DOMAIN/*.jsonl.'
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def train(
    data: Data,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.safetensors", help="Where the weights go.")
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a classifier on labelled texts, and test it on a tenth that it never saw.

    Lines are {"text", "label"}: "prompt" may stand for "text", "answer" may go with it, and
    "group" names where a text comes from. Texts of one group, and texts that share half of what
    they say, are held out together or not at all. Texts labelled "unknown" are of no domain. The
    same data and seed give the same weights. Needs `pip install "coterie[train]"`.

    \b
      coterie domains train texts.jsonl --out mine.safetensors
      coterie serve MODEL --set domains.classifier=mine.safetensors
    """
    from app.domain_report import report
    from app.domain_training import train as fit
    from deployments.domain_classifier import DomainClassifier

    with _progress() as note:
        records = read_records(data, note)
        held_out = _held_out(records)
        try:
            # Refused now, not after the training.
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.is_dir() or not os.access(out.parent, os.W_OK):
                raise CoterieError(f"{out} cannot be written: expected a file in a folder of yours")
            weights = fit(records, seed, note)
            weights.write(out)
        except OSError as error:
            raise CoterieError(f"{out} cannot be written: {error.strerror or error}") from error
        # What is tested is the file.
        reports = report(DomainClassifier(DomainWeights.read(out)), held_out, note)
    if as_json:
        print(json.dumps(_as_json(out, weights, reports)))
        return
    print(f"{out}: {out.stat().st_size} bytes, trained on {weights.facts}")
    print(f"on the {len(held_out)} records held out:\n")
    _print(reports)


def test(
    data: Data,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Left out: the bundled ones.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only the tenth that training held out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Test a classifier on labelled texts: right guesses by domain, also of first characters only.

    A text that is not guessed at counts as wrong. "calibration error" is how far the confidence of
    guesses is from the share that is right.

    \b
      coterie domains test texts.jsonl
      coterie domains test texts.jsonl --weights mine.safetensors --held-out --json
    """
    from app.domain_report import report
    from deployments.domain_classifier import DomainClassifier

    path = weights or BUNDLED
    read = DomainWeights.read(path)
    with _progress() as note:
        records = read_records(data, note)
        chosen = _held_out(records) if held_out else records
        reports = report(DomainClassifier(read), chosen, note)
    if as_json:
        print(json.dumps(_as_json(path, read, reports)))
        return
    print(f"{path}, on {len(chosen)} records:\n")
    _print(reports)


def guess(
    text: Annotated[str, typer.Argument(help="What a user might ask.")],
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Left out: the bundled ones.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which domain a text belongs to, with the probabilities of all.

    \b
      coterie domains guess "My card was charged twice"
    """
    from deployments.domain_classifier import DomainClassifier
    from deployments.domain_settings import UNKNOWN

    classifier = DomainClassifier(DomainWeights.read(weights or BUNDLED))
    row = classifier.probabilities(text)
    found = classifier.verdict(row)
    shares = dict(zip([*classifier.labels, UNKNOWN], row.tolist(), strict=True))
    if as_json:
        rounded = {name: round(share, 4) for name, share in shares.items()}
        print(json.dumps({"domain": found.domain or UNKNOWN, "probabilities": rounded}))
        return
    console = plain_console()
    console.print(found.domain or UNKNOWN, style="bold")
    for name, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        console.print(f"{share:7.2%}  {name}")


def reload(url: Url = None, address: Address = None, app: App = APPLICATION) -> None:
    """Let a running service read its classifier's file again; requests go on meanwhile.

    The new one takes the old one's place at once, or not at all where it cannot be read.
    """
    with connected(url, address):
        from deployments.application import GATEWAY

        answers = ask_all(app, GATEWAY, "reload_domains")
    refused = [answer for answer in answers if isinstance(answer, str)]
    if refused:
        raise CoterieError(
            f"{len(refused)} of {len(answers)} gateways keep their old classifier: {refused[0]}"
        )
    labels = ", ".join(answers[0]) if answers and answers[0] else "none: the classifier is off"
    print(f"{len(answers)} gateways, domains: {labels}")


def _held_out(records: list[Record]) -> list[Record]:
    found = [record for record in records if record.part == HELD_OUT]
    if not found:
        raise RecordError(
            f"expected records in the tenth of groups that is held out, found none among "
            f"{len(records)}: they have few groups, of which one in {PARTS} is held out"
        )
    return found


def _as_json(path: Path, weights: DomainWeights, reports: list[CutReport]) -> dict[str, object]:
    return {
        "weights": str(path),
        "labels": weights.labels,
        "temperature": weights.temperature,
        "threshold": weights.threshold,
        "facts": weights.facts,
        "reports": [each.as_json() for each in reports],
    }


def _print(reports: list[CutReport]) -> None:
    from app.domain_report import tables

    scores, confusion = tables(reports)
    print_whole(scores)
    print("\nwhole texts, label by guess:\n")
    print_whole(confusion)


@contextmanager
def _progress() -> Iterator[Note]:
    """Bars on stderr, one for each thing that is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        tasks: dict[str, int] = {}

        def note(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = int(progress.add_task(what, total=total))
            progress.update(progress.task_ids[tasks[what]], completed=done, total=total)

        yield note
