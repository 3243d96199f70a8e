"""What a gateway knows of a group of replicas: how much is under way, and whether it answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.group_load import SHUNNED_S, TRIAL_PROMPTS, GroupLoad, Visit


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_prompts_count_by_replica() -> None:
    load = GroupLoad(2, Clock())
    load.answered()
    visits = [load.begin(3), load.begin(2)]
    assert load.reluctance == (False, 2.5)
    for visit in (*visits, *visits):
        visit.end()
    assert load.reluctance == (False, 0.0)


def test_a_group_on_trial_gets_one_request_at_a_time() -> None:
    load = GroupLoad(1, Clock())
    assert load.reluctance == (False, 0.0)
    first = load.begin(1)
    assert load.reluctance == (False, 1.0 + TRIAL_PROMPTS)
    first.end()
    assert load.reluctance == (False, 0.0), "it told nothing, so another one may try"
    load.begin(1)
    load.answered()
    assert load.reluctance == (False, 1.0)


def test_a_group_that_failed_is_on_trial_after_a_while_whatever_still_runs_there() -> None:
    clock = Clock()
    load = GroupLoad(1, clock)
    load.answered()
    load.begin(1)
    load.failed()
    assert load.reluctance == (True, 1.0)
    clock.now_s += SHUNNED_S
    assert load.reluctance == (False, 1.0)
    load.begin(1)
    assert load.reluctance == (False, 2.0 + TRIAL_PROMPTS)


@given(st.lists(st.tuples(st.sampled_from("beaf"), st.integers(0, 9))))
def test_nothing_is_under_way_once_all_visits_have_ended(actions: list[tuple[str, int]]) -> None:
    clock = Clock()
    load = GroupLoad(1, clock)
    visits: list[Visit] = []
    for action, number in actions:
        if action == "b":
            visits.append(load.begin(number))
        elif action == "e" and visits:
            visits[number % len(visits)].end()
        elif action == "a":
            load.answered()
        elif action == "f":
            load.failed()
    for visit in visits:
        visit.end()
    clock.now_s += SHUNNED_S
    assert load.reluctance == (False, 0.0)
