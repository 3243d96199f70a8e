from __future__ import annotations

import pytest
from pydantic import ValidationError

from core.errors import SettingsError
from deployments.settings import ServingSettings, check_sizes, hand_over_limit


def test_defaults_agree_with_each_other() -> None:
    check_sizes(ServingSettings(), max_sequences=32, context_tokens=None)


def test_bytes_may_be_written_with_units() -> None:
    assert ServingSettings(max_body_bytes="2MiB").max_body_bytes == 2 * 1024**2


def test_more_replicas_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_replicas"):
        ServingSettings(replicas=1, min_replicas=2)


def test_a_batch_above_what_a_replica_may_hold_is_refused() -> None:
    """Case 71, ray#43288."""
    with pytest.raises(SettingsError, match="max_ongoing_requests"):
        check_sizes(ServingSettings(max_ongoing_requests=8), 16, None)


def test_a_queue_too_small_for_the_longest_prompt_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_queued_prompt_tokens"):
        check_sizes(ServingSettings(max_queued_prompt_tokens=100), 4, 200)


def test_the_rank_gets_a_few_more_than_its_batch() -> None:
    assert [hand_over_limit(n) for n in (1, 8, 64)] == [3, 12, 96]
    assert [hand_over_limit(n, grouping=True) for n in (1, 8, 64)] == [33, 40, 96]
