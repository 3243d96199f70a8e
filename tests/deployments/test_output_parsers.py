"""Each parser over texts as its models write them: whole, split at every place, and at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from deployments.output_parsers.deepseek import DeepSeekParser
from deployments.output_parsers.harmony import HarmonyParser
from deployments.output_parsers.hermes import HermesParser
from deployments.output_parsers.llama import LlamaParser
from deployments.output_parsers.mistral import MistralParser
from deployments.output_parsers.parts import (
    ContentPart,
    OutputParser,
    Part,
    ReasoningPart,
    ToolCallStart,
)
from deployments.output_parsers.reasoning import PlainParser, ReasoningParser
from deployments.output_parsers.xml_calls import GLM, QWEN_CODER, XmlCallsParser

Call = tuple[str, str]
"""Name and arguments, as text."""

NAMES = frozenset({"get_weather", "add", "now"})
SCHEMAS = {
    "get_weather": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {}}
    }
}
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "harmony": lambda: HarmonyParser(NAMES),
    "harmony_plain": lambda: HarmonyParser(frozenset()),
    "llama": lambda: LlamaParser(NAMES),
    "qwen_coder": lambda: XmlCallsParser(QWEN_CODER, SCHEMAS),
    "glm": lambda: XmlCallsParser(GLM, SCHEMAS),
    "think": lambda: ReasoningParser("<think>", "</think>", False, PlainParser()),
    "think_opened": lambda: ReasoningParser("<think>", "</think>", True, PlainParser()),
    "think_hermes": lambda: ReasoningParser("<think>", "</think>", True, HermesParser()),
}


@dataclass
class Heard:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(parts: list[Part]) -> Heard:
    heard = Heard()
    for part in parts:
        if isinstance(part, ContentPart):
            heard.content += part.text
        elif isinstance(part, ReasoningPart):
            heard.reasoning += part.text
        elif isinstance(part, ToolCallStart):
            assert part.call == len(heard.calls)
            assert part.call_id
            heard.calls.append((part.name, ""))
        else:
            assert part.call == len(heard.calls) - 1, "arguments of a call come before the next"
            name, arguments = heard.calls[-1]
            heard.calls[-1] = name, arguments + part.text
    return heard


def parsed(parser: OutputParser, pieces: list[str]) -> Heard:
    parts: list[Part] = []
    for piece in pieces:
        new = parser.push(piece)
        assert all(getattr(part, "text", "x") for part in new), "no part is empty"
        parts += new
    return joined(parts + parser.finish())


PARIS = '{"city": "Paris"}'
QUOTES = '{"city": "a \\"}]</tool_call> [TOOL_CALLS] <|call|>\\\\", "n": [1, {"x": {}}]}'

GOOD: list[tuple[str, str, Heard]] = [
    (
        "hermes",
        "Hello, nothing to call <b>here</b>.\n",
        Heard("Hello, nothing to call <b>here</b>.\n"),
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        Heard(calls=[("get_weather", PARIS)]),
    ),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        Heard("I look.", calls=[("add", '{"a": 1}'), ("now", "{}")]),
    ),
    (
        "hermes",
        f'<tool_call>{{"name":"get_weather","arguments":{QUOTES}}}</tool_call> done',
        Heard("done", calls=[("get_weather", QUOTES)]),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        Heard(calls=[("add", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "ä😀"}, "id": 7}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>',
        Heard(calls=[("add", '{"a": "ä😀"}'), ("now", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        Heard(calls=[("add", '{"a": 2}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> then',
        Heard("then", calls=[("add", '{"a": 1')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "cut he',
        Heard(calls=[("add", '{"a": "cut he')]),
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
        '{"name": "now", "arguments": {}}]',
        Heard(calls=[("get_weather", PARIS), ("now", "{}")]),
    ),
    (
        "mistral",
        f"Let me see. [TOOL_CALLS]get_weather[ARGS]{QUOTES}[TOOL_CALLS]now[ARGS]{{}}",
        Heard("Let me see.", calls=[("get_weather", QUOTES), ("now", "{}")]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        Heard(calls=[("add", '{"a": 1}')]),
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1} bye', Heard("bye", calls=[("add", '{"a": 1}')])),
    ("mistral", "[1] is no call, [TOOL is neither", Heard("[1] is no call, [TOOL is neither")),
    (
        "deepseek",
        "Sure.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{QUOTES}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Heard("Sure.", calls=[("get_weather", QUOTES), ("now", "{}")]),
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Heard(calls=[("get_weather", PARIS), ("function", "{}")]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        Heard(reasoning="Need it.", calls=[("get_weather", PARIS)]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Four.\n<|return|>",
        Heard("Four.\n", "Easy."),
    ),
    (
        "harmony",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        Heard(calls=[("add", '{"a": 1}')]),
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary<|message|><|call|>",
        Heard("I will look.", calls=[("now", "{}")]),
    ),
    (
        "harmony",
        "<|channel|>commentary to=add <|constrain|>json<|message|>{}<|call|>commentary<|channel|>"
        "final<|message|>Done",
        Heard("Done", calls=[("add", "{}")]),
    ),
    ("harmony", "No marks at all.", Heard("No marks at all.")),
    ("harmony", "<|channel|>final<|message|>cut of", Heard("cut of")),
    ("harmony", "<|channel|>final<|mess", Heard()),
    ("harmony", "<|channel|>analysis to=python code<|message|>1+1<|call|>", Heard(reasoning="1+1")),
    (
        "harmony_plain",
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        Heard(reasoning="{}"),
    ),
    (
        "llama",
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        Heard(calls=[("get_weather", PARIS)]),
    ),
    (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {QUOTES}}}; '
        '{"name": "now", "parameters": {}}',
        Heard(calls=[("get_weather", QUOTES), ("now", "{}")]),
    ),
    ("llama", '{"name": "Paris", "parameters": {}}', Heard('{"name": "Paris", "parameters": {}}')),
    ("llama", '{"answer": [1, 2]} indeed', Heard('{"answer": [1, 2]} indeed')),
    ("llama", "  Hello {}", Heard("  Hello {}")),
    ("llama", "[1, 2] are numbers", Heard("[1, 2] are numbers")),
    (
        "llama",
        "[get_weather(city=\"a)]'\", days=[1, -2.5, None], deep={'x': true}), now()]",
        Heard(
            calls=[
                ("get_weather", '{"city": "a)]\'", "days": [1, -2.5, null], "deep": {"x": true}}'),
                ("now", "{}"),
            ]
        ),
    ),
    (
        "llama",
        "<|python_start|>[add(a=1, b=2)]<|python_end|>",
        Heard(calls=[("add", '{"a": 1, "b": 2}')]),
    ),
    (
        "llama",
        '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]',
        Heard(calls=[("add", '{"a": 1}'), ("now", "{}")]),
    ),
    (
        "qwen_coder",
        "Looking.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        '<parameter=days>\n3\n</parameter>\n<parameter=zip>\n[1, {"a": "b"}]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Heard(
            "Looking.",
            calls=[
                ("get_weather", '{"city": "12", "days": 3, "zip": [1, {"a": "b"}]}'),
                ("now", "{}"),
            ],
        ),
    ),
    (
        "qwen_coder",
        "<tool_call><function=get_weather><parameter=city>a\n <b> </tool_call></parameter>"
        "<parameter=zip>True</parameter></function></tool_call>",
        Heard(calls=[("get_weather", '{"city": "a\\n <b> </tool_call>", "zip": true}')]),
    ),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now</tool_call>",
        Heard(calls=[("get_weather", '{"city": "Paris", "days": 2}'), ("now", "{}")]),
    ),
    ("think", "<think>\nHm.\n\nSo.\n</think>\n\nFour.", Heard("Four.", "Hm.\n\nSo.")),
    ("think", "  Four </think> <think>", Heard("  Four </think> <think>")),
    ("think", "<think></think>\nFour.", Heard("Four.")),
    ("think", "<think>Never ending </thin", Heard("", "Never ending </thin")),
    ("think_opened", "\nHm.</think>Four. </think>", Heard("Four. </think>", "Hm.")),
    ("think_opened", "<think>Hm.</think>Four.", Heard("Four.", "Hm.")),
    (
        "think_hermes",
        "Maybe <tool_call>?\n</think>\n\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Heard("", "Maybe <tool_call>?", [("now", "{}")]),
    ),
]

BAD: list[tuple[str, str]] = [
    ("hermes", "<tool_call>hello</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add"</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "argum'),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call"),
    ("hermes", "<tool_call>" + "[" * 3000),
    ("hermes", '<tool_call>{"x": ' + "[" * 3000 + "]" * 3000 + "}</tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] hello world"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", '[TOOL_CALLS][{"a": 1}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS]"),
    ("mistral", "[TOOL_CALLS]add[AR"),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜>what"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>" + "x" * 2000),
    ("llama", "{"),
    ("llama", "["),
    ("llama", "[add(1)]"),
    ("llama", "[add(a=open('x'))]"),
    ("llama", "[add(a=b'x')]"),
    ("llama", "[add(**{'a': 1})]"),
    ("llama", "[add(a=1"),
    ("llama", "[add(a=" + "(" * 500 + ")" * 500 + ")]"),
    ("llama", "[add(a=1e999)]"),
    ("llama", "[unknown(a=1)]"),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", "<|python_start|>"),
    ("qwen_coder", "<tool_call>x</tool_call>"),
    ("qwen_coder", "<tool_call>" + "y" * 3000),
    ("glm", "<tool_call>no name\n</tool_call>"),
]


@pytest.mark.parametrize(("kind", "text", "right"), GOOD)
def test_a_whole_text_is_taken_apart(kind: str, text: str, right: Heard) -> None:
    assert parsed(PARSERS[kind](), [text]) == right


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, text, _ in GOOD] + BAD)
def test_the_split_changes_nothing(kind: str, text: str) -> None:
    whole = parsed(PARSERS[kind](), [text])
    places = range(1, len(text)) if len(text) < 1000 else range(1, len(text), 97)
    for place in places:
        assert parsed(PARSERS[kind](), [text[:place], text[place:]]) == whole
    assert parsed(PARSERS[kind](), list(text)) == whole
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(8))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(PARSERS[kind](), pieces) == whole


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_what_is_no_call_is_content_word_for_word(kind: str, text: str) -> None:
    assert parsed(PARSERS[kind](), [text]) == Heard(text)


@pytest.mark.parametrize("kind", PARSERS)
def test_no_text_of_marks_and_scraps_breaks_a_parser(kind: str) -> None:
    """Mutated model texts, whatever they hold: no exception, and no split that changes the sum."""
    draw = random.Random(kind)
    texts = [text for name, text, _ in GOOD if name == kind] + [t for n, t in BAD if n == kind]
    scraps = ["<", "{", "}", '"', "\\", "[", "]", "\n", " ", ",", "(", ")", "<think>", "</think>"]
    for _ in range(300):
        text = draw.choice(texts)[:600]
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(text) + 1)
            scrap = draw.choice([*scraps, draw.choice(texts)[:30]])
            text = text[:place] + scrap + text[place + draw.randrange(4) :]
        whole = parsed(PARSERS[kind](), [text])
        assert parsed(PARSERS[kind](), list(text)) == whole, text
        cut = draw.randrange(len(text) + 1)
        assert parsed(PARSERS[kind](), [text[:cut], text[cut:]]) == whole, text


@pytest.mark.parametrize("kind", PARSERS)
def test_no_text_is_no_parts(kind: str) -> None:
    parser = PARSERS[kind]()
    assert parser.push("") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "long'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "long'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "long'),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "long'),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": "long'),
        ("llama", '{"name": "add", "parameters": {"a": "long'),
    ],
)
def test_arguments_are_given_on_while_they_come(kind: str, text: str) -> None:
    assert joined(PARSERS[kind]().push(text)) == Heard(calls=[("add", '{"a": "long')])


def test_content_is_held_back_only_while_a_mark_may_begin() -> None:
    parser = HermesParser()
    assert joined(parser.push("a < b <too")).content == "a < b"
    assert joined(parser.push("l")).content == ""
    assert joined(parser.push("s>")).content == " <tools>"


def test_each_call_has_an_id_of_its_own_as_its_family_wants_it() -> None:
    def ids(parser: OutputParser, text: str) -> list[str]:
        return [part.call_id for part in parser.push(text) if isinstance(part, ToolCallStart)]

    one = '{"name": "add", "arguments": {}}'
    hermes = ids(HermesParser(), f"<tool_call>{one}</tool_call>" * 2)
    assert len(set(hermes)) == 2
    assert all(call_id.startswith("call_") for call_id in hermes)
    mistral = ids(MistralParser(), f"[TOOL_CALLS][{one}, {one}]")
    assert len(set(mistral)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in mistral)


def test_arguments_of_every_good_text_are_json() -> None:
    for kind, text, right in GOOD:
        if "cut" in text or "</tool_call> then" in text:
            continue
        for _, arguments in right.calls:
            assert isinstance(json.loads(arguments), dict), (kind, text)
