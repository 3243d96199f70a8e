"""Writes the reference page of all settings: `python -m app.settings_page > docs/settings.md`."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.commands.options import FLAGS
from app.model_entries import INHERITED
from app.settings import known_keys, setting_keys
from app.settings_sources import environment_name

HEAD = """# Settings

Made by `make docs` from the settings models; do not edit.

A setting comes from the first of these that names it: a flag of `coterie serve` (every setting
has `--set KEY=VALUE`, some a flag of their own), an environment variable, the YAML file given
with `--config`, its default. `coterie config show` prints each value and where it came from. An
unknown or misplaced key is an error. Bytes may be written as `"8GiB"`; `null` unsets a value.
Entries of `models` and `rules` are numbered from 0, which `N` stands for: `models.0.name`,
`COTERIE_MODELS__0__NAME`. In YAML they are lists.

```yaml
# coterie.yaml
model: ./demo_model
pool:
  expert_memory: 50%
serving:
  port: 8000
```
"""


def settings_page() -> str:
    """The page as Markdown."""
    flags = {path: flag for flag, path in FLAGS.items()}
    lines = [HEAD]
    section = None
    for path, field in known_keys().items():
        head, _, _ = path.rpartition(".")
        inner = _inherited(head)
        if head != section:
            section = head
            lines += [_any_key(head, inner)] if inner else _section(section)
        if inner:
            continue
        lines.append(
            f"| `{path}` | {_kind(field)} | {_default(field)} | "
            f"`{environment_name(path)}`{_flag(flags.get(path))} | {_one_line(field.description)} |"
        )
    return "\n".join(lines) + "\n"


def _section(name: str) -> list[str]:
    title = [f"\n## {name}\n"] if name else []
    if name:
        title.append(f"{_one_line(setting_keys().sections[name].description)}\n")
    return [*title, "| setting | kind | default | set by | what it is |", "|---|---|---|---|---|"]


def _inherited(section: str) -> str:
    """The section of the first model that an entry's section is like; "" for other sections."""
    entry, _, inner = section.rpartition(".")
    return inner if entry == "models.N" and inner in INHERITED else ""


def _any_key(section: str, inner: str) -> str:
    described = _one_line(setting_keys().sections[section].description)
    return f"| `{section}.*` | any key of [{inner}](#{inner}) | that key's value | | {described} |"


def _kind(field: FieldInfo) -> str:
    return _name(field.annotation) + _bounds(field)


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (list, tuple, dict):
        kinds = [_name(a) for a in get_args(annotation) if a is not ...]
        return f"mapping of {kinds[0]} to {kinds[1]}" if len(kinds) > 1 else f"list of {kinds[0]}"
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if arguments:
        # Annotated keeps its type first and its constraints after it.
        if hasattr(annotation, "__metadata__"):
            return _name(arguments[0])
        return " or ".join(_name(argument) for argument in arguments)
    names = {"int": "integer", "str": "text", "float": "number", "bool": "true or false"}
    return names.get(annotation.__name__, str(annotation.__name__))


def _bounds(field: FieldInfo) -> str:
    constraints = list(field.metadata)
    for argument in get_args(field.annotation):
        constraints += getattr(argument, "__metadata__", ())
    found = {}
    for constraint in constraints:
        for part in [constraint, *getattr(constraint, "metadata", ())]:
            for sign, name in (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt")):
                if getattr(part, name, None) is not None:
                    found[sign] = getattr(part, name)
    return "".join(f", {sign} {bound}" for sign, bound in found.items())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "unset" if default is None else f"`{json.dumps(default)}`"


def _flag(flag: str | None) -> str:
    return f", `{flag}`" if flag else ""


def _one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")


if __name__ == "__main__":
    print(settings_page(), end="")
