"""Chat templates in the manner of the families whose calls are parsed, and their marks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployments.output_parsers import deepseek, harmony, llama, mistral
from tests.serving.tiny_model_folder import make_folder


@dataclass(frozen=True)
class Family:
    """What tells a family: its template, and which of its marks are special tokens."""

    tool_format: str
    template: str
    marks: tuple[str, ...] = ()


_TURNS = """{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
CALLS
{%- if message.content is string %}{{ message.content }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def _template(tools: str, calls: str, tail: str = "") -> str:
    head = f"{{%- if tools -%}}<|system|>{tools}{{%- endif -%}}\n"
    loop = f"{{%- for call in message.tool_calls or [] -%}}{calls}{{%- endfor -%}}"
    return head + _TURNS.replace("CALLS", loop) + tail


_LISTED = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
_OBJECT = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>"
)
_NAMED = "{{ call.function.name }}{{ call.function.arguments | tojson }}"
_THINK = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking -%}"
    "<think>\n{%- endif -%}{# </think> ends it #}"
)

FAMILIES = {
    family.tool_format: family
    for family in (
        Family("hermes", _template(_LISTED, _OBJECT, _THINK)),
        Family(
            "qwen3_coder",
            _template(
                _LISTED,
                "<tool_call><function={{ call.function.name }}>{% for key, value in "
                "call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>"
                "{% endfor %}</function></tool_call>",
            ),
        ),
        Family(
            "glm4",
            # A turn without content must come with an empty one: null would be printed.
            _template(
                _LISTED,
                "<tool_call>{{ call.function.name }}{% for key, value in "
                "call.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>"
                "{{ value }}</arg_value>{% endfor %}</tool_call>",
                _THINK,
            ).replace(" if message.content is string ", " if true "),
        ),
        Family("mistral", _template(_LISTED, "[TOOL_CALLS][" + _NAMED + "]"), mistral.MARKS[:1]),
        Family(
            "mistral_v11",
            _template(
                _LISTED,
                "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
                "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}",
            ),
            mistral.MARKS,
        ),
        Family(
            "deepseek_v3",
            # Joining texts: arguments must be one.
            _template(
                _LISTED,
                f"{{{{ '{deepseek.CALLS}{deepseek.CALL}function{deepseek.SEPARATOR}' + "
                "call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}",
                _THINK,
            ),
            deepseek.MARKS,
        ),
        Family(
            "deepseek_v31",
            _template(_LISTED, f"{deepseek.CALLS}{deepseek.CALL}" + _NAMED, _THINK),
        ),
        Family("harmony", _template(_LISTED, "<|channel|>" + _NAMED), harmony.MARKS),
        Family("llama3_json", _template(_LISTED, _NAMED), llama.MARKS[:1]),
        Family(
            "llama_pythonic",
            _template("[func_name1(params_name1=params_value1)]" + _LISTED, _NAMED),
            llama.MARKS,
        ),
    )
}


def make_family_folder(folder: Path, name: str) -> Path:
    """A tiny model's folder with the template and the marks of a family."""
    family = FAMILIES[name]
    return make_folder(folder, family.template, family.marks)
