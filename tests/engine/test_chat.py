"""Chat without a server: text as it streams, defaults of the model, the terminal command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app.cli import main
from core.errors import CheckpointError, RequestError
from engine.chat import TextStream
from engine.engine import Engine
from engine.sampling_defaults import sampling_defaults
from tests.engine.test_engine import TINY
from tests.models.families import cached_checkpoint

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = Engine.open(cached_checkpoint("qwen3_moe"), engine=TINY)
    yield opened
    opened.check_invariants()
    opened.close()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=12), st.integers(0, 3))
def test_streamed_text_is_the_decoded_text(text: str, cut: int) -> None:
    tokenizer = Tokenizer.from_file(str(cached_checkpoint("qwen3_moe") / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    ids = ids[: len(ids) - cut] if cut else ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    joined = "".join(pieces) + stream.flush()
    assert joined == tokenizer.decode(ids)
    assert cut or joined == text


def test_an_answer_comes_in_pieces_and_tells_how_it_ended(engine: Engine) -> None:
    answer = engine.chat(HELLO, max_tokens=12, temperature=0.0, ignore_eos=True)
    text = "".join(answer)
    assert text
    last = engine._chat.last
    assert (last.completion_tokens, last.finish_reason) == (12, "length")
    assert "".join(engine.chat(HELLO, max_tokens=12, temperature=0.0, ignore_eos=True)) == text


def test_leaving_an_answer_cancels_it(engine: Engine) -> None:
    answer = engine.chat(HELLO, max_tokens=60, temperature=0.0, ignore_eos=True)
    next(answer)
    answer.close()
    engine.step()
    assert engine.gauges().kv_blocks_used == 0
    assert not engine.has_work()


def test_wrong_parameters_and_messages_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temprature"):
        engine.chat(HELLO, temprature=1.0)
    with pytest.raises(RequestError, match="temperature must be between 0 and 2"):
        engine.chat(HELLO, temperature=3.0)
    with pytest.raises(RequestError, match="context served here is 128"):
        engine.chat([{"role": "user", "content": "x" * 200}])


def test_defaults_are_the_models_own(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps({"do_sample": False}))
    assert sampling_defaults(tmp_path)["temperature"] == 0.0


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    folder = shutil.copytree(cached_checkpoint("qwen3_moe"), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    engine = Engine.open(folder, engine=TINY)
    with pytest.raises(CheckpointError, match="no chat template"):
        engine.chat(HELLO)
    engine.close()


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_the_command_answers_once_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(cached_checkpoint("qwen3_moe"))
    common = ("chat", folder, "--context-tokens", "128", "--temperature", "0", "--max-tokens", "5")
    assert run_cli(*common, "--prompt", "hi", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["completion_tokens"] <= 5
    assert answer["finish_reason"] in ("length", "stop")
    assert run_cli(*common, "--prompt", "hi") == 0
    assert capsys.readouterr().out == answer["text"] + "\n"
    assert run_cli(*common, "--json") == 2
    assert "--json needs --prompt" in capsys.readouterr().err


def test_the_command_converses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hi", "x" * 300, "again"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, ""))
    folder = str(cached_checkpoint("qwen3_moe"))
    assert run_cli("chat", folder, "--context-tokens", "128", "--max-tokens", "4") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 2
    assert "context served here is 128" in printed.err
