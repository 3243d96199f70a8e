"""Where a domain's last requests went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.domain_places import DomainPlaces


def test_a_domain_leans_to_where_its_last_requests_went() -> None:
    places = DomainPlaces(4, 10.0)
    for _ in range(20):
        places.sent("law", "a")
        places.sent("code", "b")
    lean = places.lean("law", "abc")
    assert lean["a"] == pytest.approx(0.5, abs=0.02)
    assert lean["b"] == pytest.approx(-0.5, abs=0.02)
    assert lean["c"] == 0.0
    for _ in range(30):
        places.sent("law", "b")
    assert places.lean("law", "ab")["b"] > 0.0, "half lives count requests"


def test_where_all_is_of_one_domain_none_suits_it_best() -> None:
    places = DomainPlaces(4, 10.0)
    for _ in range(60):
        places.sent("law", "a")
    assert places.lean("law", "ab") == {"a": 0.0, "b": 0.0}


def test_the_oldest_domain_is_forgotten() -> None:
    places = DomainPlaces(2, 10.0)
    for domain, replica in (("law", "a"), ("code", "b"), ("law", "a"), ("math", "b")):
        places.sent(domain, replica)
    assert places.lean("code", "ab") == {"a": 0.0, "b": 0.0}
    assert places.lean("law", "ab")["a"] > 0.0


def test_what_went_to_a_replica_that_is_gone_counts_no_more() -> None:
    places = DomainPlaces(4, 10.0)
    for domain, replica in (("law", "a"), ("law", "b"), ("code", "c")):
        places.sent(domain, replica)
    places.keep({"b", "c"})
    lean = places.lean("law", "bc")
    assert lean["b"] > 0.4 and lean["c"] < -0.4
    places.keep({"d"})
    assert places.lean("law", "d") == {"d": 0.0}


def test_a_count_that_decayed_to_nothing_is_none() -> None:
    places = DomainPlaces(4, 1.0)
    places.sent("law", "a")
    for _ in range(5000):  # beyond the smallest float
        places.sent("law", "b")
    places.keep({"a"})
    assert places.lean("law", "a") == {"a": 0.0}


@given(st.lists(st.tuples(st.sampled_from(["", "x", "y", "z"]), st.sampled_from("abcd"))))
def test_leanings_cancel_out(sent: list[tuple[str, str]]) -> None:
    places = DomainPlaces(2, 3.0)
    for domain, replica in sent:
        places.sent(domain, replica)
        assert sum(places.lean(domain, "abcd").values()) == pytest.approx(0.0, abs=1e-9)
