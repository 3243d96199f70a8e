"""Cases about configuration and start-up, met by users of other servers."""

from pathlib import Path

import pytest

from app.settings import Settings
from app.settings_sources import load_settings
from core.errors import SettingsError
from engine.engine import Engine

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"


def load(tmp_path, text):
    path = tmp_path / "coterie.yaml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, {}, {}).settings


def test_default_settings_work_on_a_cpu():
    """transformers PR#42869 (case 59): the defaults of a server could not start on a CPU."""
    settings = Settings(model=str(DEMO_MODEL))
    engine = Engine(DEMO_MODEL, settings.engine, settings.pool)
    try:
        assert "".join(engine.chat([{"role": "user", "content": "Hello"}], max_tokens=8))
    finally:
        engine.close()


def test_a_misspelt_key_in_the_yaml_is_an_error_with_its_path_and_the_nearest_key(tmp_path):
    """ray PR#62538 (case 68): an unknown key was dropped and its default used in silence."""
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, "model: m\nserving:\n  max_ongoing_request: 4\n")
    assert 'unknown setting "serving.max_ongoing_request"' in str(refused.value)
    assert 'nearest valid key is "serving.max_ongoing_requests"' in str(refused.value)


@pytest.mark.parametrize("max_sequences", [5, 512])
def test_a_batch_above_max_ongoing_requests_is_refused_at_start(tmp_path, max_sequences):
    """ray#43288 (case 71): the larger batch could never fill, and nothing said so."""
    text = "model: m\nengine: {{max_sequences: {}}}\nserving: {{max_ongoing_requests: 4}}\n"
    with pytest.raises(SettingsError, match=r"engine\.max_sequences .*max_ongoing_requests"):
        load(tmp_path, text.format(max_sequences))
    assert load(tmp_path, text.format(4)).engine.max_sequences == 4
