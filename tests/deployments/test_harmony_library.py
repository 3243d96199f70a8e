"""OpenAI's library and the parser without it agree; skipped where its vocabulary is not on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from deployments.output_formats import OutputFormats
from deployments.output_parsers.harmony import HarmonyParser
from deployments.output_parsers.harmony_library import HarmonyLibraryParser, open_encoding
from deployments.settings import ServingSettings
from tests.deployments.test_output_parsers import GOOD, NAMES, parsed
from tests.serving.tool_templates import make_family_folder

TEXTS = [text for kind, text, _ in GOOD if kind == "harmony"]


@pytest.fixture(scope="module")
def encoding() -> Any:
    found = open_encoding()
    if found is None:
        pytest.skip("needs openai-harmony, and TIKTOKEN_ENCODINGS_BASE with o200k_base.tiktoken")
    return found


def test_without_the_vocabulary_the_library_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would fetch the file from the network."""
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    assert open_encoding() is None
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    assert open_encoding() is None
    formats = OutputFormats.open(make_family_folder(tmp_path / "m", "harmony"), ServingSettings())
    new_parser = formats.parser_factory((), "free")
    assert new_parser is not None
    assert type(new_parser()) is HarmonyParser


@pytest.mark.parametrize("text", TEXTS)
def test_the_library_reads_the_same(encoding: Any, text: str) -> None:
    right = parsed(HarmonyParser(NAMES), [text])
    assert parsed(HarmonyLibraryParser(encoding, NAMES), [text]) == right
    assert parsed(HarmonyLibraryParser(encoding, NAMES), list(text)) == right
    draw = random.Random(text)
    for _ in range(10):
        cut = draw.randrange(len(text) + 1)
        assert parsed(HarmonyLibraryParser(encoding, NAMES), [text[:cut], text[cut:]]) == right


def test_no_text_breaks_it(encoding: Any) -> None:
    draw = random.Random(5)
    for _ in range(60):
        text = draw.choice(TEXTS)
        for _ in range(draw.randrange(1, 5)):
            place = draw.randrange(len(text) + 1)
            scrap = draw.choice(["<|end|>", "<|start|>", "<|channel|>", "x", "ä😀", " ", TEXTS[0]])
            text = text[:place] + scrap + text[place + draw.randrange(4) :]
        whole = parsed(HarmonyLibraryParser(encoding, NAMES), [text])
        assert parsed(HarmonyLibraryParser(encoding, NAMES), list(text)) == whole


def test_a_gpt_oss_model_is_read_by_it(encoding: Any, tmp_path: Path) -> None:
    formats = OutputFormats.open(make_family_folder(tmp_path / "m", "harmony"), ServingSettings())
    new_parser = formats.parser_factory((), "free")
    assert new_parser is not None
    assert isinstance(new_parser(), HarmonyLibraryParser)
