"""The dotted paths of settings: which there are, and what was meant by one that is none.

A section may be a list of entries: `models.0.name` is the name of the first. Where no one entry is
meant, its number is written N: `models.N.name`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from core.errors import SettingsError

ANY = "N"
_NUMBER = re.compile("0|[1-9][0-9]{0,3}")


class SettingKeys:
    """All keys of one settings model and of the models within it."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.fields: dict[str, FieldInfo] = {}
        """Every key that can be set, with its field."""
        self.sections: dict[str, FieldInfo] = {}
        """Paths that hold further keys, with their fields; entries of a list have the list's."""
        self.lists: dict[str, FieldInfo] = {}
        """Paths that hold numbered entries, with their fields."""
        self._collect(model, "")

    def _collect(self, model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            path = f"{prefix}{name}"
            inner, entry = _section_of(field.annotation), _entry_of(field.annotation)
            if inner is not None:
                self.sections[path] = field
                self._collect(inner, f"{path}.")
            elif entry is not None:
                self.lists[path] = field
                self.sections[f"{path}.{ANY}"] = field
                self._collect(entry, f"{path}.{ANY}.")
            else:
                self.fields[path] = field

    def general(self, path: str) -> str:
        """The path with N for the numbers of entries."""
        parts: list[str] = []
        for part in path.split("."):
            within_list = ".".join(parts) in self.lists
            # An N of the user's own names no entry.
            number = ANY if _NUMBER.fullmatch(part) else "?"
            parts.append(number if within_list else part)
        return ".".join(parts)

    def __contains__(self, path: str) -> bool:
        """Whether that is a key, with numbers for entries."""
        return self.general(path) in self.fields

    def is_list(self, path: str) -> bool:
        """Whether numbered entries lie there."""
        return self.general(path) in self.lists

    def is_entry(self, path: str) -> bool:
        """Whether that is one of numbered entries."""
        above, _, number = self.general(path).rpartition(".")
        return above in self.lists and number == ANY

    def is_section(self, path: str) -> bool:
        """Whether further keys lie below it: names, or the numbers of entries."""
        general = self.general(path)
        return general in self.sections or general in self.lists

    def leaves(self, data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """(path, value) of everything in nested mappings and lists; no key is looked into."""
        if isinstance(data, Mapping):
            items = [(str(name), value) for name, value in data.items()]
        else:
            items = [(str(number), value) for number, value in enumerate(data)]
        for name, value in items:
            path = f"{prefix}{name}"
            nested = isinstance(value, Mapping) and path not in self
            if nested or (isinstance(value, list | tuple) and self.is_list(path)):
                yield from self.leaves(value, f"{path}.")
            elif not isinstance(value, BaseModel):
                yield path, value

    def refuse_unknown(self, origins: Mapping[str, str]) -> None:
        """Raises SettingsError naming each path in `origins` that is no key, and the nearest one.

        `origins` maps a path to the place it was set in ("" where that is not known).
        """
        problems = [
            self._unknown(path) + (f" (from {origin})" if origin else "")
            for path, origin in origins.items()
            if path not in self
        ]
        if problems:
            raise SettingsError("\n".join(problems))

    def _unknown(self, path: str) -> str:
        general = self.general(path)
        if general in self.lists:
            return f'"{path}" is a list: expected entries with {self._some(f"{general}.{ANY}")}'
        if general in self.sections:
            return f'"{path}" is a section: expected keys below it, such as {self._some(general)}'
        if "?" in general.split("."):
            where = general[: general.index(".?")]
            return f'unknown setting "{path}": entries of "{where}" are numbered, as in "{where}.0"'
        section, _, name = general.rpartition(".")
        entry = self._entry(general)
        # Within an entry its own keys are meant first, elsewhere no entry's.
        own = [key for key in self.fields if self._entry(key) == entry]
        keys = own + [key for key in self.fields if entry and not self._entry(key)]
        elsewhere = [key for key in own if key.rpartition(".")[2] == name]
        elsewhere = elsewhere or [key for key in keys if key.rpartition(".")[2] == name]
        if elsewhere:
            places = " or ".join(f'"{_numbered(key, path)}"' for key in elsewhere)
            return f'misplaced setting "{path}": it belongs at {places}'
        near, likeness = max(((key, _likeness(general, key)) for key in keys), key=lambda x: x[1])
        if likeness >= 0.6:
            return f'unknown setting "{path}": the nearest valid key is "{_numbered(near, path)}"'
        known = section if section in self.sections else ""
        where = f'section "{_numbered(known, path)}"' if known else "settings"
        return f'unknown setting "{path}": {where} has {self._some(known)}'

    def _entry(self, general: str) -> str:
        """The entry of a list that a key lies in; "" for none."""
        inside = [path for path in self.lists if general.startswith(f"{path}.")]
        return f"{inside[0]}.{ANY}" if inside else ""

    def _some(self, section: str) -> str:
        prefix = f"{section}." if section else ""
        return ", ".join(
            dict.fromkeys(
                key.removeprefix(prefix).split(".")[0]
                for key in [*self.fields, *self.lists]
                if key.startswith(prefix)
            )
        )


def _section_of(annotation: Any) -> type[BaseModel] | None:
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _entry_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a list's entries: `tuple[Entry, ...]`."""
    return _section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def _numbered(general: str, path: str) -> str:
    """A general path with the numbers of `path`, where both lie in the same entries."""
    parts = general.split(".")
    given = path.split(".")
    for place, part in enumerate(parts):
        if part == ANY and parts[:place] == given[:place] and place < len(given):
            parts[place] = given[place]
    return ".".join(parts)


def _likeness(path: str, key: str) -> float:
    section, _, name = path.rpartition(".")
    key_section, _, key_name = key.rpartition(".")
    alike = difflib.SequenceMatcher(None, name, key_name).ratio()
    # Of two equally like names, the one in the section that was meant.
    return alike + 0.1 * (section == key_section) if alike >= 0.5 else 0.0
