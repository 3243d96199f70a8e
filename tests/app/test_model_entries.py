"""Several models and groups in one set of settings: where values come from, and what clashes."""

import re
from pathlib import Path

import pytest
import yaml

from app.commands.config import written
from app.settings import Settings, key_paths, setting_keys, value_at
from app.settings_sources import Sourced, load_settings
from core.errors import SettingsError
from tests.app.test_settings import from_yaml, refusal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
TWO = """
model: m
pool:
  expert_memory: 50%
  hot_set: {0: [1]}
engine: {seed: 3}
models:
  - name: coder
    model: c
    engine:
      kv_memory: 2GiB
  - name: coder
    group: small
    replicas: 2
    pool: {expert_memory: 25%}
rules:
  - domain: code
    to_model: coder
"""


def test_an_entry_takes_from_the_first_model_what_it_does_not_set(tmp_path):
    loaded = from_yaml(tmp_path, TWO)
    first, coder, small = loaded.settings.entries()
    assert (first.name, coder.name, small.name) == ("m", "coder", "coder")
    assert (coder.model, small.model) == ("c", "c"), "a group serves its model's folder"
    assert (coder.pool.expert_memory, small.pool.expert_memory) == ("50%", "25%")
    assert (coder.engine.seed, coder.engine.kv_memory) == (3, 2 * 1024**3)
    assert small.engine == first.engine, "what another group sets is its own"
    assert coder.pool.hot_set == {}, "the first model's experts are not those of another one"
    origins = loaded.origins
    assert origins["models.0.engine.kv_memory"] == "coterie.yaml:11"
    assert origins["models.1.group"] == "coterie.yaml:13"
    assert origins["models.0.pool.expert_memory"] == "pool.expert_memory, coterie.yaml:4"
    assert origins["models.0.replicas"] == "default"
    assert origins["models.0.pool.hot_set"] == "default", "it is not taken over"
    assert origins["rules.0.to_model"] == "coterie.yaml:18"


def test_settings_of_several_pass_through_json_whole(tmp_path):
    settings = from_yaml(tmp_path, TWO).settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    assert Settings.model_validate(settings.model_dump()) == settings


def test_each_group_is_served_with_its_own_replicas(tmp_path):
    settings = from_yaml(tmp_path, TWO + "serving: {tool_parser: hermes, group: big}\n").settings
    first, coder, small = map(settings.serving_of, settings.entries())
    assert (first.group, coder.group, small.group) == ("big", "", "small")
    assert (first.replicas, coder.replicas, small.replicas) == (1, 1, 2)
    assert coder.tool_parser == "hermes"


def test_all_groups_of_a_model_write_alike(tmp_path):
    text = TWO.replace("model: c\n", "model: c\n    tool_parser: hermes\n")
    settings = from_yaml(tmp_path, text).settings
    parsers = [settings.serving_of(entry).tool_parser for entry in settings.entries()]
    assert parsers == ["auto", "hermes", "hermes"]


def test_later_sources_change_fields_of_an_entry_and_replace_a_whole_list(tmp_path):
    environ = {"COTERIE_MODELS__0__POOL__EXPERT_MEMORY": "10%"}
    loaded = from_yaml(tmp_path, TWO, environ, {"models.0.replicas": Sourced("3", "--set")})
    coder = loaded.settings.models[0]
    assert (coder.pool.expert_memory, coder.replicas, coder.engine.kv_memory) == ("10%", 3, 2 << 30)
    assert loaded.origins["models.0.pool.expert_memory"] == "COTERIE_MODELS__0__POOL__EXPERT_MEMORY"
    whole = {"COTERIE_MODELS": "[{name: coder, model: d}]"}
    (only,) = from_yaml(tmp_path, TWO, whole).settings.models
    assert (only.name, only.model, only.engine.kv_memory) == ("coder", "d", 1 << 30)
    none = {"models": Sourced([], "--set"), "rules": Sourced([], "--set")}
    assert from_yaml(tmp_path, TWO, {}, none).settings.models == ()


def test_also_adds_to_what_the_file_has(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TWO, encoding="utf-8")
    loaded = load_settings(path, {}, {}, also=[("third", "t"), ("fourth", "f")])
    assert [entry.name for entry in loaded.settings.models] == ["coder", "coder", "third", "fourth"]
    assert loaded.origins["models.3.model"] == "--also"
    assert loaded.settings.models[3].pool.expert_memory == "50%"


def test_the_files_on_the_page_are_right(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    models, groups, rules = blocks
    assert len(from_yaml(tmp_path, models).settings.entries()) == 3
    both = [entry.group for entry in from_yaml(tmp_path, groups).settings.entries()]
    assert both == ["large", "small"]
    more = "  - {name: coder, model: c}\n  - {name: small, model: s}\n"
    assert len(from_yaml(tmp_path, groups + more + rules).settings.rules) == 4


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("models.0.pool.expert_memry", 'nearest valid key is "models.0.pool.expert_memory"'),
        ("models.1.engin.seed", 'belongs at "models.1.engine.seed"'),
        ("models.0.expert_memory", 'belongs at "models.0.pool.expert_memory"'),
        ("models.0.port", 'belongs at "serving.port"'),
        ("models.0.grup", 'nearest valid key is "models.0.group"'),
        ("models.0.zzzzz", "has name, model, group, replicas"),
        ("models.name", 'are numbered, as in "models.0"'),
        ("models.N.name", 'are numbered, as in "models.0"'),
        ("models.00.name", 'are numbered, as in "models.0"'),
        (f"models.{'9' * 5000}.name", 'are numbered, as in "models.0"'),
        ("models.0", "is a section: expected keys below it, such as name, model"),
        ("models", "is a list: expected entries with name, model"),
        ("rules.0.to_modl", 'nearest valid key is "rules.0.to_model"'),
        ("expert_memory", 'belongs at "pool.expert_memory"'),
        ("pool.expert_memry", 'nearest valid key is "pool.expert_memory"'),
    ],
)
def test_a_wrong_key_within_an_entry_is_told_with_its_number(key, said):
    with pytest.raises(SettingsError) as refused:
        load_settings(None, {"COTERIE_MODEL": "m"}, {key: Sourced(1, "--set")})
    assert said in str(refused.value) and str(refused.value).count("\n") == 0
    nested = 1
    for part in reversed(key.split(".")):
        nested = [nested] if part == "0" else {part: nested}
    if "0" in key.split(".") and key != "models.0":
        with pytest.raises(SettingsError) as refused:
            Settings.model_validate({"model": "m", **nested})
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ("[{name: a}]", "models.0.model is not set, and no earlier model is named 'a'"),
        ("[{name: m}]", "models.0: the name 'm' is taken"),
        ("[{name: a, model: x}, {name: a}]", "models.1: the name 'a' is taken"),
        ("[{name: a, model: x}, {name: a, model: y, group: b}]", "'a' is 'x' already, found 'y'"),
        ("[{name: a, model: x, group: b}, {name: a, group: b}]", "'a' and the group 'b' is taken"),
        ("[{name: auto, model: x}]", 'a model is named "auto"'),
        ("[{name: a, model: x, replicas: 1, min_replicas: 2}]", "min_replicas (2) is above"),
        ("[{name: a, model: x, group: a b}]", "models.0.group"),
        ("[{model: x}]", "models.0.name is not set"),
        (f"[{{name: {'a' * 129}, model: x}}]", "models.0.name: expected at most 128 printable"),
        ('[{name: "a\\nb", model: x}]', "models.0.name: expected at most 128 printable"),
        ('[{name: " ", model: x}]', "models.0.name: expected at most 128 printable"),
        ("[{name: m, group: b, tool_parser: none}]", "models.0.tool_parser: expected auto"),
        (
            "[{name: a, model: x}, {name: a, group: b, reasoning_parser: think}]",
            "models.1.reasoning_parser: expected none",
        ),
        (
            "[{name: m, group: b, engine: {context_tokens: 64}}]",
            "models.0.engine.context_tokens: expected None",
        ),
        ("[null]", '"models.0" is a section'),
        ("[null, {name: a, model: x}]", '"models.0" is a section'),
        ("[{name: a, model: x, engine: {max_sequences: 600, max_step_tokens: 600}}]", "models.0:"),
        ("[{name: a, model: x, pool: {expert_memory: 3 apples}}]", "models.0.pool.expert_memory:"),
        ("[x]", '"models.0" is a section'),
        ("x", '"models" is a list'),
    ],
)
def test_entries_that_clash_are_refused(tmp_path, models, said):
    assert said in refusal(tmp_path, f"model: m\nmodels: {models}\n")


def test_the_same_folder_by_two_spellings_is_one_model(tmp_path, monkeypatch):
    (tmp_path / "f").mkdir()
    monkeypatch.chdir(tmp_path)
    group = {"name": "f", "group": "b", "model": "./f"}
    settings = Settings.model_validate({"model": "f", "models": [group]})
    assert len(settings.entries()) == 2


def test_a_left_out_number_is_told():
    with pytest.raises(SettingsError, match=r"nothing of models\.0"):
        load_settings(None, {"COTERIE_MODEL": "m"}, {"models.1.name": Sourced("a", "--set")})


def test_a_wrong_value_of_the_first_model_is_told_once(tmp_path):
    said = refusal(tmp_path, TWO.replace("{seed: 3}", "{seed: x}"))
    assert [line.partition(":")[0] for line in said.splitlines()] == ["engine.seed"]


def test_rules_are_checked_against_the_models_there_are(tmp_path):
    said = refusal(tmp_path, TWO.replace("to_model: coder", "to_model: codr"))
    assert "rules.0.to_model: there is no model 'codr'; the nearest is 'coder'" in said
    said = refusal(tmp_path, TWO.replace("to_model: coder", "to_group: smal"))
    assert "there is no group 'smal'; the nearest is 'small'" in said


def test_what_is_shown_can_be_written_into_a_file(tmp_path):
    text = TWO + "serving: {cors_origins: ['https://a.example'], log_bodies: true}\n"
    settings = from_yaml(tmp_path, text).settings
    shown = {}
    for path in key_paths(settings):
        field = setting_keys().fields[setting_keys().general(path)]
        shown[path] = Sourced(yaml.safe_load(written(field, value_at(settings, path))), "shown")
    assert load_settings(None, {}, shown).settings == settings


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("engine.kv_memory", "1GiB"),
        ("serving.log_bodies", "false"),
        ("serving.cors_origins", "[]"),
        ("serving.keys_file", "null"),
        ("pool.expert_memory", "50%"),
        ("pool.hot_set", "{0: [1]}"),
        ("objectives.ttft_ms", "2000.0"),
    ],
)
def test_values_are_shown_as_a_file_has_them(tmp_path, key, form):
    settings = from_yaml(tmp_path, TWO).settings
    assert written(setting_keys().fields[key], value_at(settings, key)) == form
