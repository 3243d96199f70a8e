"""`coterie chat`: talk to a model in the terminal, without Ray."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import settings_command
from app.settings_sources import LoadedSettings
from core.errors import CoterieError, SettingsError
from expert_pool.model_location import locate

if TYPE_CHECKING:
    from engine.chat import ChatSession

_HELP = "Write a message; an empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts anew."


def _chat(
    loaded: LoadedSettings,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Answer this one message and exit.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Longest answer in tokens.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; unset: the model's own.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes answers repeatable.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a hub id that is not in the cache.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --prompt: print one JSON object.")
    ] = False,
) -> None:
    """Talk to MODEL in the terminal, without Ray.

    \b
      coterie chat ./demo_model --expert-memory 50%
      coterie chat MODEL --prompt "Write a story about a fox." --json
    """
    if as_json and prompt is None:
        raise SettingsError("--json needs --prompt: it prints one answer as one object")
    named = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    params = {name: value for name, value in named.items() if value is not None}
    history = [{"role": "system", "content": system}] if system else []
    folder = locate(loaded.settings.model, download=download)
    from transformers.utils import logging

    from engine.chat import ChatSession
    from engine.engine import Engine

    logging.disable_progress_bar()
    engine = Engine(folder, loaded.settings.engine, loaded.settings.pool)
    try:
        session = ChatSession(engine)
        if prompt is None:
            _converse(session, history, params)
        else:
            _answer_once(session, [*history, {"role": "user", "content": prompt}], params, as_json)
    finally:
        engine.close()


def _answer_once(
    session: ChatSession, messages: list[dict[str, str]], params: dict[str, Any], as_json: bool
) -> None:
    began = time.perf_counter()
    first_s = None
    pieces = []
    for piece in session.answer(messages, **params):
        if first_s is None:
            first_s = time.perf_counter() - began
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    if not as_json:
        print()
        return
    last = session.last
    print(
        json.dumps(
            {
                "text": "".join(pieces),
                "finish_reason": last.finish_reason,
                "prompt_tokens": last.prompt_tokens,
                "completion_tokens": last.completion_tokens,
                "ttft_s": first_s,
                "total_s": time.perf_counter() - began,
            },
            ensure_ascii=False,
        )
    )


def _converse(session: ChatSession, history: list[dict[str, str]], params: dict[str, Any]) -> None:
    print(_HELP, file=sys.stderr)
    start = list(history)
    while True:
        try:
            message = readable(input("> ")).strip()
        except EOFError:
            print()
            return
        if not message:
            return
        if message == "/new":
            history = list(start)
            continue
        history.append({"role": "user", "content": message})
        pieces: list[str] = []
        try:
            for piece in session.answer(history, **params):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except CoterieError as error:
            # One refused message must not end the conversation.
            print(f"error: {error}", file=sys.stderr)
            history.pop()
            continue
        print()
        history.append({"role": "assistant", "content": "".join(pieces)})


def readable(typed: str) -> str:
    """The text with replacement characters for bytes that are no UTF-8, as in a piped file."""
    return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


chat = settings_command(_chat)
