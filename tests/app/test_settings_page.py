"""The reference page is the one that the settings make."""

from pathlib import Path

from app.settings import known_keys
from app.settings_page import settings_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == settings_page(), "run `make docs`"


def test_every_setting_is_on_it():
    page = settings_page()
    inherited = ("models.N.pool.", "models.N.engine.")
    own = [path for path in known_keys() if not path.startswith(inherited)]
    assert not [path for path in own if f"| `{path}` |" not in page]
    assert "`models.N.pool.*`" in page and "`models.N.engine.*`" in page
