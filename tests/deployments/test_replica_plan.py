"""What is deployed for which model, by which name."""

from __future__ import annotations

import pytest

from core.errors import SettingsError
from deployments.dispatch_rules import DispatchRule
from deployments.replica_plan import ReplicaPlan, deployment_names, rules_over
from deployments.settings import ServingSettings


def plan(name: str, group: str = "") -> ReplicaPlan:
    return ReplicaPlan(name, "", ServingSettings(group=group))


def test_each_deployment_has_a_name_of_its_own_that_can_be_part_of_a_files() -> None:
    plans = [plan("Org/A"), plan("Org/B"), plan("Org-B"), plan("Org", "B"), plan("模型", "g.1")]
    names = deployment_names(plans)
    assert names[:3] == ["Supervisor", "Supervisor-Org-B", "Supervisor-Org-B-2"]
    assert len(set(names)) == len(plans)
    assert not {letter for name in names for letter in name if not letter.isascii()} | (
        {"/", "#", " "} & set("".join(names))
    )


def test_rules_see_groups_by_model_and_the_first_is_the_default() -> None:
    plans = [plan("a", "x"), plan("b"), plan("a", "y")]
    rules = rules_over(plans, [DispatchRule(domain="law", to_group="y")])
    assert rules.default_model == "a"
    assert rules.route("a", "law").groups == ("y",)
    with pytest.raises(SettingsError, match="no group 'z'"):
        rules_over(plans, [DispatchRule(domain="law", to_group="z")])
