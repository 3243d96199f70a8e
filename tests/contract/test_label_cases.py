"""Labelling of requests, by cases of users of other servers; numbers are rows of our list."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest

from deployments.caller import Caller
from deployments.domain_classifier import DomainClassifier, DomainGuesser, Guess
from deployments.domain_settings import DomainSettings
from deployments.request_labels import Labeller
from tests.deployments.labelled_gateway import LabelledGateway
from tests.deployments.small_domains import small_weights
from tests.serving.tiny_model_folder import make_folder


def test_one_poisoned_and_one_cancelled_item_harm_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """72, ray#66140: in a classifier's batch, they failed all items or answered the wrong ones."""
    classifier = DomainClassifier(small_weights())
    right = classifier.guess

    def guess(text: str) -> Guess:
        if "poison" in text:
            raise RuntimeError("poisoned")
        return right(text)

    monkeypatch.setattr(classifier, "guess", guess)
    labeller = Labeller(DomainGuesser(classifier), DomainSettings())
    front = LabelledGateway(make_folder(tmp_path), labeller)
    texts = ["pizza salad", "poison", "import class", "cancelled", "burger cheese", "lambda def"]
    expected = {"pizza salad": "food", "import class": "code", "burger cheese": "food"}
    expected |= {"lambda def": "code", "poison": ""}

    async def send(client: httpx.AsyncClient) -> list[httpx.Response | BaseException]:
        tasks = [
            asyncio.create_task(
                client.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": text},
                    headers={"x-session-id": text},
                )
            )
            for text in texts
        ]
        await asyncio.sleep(0)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = front.together(send)
    assert isinstance(answers[3], asyncio.CancelledError)
    others = [answer for number, answer in enumerate(answers) if number != 3]
    assert [answer.status_code for answer in others] == [200] * 5
    domains = {session: domain for domain, session, _ in front.labels()}
    for text, domain in expected.items():
        assert domains[labeller.session_of(Caller(session_id=text), None)] == domain


def test_readers_never_see_a_half_exchanged_classifier() -> None:
    """M5, moe-l2 0.8.1: a domain table exchanged under load was read half old and half new."""
    one = DomainClassifier(small_weights({"aa": "pizza", "bb": "code"}))
    other = DomainClassifier(
        small_weights({"pp": "tea", "qq": "milk", "rr": "water", "ss": "pizza"}, 0.3)
    )
    allowed = {one.guess("pizza"), other.guess("pizza")}
    assert {guess.domain for guess in allowed} == {"aa", "ss"}
    guesser = DomainGuesser(one)
    seen: set[Guess] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(guesser.guess("pizza"))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(400):
        guesser.swap(other if number % 2 == 0 else one)
        seen.add(guesser.guess("pizza"))
    done.set()
    for reader in readers:
        reader.join()
    assert seen == allowed
