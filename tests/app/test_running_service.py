"""How commands find a service: by a file that nobody else may have written or can read."""

import os

import msgspec
import pytest

from app.cli import main
from app.running_service import RunningService, choose, recorded, running_services
from core.errors import CoterieError

ADDRESS = "127.0.0.1:9"
URL = "http://127.0.0.1:8000"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    return tmp_path / "running"


def test_a_service_is_found_by_its_user_alone_while_it_runs(place, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    with recorded(ADDRESS, URL):
        (path,) = place.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert place.stat().st_mode & 0o777 == 0o700
        (found,) = running_services()
        assert (found.pid, found.ray_token, found.ray_address) == (os.getpid(), "token", ADDRESS)
        assert choose(URL) == choose(None) == found
        path.chmod(0o644)
        assert running_services() == []
        path.chmod(0o600)
        place.chmod(0o777)
        assert running_services() == [], "others could have written it"
    assert not list(place.iterdir())


def test_the_dead_and_the_broken_are_passed_over(place):
    with recorded(ADDRESS, URL):
        (path,) = place.iterdir()
        gone = RunningService(2**22 + 1, URL, ADDRESS, None)
        path.write_bytes(msgspec.json.encode(gone))
        assert running_services() == [] and not path.exists()
    with recorded(ADDRESS, URL):
        (path,) = place.iterdir()
        path.write_text("{")
        with pytest.raises(CoterieError, match=f"a service at {URL} .*found: none"):
            choose(URL)


def test_a_cache_that_cannot_be_written_stops_no_service(place):
    place.write_text("a file where the folder should be")
    with recorded(ADDRESS, URL):
        assert running_services() == []


def test_admin_says_where_it_looked(place, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["admin", "requests", "--url", "http://127.0.0.1:1"])
    assert ended.value.code == 1
    assert "expected a service at http://127.0.0.1:1" in capsys.readouterr().err


def test_keys_are_made_and_hashed(capsys, monkeypatch):
    import io

    from deployments.api_keys import digest_text

    with pytest.raises(SystemExit):
        main(["admin", "keys", "new", "--tenant", "acme"])
    out = capsys.readouterr().out
    key = out.split("shown this once: ")[1].split("\n")[0]
    assert digest_text(key) in out and "acme:" in out and len(key) > 40
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    with pytest.raises(SystemExit):
        main(["admin", "keys", "hash"])
    assert capsys.readouterr().out.strip() == digest_text(key)


def test_another_process_under_the_same_id_is_no_service(place):
    with recorded(ADDRESS, URL):
        (path,) = place.iterdir()
        (found,) = running_services()
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, created_s=1.0)))
        assert running_services() == [] and not path.exists()
