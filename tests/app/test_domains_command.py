"""`coterie domains`: trained on texts, tested on what it never saw, the same every time."""

from __future__ import annotations

import builtins
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import domain_training
from app.cli import GROUPS, main
from app.domain_records import HELD_OUT, Record, read_records
from app.domain_report import calibration_error, report
from app.domain_training import fitted_temperature, fitted_threshold, train
from app.domain_views import Nothing
from deployments.domain_classifier import DomainClassifier, calibrated
from deployments.domain_weights import BUNDLED, DomainWeights
from tests.app.synthetic_domains import lines, write_lines

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["domains", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", lines())


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    train(read_records(data), 0, quietly).write(path)
    return path


def quietly(what: str, done: int, total: int) -> None:
    assert what and 0 <= done <= total


@pytest.mark.parametrize("command", GROUPS["domains"][1])
def test_each_command_teaches_by_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    if command != "reload":
        assert out.count(f"coterie domains {command}") >= 2


def test_training_writes_weights_and_tells_how_well_they_do_on_the_tenth_held_out(
    run: Run, data: Path, weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "w.safetensors"
    code, printed, errors = run("train", str(data), "--out", str(out), "--json")
    assert code == 0, errors
    told = json.loads(printed)
    assert told["labels"] == ["garden", "music", "sailing"]
    whole = told["reports"][0]
    held_out = [record for record in read_records(data) if record.part == HELD_OUT]
    assert whole["chars"] is None and whole["texts"] == len(held_out)
    assert whole["accuracy"] >= 0.9 and set(whole["domains"]) == set(told["labels"])
    # The same data and seed give the same bytes.
    assert out.read_bytes() == weights.read_bytes()


def test_texts_held_out_are_not_looked_at(data: Path, weights: Path) -> None:
    # Were they, other texts in their place would give other weights.
    records = [
        record if record.part != HELD_OUT else Record("else", record.label, "", record.group)
        for record in read_records(data)
    ]
    other, kept = train(records, 0, quietly), DomainWeights.read(weights)
    assert np.array_equal(other.weights, kept.weights)
    assert (other.temperature, other.threshold) == (kept.temperature, kept.threshold)


def test_people_get_tables(run: Run, data: Path, weights: Path) -> None:
    code, printed, _ = run("test", str(data), "--weights", str(weights), "--held-out")
    assert code == 0
    for part in ("garden", "first 100", "calibration error", "no guess", "label by guess"):
        assert part in printed


def test_a_test_counts_texts_of_no_domain_and_refuses_labels_that_the_weights_lack(
    run: Run, weights: Path, tmp_path: Path
) -> None:
    texts = [*lines(5, seed=9), {"text": "qwxz plorf gnurtle", "label": "unknown"}]
    path = write_lines(tmp_path / "x.jsonl", texts)
    code, printed, _ = run("test", str(path), "--weights", str(weights), "--json")
    whole = json.loads(printed)["reports"][0]
    assert code == 0 and whole["texts"] == 16 and "unknown" in whole["domains"]
    assert sum(sum(row.values()) for row in whole["confusion"].values()) == 16
    write_lines(path, [*texts, {"text": "x", "label": "weather"}])
    code, _, errors = run("test", str(path), "--weights", str(weights))
    assert code == 1 and "expected texts labelled garden, music, sailing, unknown" in errors
    assert "found weather" in errors


def test_one_text_is_guessed(run: Run, weights: Path) -> None:
    text = "how do I prune the rose hedge before frost"
    code, printed, _ = run("guess", text, "--weights", str(weights), "--json")
    told = json.loads(printed)
    assert code == 0 and told["domain"] == "garden"
    assert abs(sum(told["probabilities"].values()) - 1) < 1e-3


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([{"text": "a", "label": "one"}] * 3, "at least 2 labels"),
        (lines(6), "at least 10 texts of each label"),
    ],
)
def test_too_few_texts_are_refused(
    run: Run, tmp_path: Path, made: list[dict[str, str]], said: str
) -> None:
    # Each in a group of its own, so that some are held out.
    grouped = [{**line, "group": str(number)} for number, line in enumerate(made)]
    path = write_lines(tmp_path / "x.jsonl", grouped)
    code, _, errors = run("train", str(path), "--out", str(tmp_path / "w"))
    assert code == 1 and errors.startswith("error: ") and not (tmp_path / "w").exists()
    assert said in errors or "found none among" in errors


def test_texts_of_one_origin_that_is_held_out_are_refused(run: Run, tmp_path: Path) -> None:
    group = next(name for name in map(str, range(999)) if Record("", "", "", name).part == HELD_OUT)
    made = [{**line, "group": group} for line in lines(20)]
    path = write_lines(tmp_path / "x.jsonl", made)
    code, _, errors = run("train", str(path), "--out", str(tmp_path / "w"))
    assert code == 1 and "give texts of different origin different groups" in errors


def test_weights_that_cannot_be_read_are_one_line(run: Run, data: Path, tmp_path: Path) -> None:
    code, _, errors = run("test", str(data), "--weights", str(tmp_path / "none"))
    assert code == 1 and errors.count("\n") == 1 and "No such file" in errors


def test_without_scikit_learn_the_error_names_the_extra(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name)

    monkeypatch.setattr(domain_training, "import_module", missing)
    code, _, errors = run("train", str(data), "--out", str(tmp_path / "w.safetensors"))
    assert code == 1 and 'pip install "coterie[train]"' in errors and "sklearn" in errors


def test_running_a_service_needs_no_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *rest: Any, **more: Any) -> Any:
        assert not name.startswith(("sklearn", "scipy")), name
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", guarded)
    classifier = DomainClassifier(DomainWeights.read(BUNDLED))
    assert classifier.guess("My card was charged twice, I want a refund").domain


def test_the_temperature_makes_overconfident_scores_right_as_often_as_they_say() -> None:
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(4000, 3)) * 2
    shares = calibrated(scores, 1.0)
    known = np.array([draw.choice(3, p=row) for row in shares])
    assert abs(fitted_temperature(scores, known) - 1.0) < 0.1
    assert abs(fitted_temperature(3 * scores, known) - 3.0) < 0.3
    sure = shares.max(axis=1)
    assert calibration_error(sure, shares.argmax(axis=1) == known) < 0.03
    assert calibration_error(np.ones(10), np.arange(10) < 5) == 0.5


def test_the_threshold_lies_over_what_fools_and_under_what_is_right() -> None:
    nothing = np.array([[0.5, 0.1, 0.4], [0.1, 0.2, 0.7]] * 50)
    right = np.array([[0.9, 0.05, 0.05]] * 100)
    rows, known = np.vstack([nothing, right]), np.array([2] * 100 + [0] * 100)
    assert fitted_threshold(rows, known) == 0.5
    unsure = np.array([[0.45, 0.3, 0.25]] * 100)
    assert fitted_threshold(np.vstack([nothing, unsure]), known) == 0.45


def test_texts_of_nothing_are_of_no_language_that_is_a_domain() -> None:
    import random

    russian = ["съешь ещё этих мягких французских булок да выпей чаю"] * 20
    german = ["und der Hund ist nicht auf dem Dach, er hat sich bei uns"] * 20
    every = Nothing(["the cat sat on the mat with a hat and a bat"] * 20, random.Random(0))
    fewer = Nothing(russian + german, random.Random(0))
    assert (0x0400, 0x0460) in every._scripts and (0x0400, 0x0460) not in fewer._scripts
    assert any("und" in words for words in every._languages)
    assert not any("und" in words for words in fewer._languages)
    assert all(isinstance(every.text(), str) for _ in range(200))


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set")
def test_the_bundled_classifier_is_right_on_the_tenth_that_it_never_saw() -> None:
    records = read_records(Path(os.environ["COTERIE_DATA"]) / "domains")
    held_out = [record for record in records if record.part == HELD_OUT]
    whole, first_300, first_100 = report(
        DomainClassifier(DomainWeights.read(BUNDLED)), held_out, quietly
    )
    assert whole.texts > 5000 and len(whole.domains) == 9
    assert whole.accuracy >= 0.97 and whole.calibration_error <= 0.02
    assert min(score.accuracy for score in whole.domains.values()) >= 0.9
    assert first_300.accuracy >= 0.96 and first_100.accuracy >= 0.94


def test_a_file_that_cannot_be_written_is_told_before_the_training(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domain_training, "train", lambda *_: pytest.fail("it trained"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "w.safetensors", tmp_path):
        code, _, errors = run("train", str(data), "--out", str(out))
        assert code == 1 and "cannot be written" in errors
