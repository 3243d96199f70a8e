"""A request's labels: hints and guesses as one, tenants that hint wrongly, sessions, chat text."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import SettingsError
from deployments.caller import NOBODY, Caller
from deployments.domain_classifier import DomainClassifier, DomainGuesser
from deployments.domain_settings import DomainSettings
from deployments.hint_trust import LEAST_JUDGED, MAX_TENANTS, HintTrust
from deployments.openai_messages import Message
from deployments.request_labels import (
    HINT_CONFIDENCE,
    Labeller,
    Labels,
    chat_text,
    main_domain,
)
from tests.deployments.small_domains import small_weights

SURE_FOOD = "pizza salad burger"
VAGUE_FOOD = "a pizza after all those other words that nobody knows here at all"
CLEAR_FOOD = "a pizza among other words that nobody knows here"
"""Clear enough to judge a hint by, not to overrule it."""
NOTHING = "words that nobody knows"


def labeller(key: bytes = b"", **fields: object) -> Labeller:
    domains = DomainSettings(**fields)  # type: ignore[arg-type]
    return Labeller(DomainGuesser(DomainClassifier(small_weights())), domains, key)


def hinted(hint: str, tenant: str = "") -> Caller:
    return Caller(tenant=tenant, domain_hint=hint)


def domain(labels: Labels) -> tuple[str, float]:
    return labels.domain, labels.confidence


def test_without_a_hint_the_text_tells_the_domain() -> None:
    found = labeller().labels_of(NOBODY, None, SURE_FOOD)
    assert found.domain == "food" and found.confidence > 0.99 and found.session == ""
    assert labeller().labels_of(NOBODY, None, NOTHING) == Labels()


def test_token_ids_have_the_domain_that_is_hinted_and_else_none() -> None:
    assert labeller().labels_of(NOBODY, None, None) == Labels()
    assert domain(labeller().labels_of(hinted("code"), None, None)) == ("code", HINT_CONFIDENCE)


def test_a_hint_sharpens_what_the_text_says() -> None:
    plain = labeller().labels_of(NOBODY, None, VAGUE_FOOD)
    both = labeller().labels_of(hinted("food"), None, VAGUE_FOOD)
    assert both.domain == plain.domain == "food" and 1.0 > both.confidence > plain.confidence


def test_a_hint_wins_over_a_guess_that_is_not_sure() -> None:
    vague = labeller().labels_of(NOBODY, None, VAGUE_FOOD)
    assert vague.domain == "food" and vague.confidence < 0.95
    found = labeller().labels_of(hinted("code"), None, VAGUE_FOOD)
    assert found.domain == "code" and 0.4 < found.confidence < HINT_CONFIDENCE


def test_a_sure_guess_overrules_a_hint_unless_hints_always_win() -> None:
    assert labeller().labels_of(hinted("code"), None, SURE_FOOD).domain == "food"
    always = labeller(overrule=1.0)
    assert always.labels_of(hinted("code"), None, SURE_FOOD).domain == "code"


def test_a_hint_that_names_no_domain_is_as_if_there_were_none() -> None:
    for hint in ("weather", "unknown"):
        caller = hinted(hint)
        assert labeller().labels_of(caller, None, SURE_FOOD).domain == "food"
        assert labeller().labels_of(caller, None, NOTHING).domain == ""


def test_the_operators_own_labels_are_taken_from_hints() -> None:
    own = labeller(labels=("weather",))
    assert domain(own.labels_of(hinted("weather"), None, SURE_FOOD)) == ("weather", HINT_CONFIDENCE)
    assert own.labels_of(NOBODY, None, SURE_FOOD).domain == "food"


def test_with_the_classifier_off_only_the_operators_labels_are_known() -> None:
    off = Labeller(DomainGuesser(), DomainSettings(classifier="off", labels=("code",)))
    assert off.labels_of(hinted("code"), None, SURE_FOOD).domain == "code"
    assert off.labels_of(hinted("food"), None, SURE_FOOD).domain == ""


def test_a_client_that_calls_everything_code_is_not_followed_for_long() -> None:
    made = labeller()
    clumsy, honest = hinted("code", "clumsy"), hinted("code", "honest")
    followed = [
        made.labels_of(clumsy, None, CLEAR_FOOD).domain == "code" for _ in range(2 * LEAST_JUDGED)
    ]
    assert all(followed[: LEAST_JUDGED - 1]) and not any(followed[LEAST_JUDGED - 1 :])
    assert made.labels_of(clumsy, None, VAGUE_FOOD).domain == "food"
    always = labeller(overrule=1.0)
    labels = [always.labels_of(clumsy, None, CLEAR_FOOD).domain for _ in range(2 * LEAST_JUDGED)]
    assert set(labels) == {"code"}
    assert made.status()["distrusted_tenants"] == 1
    # Others are believed as before, and so is it once its hints agree with its texts again.
    assert made.labels_of(honest, None, VAGUE_FOOD).domain == "code"
    for _ in range(200):
        made.labels_of(clumsy, None, "def return import")
    assert made.labels_of(clumsy, None, VAGUE_FOOD).domain == "code"


def test_texts_that_say_little_judge_nobody() -> None:
    made = labeller()
    for _ in range(10 * LEAST_JUDGED):
        made.labels_of(hinted("code"), None, NOTHING)
    assert made.status()["distrusted_tenants"] == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=300))
def test_trust_follows_what_was_seen_last(agreements: list[bool]) -> None:
    trust = HintTrust()
    for agrees in agreements:
        trust.judge("t", agrees)
    if len(agreements) < LEAST_JUDGED:
        assert trust.trusts("t")
    for _ in range(200):
        trust.judge("t", True)
    assert trust.trusts("t")
    for _ in range(200):
        trust.judge("t", False)
    assert not trust.trusts("t") and trust.trusts("other")


def test_memory_of_tenants_is_bounded_and_the_oldest_is_forgotten() -> None:
    trust = HintTrust()
    for _ in range(LEAST_JUDGED):
        trust.judge("old", False)
    assert not trust.trusts("old")
    for number in range(MAX_TENANTS):
        trust.judge(f"tenant {number}", True)
    assert len(trust._records) == MAX_TENANTS and trust.trusts("old")


def test_a_session_is_one_hash_in_every_gateway_and_another_for_every_tenant() -> None:
    made, other = labeller(), labeller()
    one = Caller(tenant="a", session_id="chat-7")
    session = made.session_of(one, None)
    assert session == other.session_of(one, "user") and len(session) == 24
    assert "chat" not in session
    different = {
        session,
        made.session_of(Caller(tenant="b", session_id="chat-7"), None),
        made.session_of(Caller(tenant="a", session_id="chat-8"), None),
        made.session_of(Caller(tenant="b", session_id="xid7"), None),
        made.session_of(Caller(tenant="bidx", session_id="7"), None),
        made.session_of(Caller(tenant="a"), "chat-7"),
        labeller(key=b"k" * 32).session_of(one, None),
        labeller(key=b"l" * 32).session_of(one, None),
    }
    assert len(different) == 8
    assert made.session_of(NOBODY, None) == made.session_of(NOBODY, "") == ""
    assert made.session_of(NOBODY, "\ud800 any text")


def test_the_key_of_sessions_is_read_from_its_file_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(SettingsError, match=r"session_key_file: .* cannot be read"):
        DomainSettings(session_key_file=str(path)).session_key()
    for size in (0, 15, 65):
        path.write_bytes(bytes(size))
        with pytest.raises(SettingsError, match="expected 16 to 64 bytes"):
            DomainSettings(session_key_file=str(path)).session_key()
    path.write_bytes(os.urandom(32))
    assert DomainSettings(session_key_file=str(path)).session_key() == path.read_bytes()


def test_a_key_that_vanished_stops_no_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    domains = DomainSettings(classifier="off", session_key_file=str(tmp_path / "none"))
    with caplog.at_level("WARNING", logger="ray.serve"):
        made = Labeller.open(domains)
    assert "without a key" in caplog.text
    assert made.session_of(Caller(session_id="x"), None)


def test_a_file_is_taken_up_anew_and_a_bad_one_leaves_the_old_in_place(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    small_weights().write(path)
    made = Labeller.open(DomainSettings(classifier=str(path)))
    small_weights({"drinks": "tea", "snacks": "pizza"}).write(path)
    assert made.labels_of(NOBODY, None, "pizza").domain == "food"
    assert made.reload() == ("drinks", "snacks")
    assert made.labels_of(NOBODY, None, "pizza").domain == "snacks"
    path.write_bytes(b"damaged")
    with pytest.raises(SettingsError):
        made.reload()
    assert made.labels_of(NOBODY, None, "pizza").domain == "snacks"


def turns(*pairs: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in pairs]  # type: ignore[arg-type]


def test_of_a_chat_the_system_and_the_last_questions_are_looked_at() -> None:
    text = chat_text(
        turns(
            ("system", "Be kind."),
            ("user", "first"),
            ("assistant", "an answer"),
            ("user", "second"),
            ("assistant", "another answer"),
            ("user", "third"),
            ("assistant", "and one more"),
            ("user", "last"),
        )
    )
    assert text.split("\n") == ["Be kind.", "second", "third", "last"]


def test_of_a_long_chat_little_is_looked_at_and_the_last_question_most() -> None:
    long = "x" * 3_000_000
    text = chat_text(
        turns(("system", long), ("user", long), ("user", long), ("user", f"begin {long} end"))
    )
    assert len(text) < 2048 and "begin" in text and text.endswith("end")


def test_a_chat_may_have_no_question() -> None:
    assert chat_text(turns(("system", "You are a cook."))) == "You are a cook."
    assert chat_text(turns(("assistant", "Hello"))) == ""


def test_several_prompts_are_labelled_one_by_one_and_most_of_them_decide() -> None:
    texts = [SURE_FOOD, "def return", None, SURE_FOOD, NOTHING]
    labels = asyncio.run(labeller().all_labels(Caller(session_id="s"), None, texts))
    assert [label.domain for label in labels] == ["food", "code", "", "food", ""]
    assert len({label.session for label in labels}) == 1 and labels[0].session
    assert main_domain(labels) == "food" and main_domain((Labels(),)) == main_domain(()) == ""


@pytest.mark.parametrize("labels", [("Upper",), ("a b",), ("x" * 65,), ("",), ("unknown",)])
def test_labels_that_cannot_be_sent_are_refused(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="labels"):
        DomainSettings(labels=labels)
