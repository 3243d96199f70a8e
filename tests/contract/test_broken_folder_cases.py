"""Model folders with one wrong file or value: the start is refused, before Ray, and names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.preflight import check_models
from app.settings import Settings
from core.errors import CheckpointError
from deployments.model_files import chat_template
from deployments.ray_environment import source_folder

DEMO = Path(source_folder()) / "demo_model"
Break = Callable[[Path], Any]


def entry(file: str, name: str, value: Any) -> Break:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps({**found, name: value}), encoding="utf-8")

    return change


def content(file: str, data: bytes) -> Break:
    return lambda folder: (folder / file).write_bytes(data)


CONFIG, GENERATION = "config.json", "generation_config.json"
BROKEN = [
    pytest.param(entry(CONFIG, "num_experts", "32"), CONFIG, id="text for a number"),
    pytest.param(entry(CONFIG, "hidden_size", None), CONFIG, id="null for a number"),
    pytest.param(entry(CONFIG, "num_key_value_heads", 0), "configuration", id="no heads"),
    pytest.param(entry(CONFIG, "num_experts_per_tok", 0), "top_k 0", id="no experts a token"),
    pytest.param(entry(CONFIG, "num_experts_per_tok", 99), "shape", id="more than all experts"),
    pytest.param(entry(CONFIG, "max_position_embeddings", 0), "embeddings 0", id="no context"),
    pytest.param(entry(GENERATION, "eos_token_id", ["x"]), "eos_token_id", id="text as token id"),
    pytest.param(entry(GENERATION, "temperature", "hot"), GENERATION, id="text as temperature"),
    pytest.param(entry(GENERATION, "temperature", -1), GENERATION, id="negative temperature"),
    pytest.param(content(GENERATION, b'{"top_p": NaN}'), GENERATION, id="top_p is not a number"),
    pytest.param(entry(GENERATION, "repetition_penalty", 0), GENERATION, id="penalty 0"),
    pytest.param(
        content("chat_template.jinja", b"\xff\xfe"), "chat_template", id="binary template"
    ),
    pytest.param(content("tokenizer.json", b"{}"), "tokenizer.json", id="empty tokenizer"),
    pytest.param(
        content("tokenizer_config.json", b"[]"), "tokenizer_config", id="list of settings"
    ),
    pytest.param(lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", id="no tokenizer"),
]


@pytest.mark.parametrize(("break_it", "named"), BROKEN)
def test_a_folder_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, break_it: Break, named: str
) -> None:
    """Some were a traceback; some a service whose every request failed, or none at all."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    break_it(folder)
    with pytest.raises(CheckpointError, match=named):
        check_models(Settings.model_validate({"model": str(folder)}), [folder])


def test_values_that_mean_nothing_are_left_to_their_defaults(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    harmless = {"temperature": None, "top_k": -1, "eos_token_id": None, "top_p": 1}
    (folder / GENERATION).write_text(json.dumps(harmless), encoding="utf-8")
    assert check_models(Settings.model_validate({"model": str(folder)}), [folder])[
        0
    ].shape.moe_layers


@pytest.mark.parametrize("entries", [[5], [{"name": "default"}], [{}], [{"template": "x"}], "x"])
def test_templates_named_in_a_wrong_way_break_nothing(tmp_path: Path, entries: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert chat_template(tmp_path) in (None, "", "x")
