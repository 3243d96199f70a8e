from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from core.errors import RequestError
from deployments.chat_template import ChatTemplate
from deployments.model_files import chat_template, special_tokens
from deployments.text_threads import TextThreads
from deployments.tokenizer_worker import TokenizerWorker
from engine.sampling_defaults import sampling_defaults
from tests.serving.tiny_model_folder import make_folder

TURN = [{"role": "user", "content": "the DEF"}]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWorker:
    return TokenizerWorker.open(make_folder(tmp_path_factory.mktemp("t")), TextThreads())


def test_chat_and_text_become_ids(worker: TokenizerWorker) -> None:
    assert asyncio.run(worker.chat(TURN, {})).ids == (265, 259, 32, 257, 266)
    assert asyncio.run(worker.prompt("the")).ids == (259,)
    assert asyncio.run(worker.prompt((7, 8))).ids == (7, 8)


def test_a_long_text_does_not_block_the_loop(worker: TokenizerWorker) -> None:
    """60,000 tokens are tokenised while another task ticks on."""

    async def run() -> tuple[int, float, float]:
        gaps = []
        done = False

        async def tick() -> None:
            last = time.monotonic()
            while not done:
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        ticking = asyncio.create_task(tick())
        began = time.monotonic()
        ids = (await worker.prompt("xq vz kj " * 30_000)).ids
        took = time.monotonic() - began
        done = True
        await ticking
        return len(ids), took, max(gaps)

    count, took, worst_gap = asyncio.run(run())
    assert count >= 60_000
    # On a busy machine a gap may have other causes; it must not be the whole of the work.
    assert worst_gap < max(0.5 * took, 0.1)


def test_templates_see_their_arguments_and_refuse_ours(worker: TokenizerWorker) -> None:
    shouted = asyncio.run(worker.chat(TURN, {"shout": "b"})).ids
    assert shouted[-1] == ord("B")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        asyncio.run(worker.chat(TURN, {"add_generation_prompt": False}))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.open(make_folder(tmp_path, template=None))
    with pytest.raises(RequestError, match="no chat template"):
        template.render(TURN, {})


def test_templates_and_defaults_are_found_where_models_keep_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=None)
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": null,'
        ' "chat_template": [{"name": "default", "template": "D"}, {"name": "x", "template": "X"}]}'
    )
    assert chat_template(folder) == "D"
    assert special_tokens(folder) == {"bos_token": "<s>"}
    assert sampling_defaults(folder) == {"temperature": 0.5, "top_k": 7}


def test_many_empty_messages_do_not_hold_the_event_loop() -> None:
    from deployments.text_threads import _SHORT_CHARS
    from deployments.tokenizer_worker import _size_chars

    messages = [{"role": "user", "content": ""}] * 500
    assert _size_chars(messages) > _SHORT_CHARS
    assert _size_chars([{"role": "user", "content": "Hello"}]) < _SHORT_CHARS
