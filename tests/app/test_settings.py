"""Composed settings: strict about keys, about contradictions, about where a value came from."""

import pytest
from pydantic import ValidationError

from app.settings import Settings, known_keys, value_at
from app.settings_sources import Sourced, environment_name, load_settings
from core.errors import SettingsError


def from_yaml(tmp_path, text, environ=None, flags=None):
    path = tmp_path / "coterie.yaml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, environ or {}, flags or {})


def refusal(tmp_path, text, **sources):
    with pytest.raises(SettingsError) as refused:
        from_yaml(tmp_path, text, **sources)
    return str(refused.value)


def test_later_sources_win_and_each_value_knows_its_own(tmp_path):
    text = "model: m\nengine:\n  seed: 1\n  max_sequences: 2\n  kv_memory: 1MiB\n"
    environ = {"COTERIE_ENGINE__MAX_SEQUENCES": "3", "COTERIE_ENGINE__KV_MEMORY": "2MiB"}
    loaded = from_yaml(
        tmp_path, text, environ, {"engine.kv_memory": Sourced("3MiB", "--kv-memory")}
    )
    assert loaded.settings.engine.seed == 1
    assert loaded.settings.engine.max_sequences == 3
    assert loaded.settings.engine.kv_memory == 3 * 1024**2
    assert loaded.origins["engine.seed"] == "coterie.yaml:3"
    assert loaded.origins["engine.max_sequences"] == "COTERIE_ENGINE__MAX_SEQUENCES"
    assert loaded.origins["engine.kv_memory"] == "--kv-memory"
    assert loaded.origins["engine.dtype"] == "default"
    assert list(loaded.origins) == [path for path in known_keys() if ".N." not in path]


def test_a_misspelt_key_names_its_path_line_and_the_nearest_one(tmp_path):
    said = refusal(tmp_path, "model: m\nserving:\n  max_ongoing_request: 4\n")
    assert '"serving.max_ongoing_request"' in said
    assert '"serving.max_ongoing_requests"' in said
    assert "coterie.yaml:3" in said


def test_a_misplaced_key_names_where_it_belongs(tmp_path):
    said = refusal(tmp_path, "model: m\nmax_sequences: 4\n")
    assert "misplaced" in said
    assert '"engine.max_sequences"' in said


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("engine.portt", "serving.port"),
        ("servng.replica", "serving.replicas"),
        ("objectives.ttft", "objectives.ttft_ms"),
        ("engin.seeds", "engine.seed"),
    ],
)
def test_the_nearest_key_is_looked_for_everywhere(key, nearest):
    with pytest.raises(SettingsError, match=f'nearest valid key is "{nearest}"'):
        load_settings(None, {"COTERIE_MODEL": "m"}, {key: Sourced(1, "--set")})


def test_a_key_like_no_other_lists_what_there_is(tmp_path):
    assert "max_step_tokens" in refusal(tmp_path, "model: m\nengine:\n  zzzzz: 1\n")
    assert "objectives" in refusal(tmp_path, "model: m\nzzzzz:\n  a: 1\n")


def test_all_unknown_keys_are_named_at_once(tmp_path):
    said = refusal(tmp_path, "model: m\nengine:\n  sed: 1\nserving:\n  prt: 1\n")
    assert len(said.splitlines()) == 2


def test_a_section_is_no_value(tmp_path):
    assert '"engine" is a section' in refusal(tmp_path, "model: m\nengine: 4\n")


def test_an_empty_section_and_an_empty_file_are_fine(tmp_path):
    assert from_yaml(tmp_path, "model: m\nengine:\n").settings.engine.seed == 0
    assert from_yaml(tmp_path, "", {"COTERIE_MODEL": "m"}).settings.model == "m"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "expected a mapping"),
        ("model: [\n", "not valid YAML"),
        ("model: m\nengine:\n  seed: 1\n  seed: 2\n", '"engine.seed" is set twice'),
        ("model: m\nengine:\n  seed: 1\nengine:\n  seed: 2\n", '"engine.seed" is set twice'),
    ],
)
def test_a_bad_file_says_why(tmp_path, text, expected):
    assert expected in refusal(tmp_path, text)


def test_a_missing_or_binary_file_says_why(tmp_path):
    with pytest.raises(SettingsError, match="cannot read the config file"):
        load_settings(tmp_path / "none.yaml", {}, {})
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings(tmp_path / "bin.yaml", {}, {})


def test_a_bad_value_names_path_value_and_origin():
    with pytest.raises(SettingsError) as refused:
        load_settings(None, {"COTERIE_MODEL": "m", "COTERIE_SERVING__PORT": "99999"}, {})
    said = str(refused.value)
    assert said.startswith("serving.port: ")
    assert "'99999'" in said
    assert "COTERIE_SERVING__PORT" in said


def test_an_unknown_variable_is_an_error_but_the_known_others_are_not():
    with pytest.raises(SettingsError, match="COTERIE_ENGINE__SED"):
        load_settings(None, {"COTERIE_MODEL": "m", "COTERIE_ENGINE__SED": "1"}, {})
    assert load_settings(None, {"COTERIE_MODEL": "m", "COTERIE_CACHE": "/tmp"}, {})


def test_null_unsets_a_value():
    environ = {"COTERIE_MODEL": "m", "COTERIE_ENGINE__CONTEXT_TOKENS": "8"}
    flags = {"engine.context_tokens": Sourced(None, "--set")}
    assert load_settings(None, environ, flags).settings.engine.context_tokens is None


def test_the_model_must_be_named():
    with pytest.raises(SettingsError, match="model is not set"):
        load_settings(None, {}, {})


def test_every_setting_has_a_variable_of_its_own():
    assert environment_name("engine.max_sequences") == "COTERIE_ENGINE__MAX_SEQUENCES"
    names = {environment_name(path) for path in known_keys()}
    assert len(names) == len(known_keys())


def test_every_setting_is_described():
    assert not [path for path, field in known_keys().items() if not field.description]


def test_serve_arguments_are_checked_alike():
    with pytest.raises(SettingsError, match=r"serving\.max_ongoing_requests"):
        Settings.model_validate({"model": "m", "serving": {"max_ongoing_request": 4}})
    with pytest.raises(ValidationError):
        Settings.model_validate({"model": "m", "serving": {"port": "http"}})


def test_a_batch_larger_than_what_a_replica_is_handed_is_refused(tmp_path):
    said = refusal(
        tmp_path,
        "model: m\nengine: {max_sequences: 8}\nserving: {max_ongoing_requests: 4}\n",
    )
    assert "engine.max_sequences (8)" in said
    assert "serving.max_ongoing_requests (4)" in said


def test_a_step_smaller_than_the_batch_is_refused(tmp_path):
    said = refusal(tmp_path, "model: m\nengine: {max_sequences: 8, max_step_tokens: 4}\n")
    assert "max_step_tokens (4)" in said
    assert "max_sequences (8)" in said


def test_a_queue_that_the_longest_prompt_could_never_enter_is_refused(tmp_path):
    text = "model: m\nengine: {context_tokens: 9}\nserving: {max_queued_prompt_tokens: 8}\n"
    assert "max_queued_prompt_tokens (8)" in refusal(tmp_path, text)


def test_settings_cannot_change_and_pass_through_json_whole():
    settings = Settings.model_validate({"model": "m", "pool": {"expert_memory": "50%"}})
    with pytest.raises(ValidationError):
        settings.model = "other"
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    assert value_at(settings, "pool.expert_memory") == "50%"


def test_objectives_are_there_for_all():
    settings = Settings(model="m")
    assert settings.objectives.ttft_ms > 0
    assert settings.objectives.tpot_ms > 0
