"""Rules that bind what a text is about to a model or to a group of replicas.

They are the operator's word, so they win over every reckoning of what a replica would cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from pydantic import Field, model_validator

from core.config_model import ConfigModel
from core.errors import SettingsError
from deployments.domain_settings import UNKNOWN

Key = TypeVar("Key")
AUTO = "auto"
"""The model name with which a client leaves the choice of the model to the rules."""


class DispatchRule(ConfigModel):
    """What requests of one domain are bound to: a group of replicas, or a model."""

    domain: str = Field(min_length=1)
    """Domain of the texts that the rule is about, as the classifier or the caller names it;
    "unknown": of those that nobody knows."""
    to_group: str | None = None
    """Group of replicas that alone serves this domain's requests."""
    to_model: str | None = None
    """Model that answers this domain's requests where the client asks for the model "auto"."""
    model: str | None = None
    """With `to_group`: the model whose requests are meant; left out: each that has that group."""
    shared: bool = False
    """With `to_group`: whether the group also serves requests that no rule binds to it."""

    @model_validator(mode="after")
    def _one_target(self) -> DispatchRule:
        if (self.to_group is None) == (self.to_model is None):
            raise ValueError("expected either to_group or to_model")
        if self.to_model is not None and (self.model is not None or self.shared):
            raise ValueError(
                "model and shared belong to to_group; to_model is for requests that ask for "
                f'the model "{AUTO}"'
            )
        return self


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request may go."""

    model: str
    groups: tuple[str, ...]
    """One where a rule says so, else all that are open to it; never none."""


class DispatchRules:
    """Decides by name and domain alone; every request has exactly one model."""

    def __init__(
        self,
        rules: Sequence[DispatchRule],
        groups: Mapping[str, Sequence[str]],
        domains: Collection[str] | None = None,
    ) -> None:
        """`groups` of each model by name; the first model is the default.

        `domains` are those that a text can have, where that is known. Raises SettingsError for a
        rule that names what there is not, and for rules that contradict.
        """
        self._groups = {model: tuple(names) for model, names in groups.items()}
        self._models: dict[str, str] = {}
        self._bound: dict[tuple[str, str], str] = {}
        exclusive: set[tuple[str, str]] = set()
        for number, rule in enumerate(rules):
            where = f"rules.{number}"
            if domains is not None:
                _require(rule.domain, [*domains, UNKNOWN], f"{where}.domain", "domain")
            domain = "" if rule.domain == UNKNOWN else rule.domain
            if rule.to_model is not None:
                _require(rule.to_model, self._groups, f"{where}.to_model", "model")
                _once(self._models, domain, rule.to_model, where)
                continue
            for model in self._meant(rule, where):
                _once(self._bound, (model, domain), str(rule.to_group), where)
                if not rule.shared:
                    exclusive.add((model, str(rule.to_group)))
        self._open = {
            model: tuple(name for name in names if (model, name) not in exclusive)
            for model, names in self._groups.items()
        }
        for model, names in self._open.items():
            if not names:
                raise SettingsError(
                    f"rules: each group of the model {model!r} is kept for some domain, so "
                    'requests of others have no place; give a rule "shared: true", or add a group'
                )
        self.offers_auto = bool(rules) or len(self._groups) > 1
        """Whether clients may ask for the model "auto"."""
        if self.offers_auto and AUTO in self._groups:
            raise SettingsError(
                f'a model is named "{AUTO}", the name by which clients leave the choice of the '
                "model to the rules; give it another one"
            )

    @property
    def default_model(self) -> str:
        """The first."""
        return next(iter(self._groups))

    def route(self, model: str, domain: str) -> Route:
        """Where a request goes that asks for `model` (one of those served, or "auto").

        `domain` is "" where it is not known.
        """
        if model == AUTO and self.offers_auto:
            model = self._models.get(domain, self.default_model)
        bound = self._bound.get((model, domain))
        return Route(model, self._open[model] if bound is None else (bound,))

    def _meant(self, rule: DispatchRule, where: str) -> list[str]:
        """The models whose group a rule names."""
        group = str(rule.to_group)
        if rule.model is not None:
            _require(rule.model, self._groups, f"{where}.model", "model")
            _require(group, self._groups[rule.model], f"{where}.to_group", "group")
            return [rule.model]
        known = dict.fromkeys(name for names in self._groups.values() for name in names)
        _require(group, known, f"{where}.to_group", "group")
        return [model for model, names in self._groups.items() if group in names]


def _once(targets: dict[Key, str], key: Key, target: str, where: str) -> None:
    """Raises SettingsError where another rule says something else of the same."""
    if targets.setdefault(key, target) != target:
        raise SettingsError(
            f"{where}: an earlier rule binds the same requests to {targets[key]!r}, this one to "
            f"{target!r}; drop one of them"
        )


def _require(name: str, known: Collection[str], where: str, kind: str) -> None:
    if name in known:
        return
    near = get_close_matches(name, [one for one in known if one], 1, 0.5)
    listed = ", ".join(repr(one) for one in known if one) or "none with a name"
    advice = f"the nearest is {near[0]!r}" if near else f"there are: {listed}"
    raise SettingsError(f"{where}: there is no {kind} {name!r}; {advice}")
