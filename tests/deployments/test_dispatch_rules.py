"""Rules: every request has one model and at least one group, and a rule's word is the last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.errors import SettingsError
from deployments.dispatch_rules import AUTO, DispatchRule, DispatchRules
from deployments.domain_settings import UNKNOWN

DOMAINS = ("code", "law", "medicine")
MODELS = {"demo": ("", "gpu2"), "coder": ("main", "gpu2", "spare"), "small": ("",)}


def rule(**fields: Any) -> DispatchRule:
    return DispatchRule.model_validate(fields)


def rules(*given: dict[str, Any], domains: tuple[str, ...] | None = DOMAINS) -> DispatchRules:
    return DispatchRules([rule(**fields) for fields in given], MODELS, domains)


@st.composite
def any_rule(draw: st.DrawFn) -> dict[str, Any]:
    domain = draw(st.sampled_from((*DOMAINS, UNKNOWN)))
    if draw(st.booleans()):
        return {"domain": domain, "to_model": draw(st.sampled_from(sorted(MODELS)))}
    model = draw(st.sampled_from(sorted(MODELS)))
    group = draw(st.sampled_from([name for name in MODELS[model] if name] or ["gpu2"]))
    named = {"model": model} if group in MODELS[model] and draw(st.booleans()) else {}
    return {"domain": domain, "to_group": group, "shared": draw(st.booleans()), **named}


@given(
    st.lists(any_rule(), max_size=6),
    st.sampled_from((AUTO, *MODELS)),
    st.sampled_from(("", *DOMAINS, "never heard of")),
)
def test_any_rules_give_any_request_one_place_and_win(
    given_rules: list[dict[str, Any]], name: str, domain: str
) -> None:
    try:
        decided = rules(*given_rules)
    except SettingsError:
        assume(False)
    route = decided.route(name, domain)
    assert route.groups and set(route.groups) <= set(MODELS[route.model])
    assert decided.route(name, domain) == route
    if name != AUTO:
        assert route.model == name, "a client that names a model gets that model"

    def is_about(one: dict[str, Any]) -> bool:
        return bool(one["domain"] == (domain or UNKNOWN))

    to_model = [one["to_model"] for one in given_rules if "to_model" in one and is_about(one)]
    if name == AUTO:
        assert route.model == (to_model[0] if to_model else "demo")
    of_groups = [
        one
        for one in given_rules
        if "to_group" in one
        and one.get("model", route.model) == route.model
        and one["to_group"] in MODELS[route.model]
    ]
    bound = [one["to_group"] for one in of_groups if is_about(one)]
    if bound:
        assert route.groups == (bound[0],), "a rule binds to that group alone"
    else:
        kept = {one["to_group"] for one in of_groups if not one["shared"]}
        assert set(route.groups) == set(MODELS[route.model]) - kept


@pytest.mark.parametrize(
    ("given_rule", "said"),
    [
        ({"domain": "cod", "to_model": "coder"}, "rules.0.domain: there is no domain 'cod'; the"),
        ({"domain": "law", "to_model": "codr"}, "the nearest is 'coder'"),
        ({"domain": "law", "to_group": "gpu3"}, "rules.0.to_group: there is no group 'gpu3'"),
        ({"domain": "law", "to_group": "gpu2", "model": "dem"}, "rules.0.model.*'demo'"),
        ({"domain": "law", "to_group": "main", "model": "demo"}, "there is no group 'main'"),
        ({"domain": "law", "to_group": "x", "model": "small"}, "none with a name"),
    ],
)
def test_what_there_is_not_is_named_with_the_nearest(given_rule: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        rules(given_rule)


def test_two_rules_for_one_thing_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"rules\.1.*'gpu2', this one to 'main'"):
        rules(
            {"domain": "law", "to_group": "gpu2"},
            {"domain": "law", "to_group": "main", "model": "coder"},
        )
    with pytest.raises(SettingsError, match=r"rules\.1"):
        rules({"domain": "law", "to_model": "demo"}, {"domain": "law", "to_model": "coder"})


def test_somebody_must_serve_the_domains_of_no_rule() -> None:
    bound = [{"domain": "law", "to_group": name, "model": "coder"} for name in ("main",)]
    bound += [
        {"domain": "code", "to_group": "gpu2", "model": "coder"},
        {"domain": "medicine", "to_group": "spare"},
    ]
    with pytest.raises(SettingsError, match="'coder' is kept for some domain"):
        rules(*bound)
    assert rules(*bound[:2], {**bound[2], "shared": True}).route("coder", "").groups == ("spare",)


@pytest.mark.parametrize(
    "fields",
    [
        {"domain": "law"},
        {"domain": "law", "to_group": "a", "to_model": "b"},
        {"domain": "law", "to_model": "b", "shared": True},
        {"domain": "law", "to_model": "b", "model": "c"},
        {"domain": "", "to_model": "b"},
        {"domain": "law", "to_modl": "b"},
    ],
)
def test_a_rule_says_one_thing(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rule(**fields)


def test_auto_is_a_name_only_where_there_is_something_to_choose() -> None:
    assert not DispatchRules((), {"demo": ("",)}).offers_auto
    assert DispatchRules((), {"demo": ("",), "coder": ("",)}).offers_auto
    assert DispatchRules((), {AUTO: ("",)}).route(AUTO, "").model == AUTO
    with pytest.raises(SettingsError, match='a model is named "auto"'):
        DispatchRules((), {AUTO: ("",), "coder": ("",)})
