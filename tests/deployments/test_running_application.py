"""What an operator asks of all replicas, where some of them do not answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.commands import admin
from core.errors import CoterieError
from deployments import running_application
from deployments.running_application import drain

NAMES = ("Supervisor", "Supervisor-two", "Supervisor-three")


class Handle:
    """Of one deployment; like Serve's, it sends nothing before its results are waited for."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        return self

    def results(self, timeout_s: float, return_exceptions: bool = False) -> list[Any]:
        answers = self._answers()
        failed = next((one for one in answers if isinstance(one, Exception)), None)
        if failed is not None and not return_exceptions:
            raise failed
        return list(answers)


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each deployment's replicas answer, to be filled in."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        running_application, "supervisor_deployments", lambda app, running=True: list(found)
    )
    monkeypatch.setattr(running_application, "driver_handle", lambda name, app: Handle(found[name]))
    return found


def test_all_models_drain_at_once(deployments: dict[str, Any]) -> None:
    together = threading.Barrier(len(NAMES), timeout=5.0)

    def answers() -> list[None]:
        together.wait()
        return [None]

    deployments |= dict.fromkeys(NAMES, answers)
    assert drain("a", 1.0)


def test_a_replica_that_is_gone_ends_no_other_ones_drain(deployments: dict[str, Any]) -> None:
    ended = []
    gone = threading.Event()

    def lost() -> list[Any]:
        gone.set()
        raise ActorDiedError

    def slow() -> list[Any]:
        gone.wait(5.0)
        ended.append("slow")
        return [None]

    deployments |= {NAMES[0]: lost, NAMES[1]: slow}
    assert not drain("a", 1.0)
    assert ended == ["slow"]
    deployments[NAMES[0]] = lambda: [ActorDiedError(), None]
    assert not drain("a", 1.0)


def test_nothing_to_drain_is_told(deployments: dict[str, Any]) -> None:
    assert not drain("a", 1.0)


def test_a_request_is_ended_though_another_models_replicas_do_not_answer(
    deployments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def silent() -> list[Any]:
        raise TimeoutError("no answer in 10 s")

    deployments |= {NAMES[0]: silent, NAMES[1]: lambda: [True]}
    assert admin.ask_supervisors("a", "cancel", "cmpl-1") == {NAMES[1]: [True]}
    assert "warning: Supervisor of application 'a' gave no answer" in capsys.readouterr().err
    del deployments[NAMES[1]]
    with pytest.raises(CoterieError, match="Supervisor of application 'a' gave no answer"):
        admin.ask_supervisors("a", "cancel", "cmpl-1")
