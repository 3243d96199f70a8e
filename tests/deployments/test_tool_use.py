"""What requests ask about tools: refused, bound by a grammar, and read back by the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from core.errors import RequestError
from core.request import Structure
from deployments.chat_template import ChatTemplate
from deployments.openai_messages import Message
from deployments.openai_schema import ChatRequest, parse_body
from deployments.output_formats import OutputFormats
from deployments.output_parsers.parts import ContentPart, ReasoningPart, ToolCallStart
from deployments.settings import ServingSettings
from deployments.tool_formats import TOOL_FORMATS
from deployments.tool_use import OutputPlan, ToolUse
from engine.grammar_source import compile_source, grammar_source
from engine.structure_matcher import MatcherFactory
from tests.serving.tiny_model_folder import make_folder
from tests.serving.tool_templates import FAMILIES, make_family_folder

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PARIS = '{"city": "Paris", "days": 3}'
VOCABULARY = 300
END = 264
"""The id that ends an answer here; harmony ends its messages, not its answers, by <|end|>."""


def tool(name: str = "get_weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **function}}


def asked(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_body(ChatRequest, json.dumps(body).encode())


class Model:
    """A family's small files, and the engine's own grammar over its vocabulary."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.formats = OutputFormats.open(folder, ServingSettings(**settings))
        self.template = ChatTemplate.open(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._factory = MatcherFactory(folder, VOCABULARY)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def plan(
        self, structure: Structure | None = None, prompt: str = "x", **fields: Any
    ) -> OutputPlan:
        use = ToolUse.of(asked(**fields), self.formats)
        return use.plan(tuple(self.ids(prompt)), structure)

    def allows(self, structure: Structure | None, text: str) -> bool:
        """Whether the grammar takes exactly this text, special tokens as such."""
        assert structure is not None
        source = grammar_source(structure, self._factory.special_texts)
        matcher = self._factory.matcher(
            compile_source(self._factory.compiler, source), source, [END]
        )
        for token in self.ids(text):
            matcher.look()
            assert matcher.forbidden is not None
            if matcher.finished or matcher.forbidden[token]:
                return False
            matcher.accept(token)
        matcher.look()
        return matcher.finished or (matcher.forbidden is not None and not matcher.forbidden[END])

    def read(self, plan: OutputPlan, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
        assert plan.new_parser is not None
        parser = plan.new_parser()
        content, reasoning, calls = "", "", []
        for part in [*parser.push(text), *parser.finish()]:
            if isinstance(part, ContentPart):
                content += part.text
            elif isinstance(part, ReasoningPart):
                reasoning += part.text
            elif isinstance(part, ToolCallStart):
                calls.append([part.name, ""])
            else:
                calls[-1][1] += part.text
        return content, reasoning, [(name, json.loads(text)) for name, text in calls]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("families")
    return {name: Model(make_family_folder(folder / name, name)) for name in FAMILIES}


def written(model: Model, calls: list[tuple[str, str]]) -> str:
    """Calls as the family writes them."""
    style = model.formats.tool_format()
    arguments = {
        "json": PARIS,
        "qwen_xml": "<parameter=city>Paris</parameter><parameter=days>3</parameter>",
        "glm_xml": "<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value>",
    }[style.style]
    texts = [style.call_of(name) + (given or arguments) + style.call_end for name, given in calls]
    return style.begin + (style.separator or "").join(texts) + style.end


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_in_template_and_vocabulary(
    models: dict[str, Model], name: str
) -> None:
    assert models[name].formats.tool_format() is TOOL_FORMATS[name]


def test_the_settings_know_every_format_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", FAMILIES["hermes"].template)
    for name in TOOL_FORMATS:
        formats = OutputFormats.open(folder, ServingSettings(tool_parser=name))
        assert formats.tool_format() is TOOL_FORMATS[name]
    none = OutputFormats.open(folder, ServingSettings(tool_parser="none", reasoning_parser="none"))
    assert none.parser_factory((), False) is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_calls_that_must_come_are_bound_and_read_back(
    models: dict[str, Model], name: str, choice: Any
) -> None:
    model = models[name]
    plan = model.plan(tools=[tool(), tool("add")], tool_choice=choice)
    text = written(model, [("add", "")])
    assert model.allows(plan.structure, text)
    assert model.read(plan, text) == ("", "", [("add", json.loads(PARIS))])
    assert not model.allows(plan.structure, "Paris is fine.")
    assert not model.allows(plan.structure, "")
    assert not model.allows(plan.structure, written(model, [("delete", "")]))
    assert model.allows(plan.structure, written(model, [("get_weather", "")])) is (
        choice == "required"
    )
    if model.formats.tool_format().style == "json":
        assert not model.allows(plan.structure, written(model, [("add", '{"city": 1, "days": 3}')]))


@pytest.mark.parametrize("name", FAMILIES)
def test_several_calls_come_only_where_they_may(models: dict[str, Model], name: str) -> None:
    model = models[name]
    if model.formats.tool_format().separator is None:
        return
    text = written(model, [("add", ""), ("get_weather", "")])
    free = model.plan(tools=[tool(), tool("add")], tool_choice="required")
    assert model.allows(free.structure, text)
    right = json.loads(PARIS)
    assert model.read(free, text) == ("", "", [("add", right), ("get_weather", right)])
    single = model.plan(
        tools=[tool(), tool("add")], tool_choice="required", parallel_tool_calls=False
    )
    assert not model.allows(single.structure, text)
    assert model.allows(single.structure, written(model, [("add", "")]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_strict_tool_is_bound_where_calls_are_free(models: dict[str, Model], name: str) -> None:
    model = models[name]
    plan = model.plan(tools=[tool(strict=True)])
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert model.allows(plan.structure, final + "Just text.")
    assert model.allows(plan.structure, written(model, [("get_weather", "")]))
    assert not model.allows(plan.structure, written(model, [("get_weather", '{"city": 1}')]))


@pytest.mark.parametrize("name", FAMILIES)
def test_free_calls_need_no_grammar(models: dict[str, Model], name: str) -> None:
    model = models[name]
    plan = model.plan(tools=[tool()])
    assert plan.structure is None
    text = written(model, [("get_weather", "")])
    assert model.read(plan, text) == ("", "", [("get_weather", json.loads(PARIS))])
    special = {model.formats.special[mark] for mark in FAMILIES[name].marks}
    assert set(plan.special_text) == special


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_calls_are_text(models: dict[str, Model], name: str) -> None:
    model = models[name]
    for fields in ({}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}):
        use = ToolUse.of(asked(**fields), model.formats)
        assert "tools" not in use.template_kwargs
        plan = use.plan((1,))
        assert plan.structure is None
        if name != "harmony":
            text = written(model, [("get_weather", "")])
            assert plan.new_parser is None or model.read(plan, text) == (text, "", [])


def test_a_schema_binds_the_content_and_not_the_reasoning_before_it(
    models: dict[str, Model],
) -> None:
    asked_for = Structure("json_schema", json.dumps(CITY))
    hermes, harmony, llama = models["hermes"], models["harmony"], models["llama3_json"]
    plan = hermes.plan(asked_for, prompt="<|assistant|><think>\n")
    assert hermes.allows(plan.structure, f"Hm, <b>.\n</think>\n\n{PARIS}")
    assert not hermes.allows(plan.structure, PARIS)
    assert hermes.read(plan, f"Hm.</think>\n\n{PARIS}") == (PARIS, "Hm.", [])
    plan = hermes.plan(asked_for, prompt="<|assistant|>")
    assert hermes.allows(plan.structure, PARIS)
    assert hermes.allows(plan.structure, f"<think>Hm.</think>{PARIS}")
    assert not hermes.allows(plan.structure, "<think>Hm.</think>Paris")
    plan = harmony.plan(asked_for)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert plan.structure is not None
    assert harmony.allows(plan.structure, f"{analysis}<|channel|>final<|message|>{PARIS}")
    assert harmony.allows(plan.structure, f"<|channel|>final<|message|>{PARIS}")
    assert not harmony.allows(plan.structure, PARIS)
    assert llama.plan(asked_for).structure == asked_for
    plan = hermes.plan(asked_for, prompt="<|assistant|><think>\n\n</think>\n\n")
    assert plan.structure == asked_for, "the template has closed the reasoning already"


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag", "choice"])
@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"type": 5}', "[5]", "null"])
def test_a_broken_structure_is_refused_and_names_its_field(
    models: dict[str, Model], kind: Any, text: str
) -> None:
    model, structure = models["hermes"], Structure(kind, text, "structured_outputs")
    with pytest.raises(RequestError):
        model.allows(model.plan(structure, prompt="<think>").structure, "a</think>")


def test_an_error_in_the_structure_names_what_asked_for_it(models: dict[str, Model]) -> None:
    model, content = models["hermes"], Structure("json_object", "", "response_format")
    calls = model.plan(tools=[tool()], tool_choice="required").structure
    bound = model.plan(content, tools=[tool()]).structure
    assert calls is not None and calls.param == "tools"
    assert bound is not None and bound.param == "response_format"


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (Structure("json_object"), '{"a": [1]}'),
        (Structure("regex", "[0-9]{2}"), "12"),
        (Structure("choice", '["red", "green"]'), "green"),
        (Structure("ebnf", 'root ::= "yes" | "no"'), "no"),
        (
            Structure(
                "structural_tag",
                '{"type": "structural_tag", "format": {"type": "const_string", "value": "Z"}}',
            ),
            "Z",
        ),
    ],
)
def test_every_kind_of_structure_can_follow_reasoning(
    models: dict[str, Model], structure: Structure, text: str
) -> None:
    model = models["hermes"]
    plan = model.plan(structure, prompt="<think>")
    assert model.allows(plan.structure, "a</think>" + text)
    assert not model.allows(plan.structure, "a</think>" + text + "x")


@pytest.mark.parametrize("name", FAMILIES)
def test_content_that_is_bound_leaves_room_for_calls(models: dict[str, Model], name: str) -> None:
    model = models[name]
    plan = model.plan(Structure("choice", '["red", "green"]'), tools=[tool()])
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert model.allows(plan.structure, final + "red")
    assert model.allows(plan.structure, written(model, [("get_weather", "")]))
    assert not model.allows(plan.structure, final + "blue")


def test_required_calls_may_follow_reasoning(models: dict[str, Model]) -> None:
    for name, opened, before in (
        ("hermes", "<think>\n", "Hm.</think>\n"),
        ("deepseek_v3", "x", "<think>Hm.</think>"),
        ("harmony", "x", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"),
    ):
        model = models[name]
        plan = model.plan(tools=[tool()], tool_choice="required", prompt=opened)
        text = before + written(model, [("get_weather", "")])
        assert model.allows(plan.structure, text)
        assert model.read(plan, text) == ("", "Hm.", [("get_weather", json.loads(PARIS))])


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_that_call_tools_are_rendered_as_the_template_wants_them(
    models: dict[str, Model], name: str
) -> None:
    model = models[name]
    turns = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": PARIS},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "Sun"}]},
    ]
    request = asked(messages=turns, tools=[tool()])
    use = ToolUse.of(request, model.formats)
    messages = model.formats.template_messages(request.messages)
    assert messages[2]["name"] == "get_weather"
    prompt = model.template.render(messages, {}, use.template_kwargs)
    assert "get_weather" in prompt
    assert "Paris" in prompt
    assert "{'city'" not in prompt
    assert "None" not in prompt
    assert '"required"' in prompt, "the schema is in the prompt"


def test_templates_are_given_what_they_can_print(models: dict[str, Model]) -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    turns = asked(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    glm, deepseek, harmony = models["glm4"], models["deepseek_v3"], models["harmony"]
    assert glm.formats.template_messages(turns)[0]["content"] == ""
    assert harmony.formats.template_messages(turns)[0]["content"] is None
    (given,) = deepseek.formats.template_messages(turns)[0]["tool_calls"]
    assert given["function"]["arguments"] == "{}"
    (given,) = glm.formats.template_messages(turns)[0]["tool_calls"]
    assert given["function"]["arguments"] == {}


def test_arguments_that_are_no_object_are_handed_on_as_they_are() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"cut": '}}
    turn = asked(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0]
    assert turn.for_template()["tool_calls"][0]["function"]["arguments"] == '{"cut": '


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": [tool("x" * 65)]}, "tools"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools"),
        ({"tools": [tool(parameters={"type": "object", "properties": []})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": {"type": "text"}}})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": 5}})]}, "tools"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": {"enum": []}}})]}, "tools"),
        ({"tools": [tool(parameters={"anyOf": []})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": {"maxLength": -1}}})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": {"minimum": "1"}}})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"a": {"pattern": 1}}})]}, "tools"),
        ({"tools": [tool(unknown=1)]}, "tools"),
        ({"tools": [tool()] * 600}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_what_is_wrong_about_tools_is_refused_by_name(
    models: dict[str, Model], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        ToolUse.of(asked(**fields), models["hermes"].formats)
    assert refusal.value.param == param


def test_a_deep_or_large_schema_is_refused_quickly() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    wide = {"properties": {f"p{number}": {} for number in range(30_000)}}
    for schema in (deep, wide):
        with pytest.raises(RequestError, match="at most 64 levels"):
            asked(tools=[tool(parameters=schema)])


def test_a_model_without_tools_refuses_them(tmp_path: Path) -> None:
    plain = OutputFormats.open(make_folder(tmp_path / "plain"), ServingSettings())
    with pytest.raises(RequestError, match="takes no tools") as refusal:
        ToolUse.of(asked(tools=[tool()]), plain)
    assert refusal.value.param == "tools"
    template = FAMILIES["llama3_json"].template
    unknown = OutputFormats.open(make_folder(tmp_path / "unknown", template), ServingSettings())
    with pytest.raises(RequestError, match=r"serving\.tool_parser"):
        ToolUse.of(asked(tools=[tool()]), unknown)
    assert ToolUse.of(asked(tools=[tool()], tool_choice="none"), plain).template_kwargs == {}


def test_reasoning_effort_reaches_a_template_that_reads_it(tmp_path: Path) -> None:
    template = "{{ reasoning_effort | default('medium') }}{{ messages[0].content }}"
    model = Model(make_folder(tmp_path / "m", template))
    for fields, right in (({"reasoning_effort": "low"}, "lowHi"), ({}, "mediumHi")):
        use = ToolUse.of(asked(**fields), model.formats)
        turns = [{"role": "user", "content": "Hi"}]
        assert model.template.render(turns, {}, use.template_kwargs) == right


def test_messages_as_the_openai_package_dumps_them_are_taken() -> None:
    """A client that sends an answer's message back sends all its empty fields too."""
    function = {"name": "f", "arguments": "{}"}
    empty = ("refusal", "annotations", "audio", "function_call", "content")
    dumped = {
        "role": "assistant",
        **dict.fromkeys(empty),
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "a", "type": "function", "function": function, "index": 0}],
    }
    message = asked(messages=[dumped]).messages[0]
    assert isinstance(message, Message)
    assert message.for_template(reasoning_name="thinking") == {
        "role": "assistant",
        "content": None,
        "thinking": "Hm.",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": {}}}],
    }
