"""Whether texts are about what their labels say, by the experts that they use.

A label helps where its top experts are asked for more often than everyone's. Two things are judged:

- a text: where what others taught of its domain is asked for less than everyone's, beyond chance,
  and what its own tenant taught is not asked for more, the guess was wrong. Its domain is not
  believed any more, unless it turns out right later on.
- a tenant: where what it taught of a domain says no more of its own next texts than everyone's
  does, or its texts contradict what several others taught, its row does not count for others while
  theirs say more. A client that labels everything alike teaches nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.domain_popularity import BoolArray, DomainPopularity, Label

ENOUGH_TOKENS: Final = 64
"""Before so many tokens of a text passed, its label is believed: prompts of unlike things may
begin alike."""
ENOUGH_OF_A_TENANT: Final = 256
"""Before so many tokens, what a tenant teaches counts."""
YOUNG_TOKENS: Final = 1024
"""Until a tenant taught so much of a domain, all of its texts teach its own row: it may mean
something else than others do."""
_HALVED_AT_TOKENS: Final = 4096.0
_SIGMAS: Final = 2.0
_LEAST_GAIN: Final = 0.025
"""Share of the choices by which something must differ from everyone's, beyond chance."""
_REMEMBERED: Final = 256


class _Gain:
    """Choices among some top experts, less those among everyone's."""

    __slots__ = ("choices", "gain", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.choices = 0.0
        self.gain = 0.0

    def add(self, gain: int, choices: int, tokens: float) -> None:
        self.tokens += tokens
        self.choices += choices
        self.gain += gain

    def halve(self) -> None:
        self.tokens *= 0.5
        self.choices *= 0.5
        self.gain *= 0.5

    @property
    def is_more(self) -> bool:
        return self.gain > self._least

    @property
    def is_less(self) -> bool:
        return self.gain < -self._least

    @property
    def _least(self) -> float:
        return max(_SIGMAS * self.choices**0.5, _LEAST_GAIN * self.choices)


class _Evidence:
    """Of a text, or of a tenant's texts of one domain."""

    __slots__ = ("others", "own", "verdict")

    def __init__(self) -> None:
        self.others = _Gain()
        """By what other tenants taught, and by what its own did."""
        self.own = _Gain()
        self.verdict: bool | None = None


class LabelJudge:
    """Belongs to one pool. Sequences are named by their number."""

    def __init__(self, popularity: DomainPopularity) -> None:
        self.wrong = 0
        """Texts so far whose domain was found to be wrong."""
        self._popularity = popularity
        self._texts: OrderedDict[int, _Evidence] = OrderedDict()
        self._tenants: dict[tuple[str, str], _Evidence] = {}

    def believes(self, sequence_id: int) -> bool:
        """Whether a sequence's domain has not been found to be wrong."""
        text = self._texts.get(sequence_id)
        return text is None or text.verdict is not False

    def teaches(self, sequence_id: int, label: Label) -> bool:
        """Whether a sequence's tokens are to count for its tenant's row of its domain."""
        known = self._popularity.tokens_of_own(label)
        return self.believes(sequence_id) or known < YOUNG_TOKENS

    def doubts(self, label: Label) -> bool:
        """Whether a tenant's texts of a domain are no guide to what they will use."""
        return (label.tenant, label.domain) in self._popularity.uncounted

    def look(
        self,
        sequence_id: int,
        label: Label,
        counts: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.floating],
    ) -> None:
        """`tokens` [layers] of a text chose experts `counts` [layers, experts] times.

        Call it before the domain learns from these tokens.
        """
        new = sequence_id not in self._texts
        text = self._of_text(sequence_id)
        tenant = self._of_tenant((label.tenant, label.domain))
        popularity = self._popularity
        # As of when a text began, lest it be compared with itself.
        everyone = popularity.tops_of_everyone(renew=new)
        others = popularity.tops_of_others(label, renew=new)
        own = popularity.tops_of_own(label, renew=new)
        if everyone is None:
            return
        usual, choices, passed = int(counts[everyone].sum()), int(counts.sum()), tokens.mean()

        def note(tops: BoolArray | None, *gains: _Gain) -> None:
            if tops is not None:
                for gain in gains:
                    gain.add(int(counts[tops].sum()) - usual, choices, float(passed))

        note(others, text.others)
        if popularity.num_others(label) > 1:  # of two who differ, neither is right
            note(others, tenant.others)
        note(own, text.own, tenant.own)
        self._judge_text(text)
        self._judge_tenant(label, tenant)

    def _judge_text(self, text: _Evidence) -> None:
        others, own = text.others, text.own
        if max(others.tokens, own.tokens) < ENOUGH_TOKENS:
            return
        wrong = others.is_less and not own.is_more
        if others.tokens < ENOUGH_TOKENS:
            wrong = own.is_less
        self.wrong += wrong and text.verdict is not False
        text.verdict = not wrong

    def _judge_tenant(self, label: Label, tenant: _Evidence) -> None:
        others, own = tenant.others, tenant.own
        if max(others.tokens, own.tokens) > _HALVED_AT_TOKENS:
            others.halve()
            own.halve()
        useless = own.tokens >= ENOUGH_OF_A_TENANT and not own.is_more
        contrary = others.tokens >= ENOUGH_OF_A_TENANT and others.is_less
        self._popularity.count(label, not (useless or contrary), contrary)

    def _of_text(self, sequence_id: int) -> _Evidence:
        found = self._texts.pop(sequence_id, None) or _Evidence()
        self._texts[sequence_id] = found
        if len(self._texts) > _REMEMBERED:
            self._texts.popitem(last=False)
        return found

    def _of_tenant(self, key: tuple[str, str]) -> _Evidence:
        found = self._tenants.get(key)
        if found is None:
            if len(self._tenants) >= _REMEMBERED:
                # Those of rows that are gone: nobody's names push out what is known of another.
                for other in [k for k in self._tenants if not self._popularity.has_row(*k)]:
                    del self._tenants[other]
            found = self._tenants[key] = _Evidence()
        return found
