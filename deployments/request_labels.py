"""What a request is labelled with: its domain, how sure that is, and its session."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from core.errors import SettingsError
from deployments.caller import Caller
from deployments.domain_classifier import (
    NO_GUESS,
    DomainClassifier,
    DomainGuesser,
    Guess,
    load_classifier,
)
from deployments.domain_settings import UNKNOWN, DomainSettings
from deployments.hint_trust import HintTrust
from deployments.openai_messages import Message

log = logging.getLogger("ray.serve")

HINT_CONFIDENCE = 0.9
"""Of a hint that the text neither confirms nor contradicts with certainty."""
JUDGING_CONFIDENCE = 0.7
"""A guess at least so sure says whether a hint is right."""
SESSION_BYTES = 12
_PERSON = b"coterie session"
_SYSTEM_CHARS = 256
_EARLIER_CHARS = 256
_EARLIER_TURNS = 2
_LAST_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Labels:
    """Where a request belongs; "" is not known."""

    domain: str = ""
    session: str = ""
    """A keyed hash of tenant and session id; the id itself goes no further."""
    confidence: float = 0.0
    """The probability that the domain is right; 0 where it is not known."""


NO_LABELS = Labels()


class Labeller:
    """Labels the requests of one gateway. A guess makes a request faster, and never fails it."""

    def __init__(self, guesser: DomainGuesser, settings: DomainSettings, key: bytes = b"") -> None:
        """`key` is that of the hashes of session ids, of at most 64 bytes."""
        self._guesser = guesser
        self._settings = settings
        self._key = key
        self._trust = HintTrust()
        self._own_labels = frozenset(settings.labels)

    @classmethod
    def open(cls, settings: DomainSettings) -> Labeller:
        """What cannot be read is left out and said in the log: requests are served without it."""
        key = b""
        try:
            key = settings.session_key()
        except SettingsError as error:
            log.warning("Session ids are hashed without a key: %s", error)
        return cls(DomainGuesser.open(settings), settings, key)

    def labels_of(self, caller: Caller, user: str | None, text: str | None) -> Labels:
        """`user` is the body's field, `text` what is to be guessed of, None for token ids."""
        guess = NO_GUESS if text is None else self._guesser.guess(text)
        domain = self._settled(caller, guess)
        return Labels(domain.domain, self.session_of(caller, user), domain.confidence)

    async def all_labels(
        self, caller: Caller, user: str | None, texts: Sequence[str | None]
    ) -> tuple[Labels, ...]:
        """Those of several prompts; others are served between two of them."""
        labels = []
        for number, text in enumerate(texts):
            if number:
                await asyncio.sleep(0)
            labels.append(self.labels_of(caller, user, text))
        return tuple(labels)

    def session_of(self, caller: Caller, user: str | None) -> str:
        """The hash of the caller's session id, or of the body's `user`; "" without either.

        It is the same in every gateway, and tells nothing of the id to who has no key.
        """
        kind, name = ("id", caller.session_id) if caller.session_id else ("user", user)
        if not name:
            return ""
        digest = blake2b(key=self._key, digest_size=SESSION_BYTES, person=_PERSON)
        for part in (caller.tenant, kind, name):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def reload(self) -> tuple[str, ...]:
        """Read the classifier's file again; its labels. On SettingsError the old one stays."""
        self.use(load_classifier(self._settings))
        return self._guesser.labels

    def use(self, classifier: DomainClassifier | None) -> None:
        """From now on guess with this one, at once and under load."""
        self._guesser.swap(classifier)

    def status(self) -> dict[str, float]:
        """Plain numbers."""
        return {
            "domain_labels": len(self._guesser.labels),
            "distrusted_tenants": self._trust.distrusted(),
        }

    def _settled(self, caller: Caller, guess: Guess) -> Guess:
        """The guess and the client's hint as one."""
        hint = caller.domain_hint
        if hint in ("", UNKNOWN):
            return guess
        if hint not in self._guesser.labels:
            # A name of the operator's own, of which the text says nothing; else nobody's.
            return Guess(hint, HINT_CONFIDENCE) if hint in self._own_labels else guess
        agrees = guess.domain == hint
        if guess.confidence >= JUDGING_CONFIDENCE:
            self._trust.judge(caller.tenant, agrees)
        if agrees:
            return Guess(hint, 1 - (1 - guess.confidence) * (1 - HINT_CONFIDENCE))
        overrule = self._settings.overrule
        doubted = guess.confidence >= overrule or not self._trust.trusts(caller.tenant)
        if overrule < 1.0 and doubted:
            return guess
        # What the text says for another domain is said against the hint.
        return Guess(hint, HINT_CONFIDENCE * (1 - guess.confidence / 2))


def main_domain(labels: Sequence[Labels]) -> str:
    """The domain of most prompts that have one; "" where none has."""
    known = Counter(label.domain for label in labels if label.domain)
    return known.most_common(1)[0][0] if known else ""


def chat_text(messages: Iterable[Message]) -> str:
    """What the turns say of the domain, bounded: the users' last ones and the system's beginning.

    Answers are left out: they are about what the users asked.
    """
    system = ""
    asked: list[str] = []
    for message in messages:
        if not message.content:
            continue
        if message.role == "user":
            asked.append(message.content)
        elif message.role in ("system", "developer") and not system:
            system = message.content[:_SYSTEM_CHARS]
    if not asked:
        return system
    last = asked[-1]
    if len(last) > _LAST_CHARS:
        last = f"{last[: _LAST_CHARS // 2]}\n{last[-_LAST_CHARS // 2 :]}"
    earlier = [turn[:_EARLIER_CHARS] for turn in asked[-1 - _EARLIER_TURNS : -1]]
    return "\n".join(part for part in (system, *earlier, last) if part)
