"""Tools and reasoning over real HTTP: what clients send, and what they must get back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.request import Structure
from deployments.settings import ServingSettings
from deployments.text_delta import Generation
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tool_templates import FAMILIES, make_family_folder

CHAT = "/v1/chat/completions"
ENGINE = {"max_sequences": 4, "context_tokens": 4096, "kv_memory": 10_000, "vocabulary": 290}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PARIS = '{"city": "Paris \\"1\\" </x> 😀", "days": 3}'
TWO_CALLS = {
    "hermes": f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": f'I look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_v11": f"I look.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    f"get_weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{PARIS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
    f"commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|end|><|start|>"
    "assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalServer]]:
    root = tmp_path_factory.mktemp("families")
    running: dict[str, LocalServer] = {}

    class Servers(dict[str, LocalServer]):
        def __missing__(self, name: str) -> LocalServer:
            folder = make_family_folder(root / name, name)
            self[name] = running[name] = LocalServer(folder, ServingSettings(), ENGINE).__enter__()
            return self[name]

    yield Servers()
    for server in running.values():
        server.__exit__(None, None, None)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def whole(server: LocalServer, text: str, **fields: Any) -> dict[str, Any]:
    response = post(server.url, CHAT, body(text, **fields))
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(server: LocalServer, text: str, **fields: Any) -> dict[str, Any]:
    """A stream's chunks joined to what an unstreamed choice looks like, ids left as they are."""
    response = post(server.url, CHAT, body(text, stream=True, **fields))
    assert response.status_code == 200, response.text
    received = events(response.text)
    assert received[-1] == DONE
    message: dict[str, Any] = {"content": ""}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in received[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        (choice,) = chunk["choices"]
        assert reason is None, "nothing follows the finish reason"
        reason = choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], **call["function"]})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call["function"]) == {"arguments"}
                calls[-1]["arguments"] += call["function"]["arguments"]
    return {"message": message, "calls": calls, "finish_reason": reason}


def same(unstreamed: dict[str, Any], stream: dict[str, Any]) -> bool:
    message = unstreamed["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return (
        (message["content"] or "") == stream["message"]["content"]
        and message.get("reasoning_content") == stream["message"].get("reasoning_content")
        and calls == [{"name": c["name"], "arguments": c["arguments"]} for c in stream["calls"]]
        and unstreamed["finish_reason"] == stream["finish_reason"]
    )


@pytest.mark.parametrize("family", TWO_CALLS)
def test_streamed_calls_join_to_the_unstreamed(
    servers: dict[str, LocalServer], family: str
) -> None:
    server, text = servers[family], TWO_CALLS[family]
    choice = whole(server, text, tools=TOOLS)
    stream = streamed(server, text, tools=TOOLS)
    assert same(choice, stream)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    first, second = (call["function"] for call in choice["message"]["tool_calls"])
    assert first == {"name": "get_weather", "arguments": PARIS}
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert len({call["id"] for call in stream["calls"]}) == 2


@pytest.mark.parametrize("family", TWO_CALLS)
def test_an_answer_cut_anywhere_is_the_same_streamed(
    servers: dict[str, LocalServer], family: str
) -> None:
    server, text = servers[family], TWO_CALLS[family]
    for limit in range(1, 140, 9):
        choice = whole(server, text, tools=TOOLS, max_tokens=limit)
        assert same(choice, streamed(server, text, tools=TOOLS, max_tokens=limit))
        assert choice["finish_reason"] in ("length", "stop", "tool_calls")
        if choice["finish_reason"] == "length":
            assert "<|" not in (choice["message"]["content"] or "")


def test_content_is_null_where_there_are_calls_alone(servers: dict[str, LocalServer]) -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    message = whole(servers["hermes"], text, tools=TOOLS)["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_what_is_no_call_is_content(servers: dict[str, LocalServer]) -> None:
    server = servers["hermes"]
    for text in (
        "<tool_call>now()</tool_call>",
        '<tool_call>{"name": 5}</tool_call> x',
        "<tool_ca",
    ):
        choice = whole(server, text, tools=TOOLS)
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert same(choice, streamed(server, text, tools=TOOLS))


def test_without_tools_a_call_is_text(servers: dict[str, LocalServer]) -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = whole(servers["hermes"], text, **fields)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"


def test_a_stop_string_may_stand_in_the_arguments(servers: dict[str, LocalServer]) -> None:
    server, text = servers["hermes"], TWO_CALLS["hermes"]
    choice = whole(server, text, tools=TOOLS, stop=["Par"])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert same(choice, streamed(server, text, tools=TOOLS, stop=["Par"]))


def test_a_call_that_a_stop_string_cuts_is_not_told_as_one_to_run(
    servers: dict[str, LocalServer],
) -> None:
    """An agent that acts on "tool_calls" met arguments that were no JSON."""
    server, text = servers["hermes"], TWO_CALLS["hermes"]
    for stop, reason in (("Par", "stop"), ("</tool_call>", "tool_calls"), ("never", "tool_calls")):
        choice = whole(server, text, tools=TOOLS, stop=[stop])
        assert choice["finish_reason"] == reason
        assert same(choice, streamed(server, text, tools=TOOLS, stop=[stop]))


def test_each_choice_has_calls_of_its_own(servers: dict[str, LocalServer]) -> None:
    response = post(servers["hermes"].url, CHAT, body(TWO_CALLS["hermes"], tools=TOOLS, n=3))
    choices = response.json()["choices"]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_log_probabilities_of_calls_cover_every_token(servers: dict[str, LocalServer]) -> None:
    text = TWO_CALLS["hermes"]
    choice = whole(servers["hermes"], text, tools=TOOLS, logprobs=True)
    data = b"".join(bytes(piece["bytes"]) for piece in choice["logprobs"]["content"])
    assert data.decode() == text


def test_reasoning_is_told_apart_with_and_without_tools(servers: dict[str, LocalServer]) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for family, text in (
        ("hermes", "<think>\nHm.\n</think>\n\n"),
        ("deepseek_v3", "<think>Hm.</think>"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
                    "<|message|>"),
    ):  # fmt: skip
        server = servers[family]
        for fields in ({}, {"tools": TOOLS}):
            choice = whole(server, text + "Four.", **fields)
            assert choice["message"]["reasoning_content"] == "Hm."
            assert choice["message"]["content"] == "Four."
            assert same(choice, streamed(server, text + "Four.", **fields))
    choice = whole(servers["hermes"], "<think>Hm.</think>\n" + call, tools=TOOLS)
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_reasoning_that_the_prompt_opens_needs_no_mark(servers: dict[str, LocalServer]) -> None:
    text = "Hm. So.\n</think>\n\nFour."
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    fields["max_tokens"] = len(text)
    choice = whole(servers["hermes"], text, **fields)
    assert choice["message"]["reasoning_content"] == "Hm. So."
    assert choice["message"]["content"] == "Four."
    assert same(choice, streamed(servers["hermes"], text, **fields))


def test_a_conversation_with_tools_goes_round(servers: dict[str, LocalServer]) -> None:
    """The openai package's own loop: its message goes back as it came, then the tool's answer."""
    for family, text in TWO_CALLS.items():
        client = openai.OpenAI(base_url=servers[family].url + "/v1", api_key="x", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": text}]
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls is not None
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sun"})
        messages.append({"role": "user", "content": "Thanks"})
        second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "Thanks"
        dumped = [messages[0], message.model_dump(), *messages[2:]]
        third = client.chat.completions.create(model=MODEL, messages=dumped, tools=TOOLS)
        assert third.usage is not None and second.usage is not None
        assert third.usage.prompt_tokens == second.usage.prompt_tokens


def test_required_and_named_tools_bind_the_answer(servers: dict[str, LocalServer]) -> None:
    server = servers["hermes"]
    sent: list[Structure | None] = []
    supervisors = server.model.any_group
    generate = supervisors.generate

    def listen(generation: Generation) -> Any:
        sent.append(generation.request.params.structure)
        return generate(generation)

    supervisors.generate = listen  # type: ignore[method-assign]
    try:
        named = {"type": "function", "function": {"name": "now"}}
        for choice in ("auto", "required", named):
            whole(server, TWO_CALLS["hermes"], tools=TOOLS, tool_choice=choice)
    finally:
        supervisors.generate = generate  # type: ignore[method-assign]
    auto, required, one = sent
    assert auto is None
    assert required is not None and "get_weather" in required.text and "now" in required.text
    assert one is not None and "get_weather" not in one.text and "now" in one.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 5}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"functions": [{"name": "x"}]}, "functions"),
    ],
)
def test_what_is_wrong_about_tools_is_a_400_that_names_it(
    servers: dict[str, LocalServer], fields: dict[str, Any], param: str
) -> None:
    response = post(servers["hermes"].url, CHAT, body("x", **fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


DEMO_TEMPLATE = """{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_real_model_calls_what_it_must(demo_with_tools: Path) -> None:
    """The engine's grammar and the parser agree: whatever the weights say, the call is valid."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": "set_light",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "room": {"enum": ["kitchen", "hall"]},
                        "level": {"type": "integer", "minimum": 0, "maximum": 99},
                        "warm": {"type": "boolean"},
                    },
                    "required": ["room", "level", "warm"],
                    "additionalProperties": False,
                },
            },
        },
        NOW,
    ]
    engine = {"max_sequences": 2, "context_tokens": 1024}
    factory = "engine.engine:open_engine"
    with LocalServer(demo_with_tools, ServingSettings(), engine, factory) as server:
        for seed in range(2):
            fields = {"tools": tools, "seed": seed, "max_tokens": 200, "temperature": 1.0}
            named = {"type": "function", "function": {"name": "set_light"}}
            choice = whole(server, "Light!", tool_choice=named, **fields)
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "set_light"
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, tools[0]["function"]["parameters"])
            assert same(choice, streamed(server, "Light!", tool_choice=named, **fields))
        single = {"tool_choice": "required", "parallel_tool_calls": False, "tools": tools}
        choice = whole(server, "What time is it?", max_tokens=200, **single)
        assert choice["message"]["tool_calls"][0]["function"]["name"] in ("set_light", "now")
        assert len(choice["message"]["tool_calls"]) == 1
        wrong = {**tools[0], "function": {**tools[0]["function"], "parameters": {"not": {}}}}
        response = post(server.url, CHAT, body("x", tools=[wrong], tool_choice="required"))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"


@pytest.fixture
def demo_with_tools(tmp_path: Path) -> Path:
    source = Path(__file__).resolve().parents[2] / "demo_model"
    for path in source.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(DEMO_TEMPLATE, encoding="utf-8")
    return tmp_path


def test_every_family_has_a_template_to_be_tried_with() -> None:
    assert set(TWO_CALLS) <= set(FAMILIES)
