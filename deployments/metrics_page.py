"""The page /metrics: what the supervisors count, in Prometheus' text format.

Names follow those that dashboards of other engines use, with our prefix. Each replica is a label,
so counters stay monotonic when one of them starts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "coterie_"

GAUGES = {
    "ready": ("ready", "1 while the replica has a rank that ran a real step."),
    "running": ("num_requests_running", "Requests that the rank holds."),
    "waiting": ("num_requests_waiting", "Requests in the replica's queue."),
    "waiting_prompt_tokens": ("num_prompt_tokens_waiting", "Prompt tokens in the queue."),
    "kv_used": ("kv_blocks_used", "KV blocks that live sequences hold."),
    "kv_total": ("kv_blocks", "KV blocks there are."),
    "experts_resident": ("experts_resident", "Experts in slots after the last step."),
    "prefetch_on": ("prefetch_on", "1 while reading ahead pays."),
    "batch_sequences": ("batch_max_sequences", "Most sequences that may run now."),
    "batch_prefill_tokens": ("batch_max_prefill_tokens", "Most prompt tokens of a step now."),
    "step_predicted_s": ("step_predicted_seconds", "What the last step was expected to take."),
    "step_model_error": ("step_model_error", "Mean relative error of such expectations."),
    "hints_on": ("hints_on", "1 while reading for requests that are queued pays."),
}
COUNTERS = {
    "completed": ("request_success", "Requests answered to their end."),
    "failed": ("request_failure", "Requests that ended with an error."),
    "aborted": ("request_aborted", "Requests whose client left."),
    "refused": ("admission_rejections", "Requests refused by a full queue."),
    "remakes": ("rank_remakes", "Ranks made again."),
    "steps": ("steps", "Steps of the rank."),
    "step_s": ("step_seconds", "Time in steps."),
    "held_s": ("step_held_seconds", "Time for which steps were put off to be shared by more."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "completion_tokens": ("generation_tokens", "Tokens of answers."),
    "decode_tokens": ("decode_tokens", "Tokens that passed in decode."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens that passed the model."),
    "prefix_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Sequences that had to give their blocks back."),
    "expert_misses": ("expert_misses", "Distinct experts asked for a step that had no slot."),
    "expert_evictions": ("expert_evictions", "Experts that left their slot."),
    "expert_returns": ("expert_returns", "Experts read again soon after they had left."),
    "expert_rereads": ("expert_rereads", "Reads repeated after a fault."),
    "expert_stall_s": ("expert_stall_seconds", "Time in which a read was awaited."),
    "expert_read_s": ("expert_read_seconds", "Time in which something was being read."),
    "expert_compared_misses": ("expert_compared_misses", "Misses where the optimum is known."),
    "expert_optimum_misses": ("expert_optimum_misses", "Those of Belady's optimum there."),
    "hints": ("hints", "Hints of queued requests."),
    "wrong_labels": ("wrong_labels", "Texts that were not about their domain."),
    "prefetch_hidden_s": ("prefetch_hidden_seconds", "Stall that prefetch saved, reckoned."),
}
_BY_LABEL = {
    ("expert_accesses", "tier", "Distinct experts asked for a step and layer, by where from."): {
        "slot": "expert_hits",
        "host": "expert_misses_host",
        "disk": "expert_misses_disk",
    },
    ("expert_read_bytes", "tier", "Bytes of experts brought into slots, by where from."): {
        "host": "expert_bytes_host",
        "disk": "expert_bytes_disk",
    },
    ("prefetch_bytes", "outcome", "Bytes read ahead, by whether they were asked for."): {
        "useful": "prefetch_useful_bytes",
        "wasted": "prefetch_wasted_bytes",
    },
    ("hint_experts", "outcome", "Experts read for queued requests, by what came of it."): {
        "begun": "hint_begun",
        "useful": "hint_useful",
        "wasted": "hint_wasted",
        "regretted": "hint_regretted",
        "dropped": "hint_dropped",
    },
}
_RECALL = ("prefetch_recall", "Share of the experts asked for that a predictor named, lately.")
_PREDICTORS = ("gate", "transitions", "previous", "prompt", "popularity")


_LABELS = ("model_name", "replica")
_GROUP = "group"
_Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True, slots=True)
class ReplicasStatus:
    """What the replicas of one model, or of one group of them, count."""

    model: str
    group: str
    """"" where the model has no groups."""
    statuses: Sequence[Mapping[str, float]]
    """One a replica, as `Supervisor.status` returns it."""


class _Statuses(Collector):
    def __init__(self, replicas: Sequence[ReplicasStatus]) -> None:
        self._replicas = replicas
        grouped = any(each.group for each in replicas)
        self._labels = (*_LABELS, _GROUP) if grouped else _LABELS

    def collect(self) -> Iterator[_Family]:
        """One family a metric, one sample a replica."""
        labels = self._labels
        for key, (name, text) in GAUGES.items():
            yield self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels), {(): key})
        for key, (name, text) in COUNTERS.items():
            yield self._filled(CounterMetricFamily(_PREFIX + name, text, labels=labels), {(): key})
        for (name, label, text), keys in _BY_LABEL.items():
            family = CounterMetricFamily(_PREFIX + name, text, labels=(*labels, label))
            yield self._filled(family, {(value,): key for value, key in keys.items()})
        recall = GaugeMetricFamily(_PREFIX + _RECALL[0], _RECALL[1], labels=(*labels, "predictor"))
        recalls: dict[tuple[str, ...], str] = {
            (name,): f"prefetch_recall_{name}" for name in _PREDICTORS
        }
        yield self._filled(recall, recalls, known_only=True)

    def _filled(
        self, family: _Family, keys: Mapping[tuple[str, ...], str], known_only: bool = False
    ) -> _Family:
        for labels, key in keys.items():
            for each in self._replicas:
                group = (each.group,) if _GROUP in self._labels else ()
                for status in each.statuses:
                    if known_only and key not in status:
                        continue
                    replica = f"{status.get('pid', 0):.0f}"
                    value = status.get(key, 0.0)
                    family.add_metric((each.model, replica, *group, *labels), value)
        return family


def metrics_page(replicas: Sequence[ReplicasStatus]) -> bytes:
    """The page's bytes."""
    registry = CollectorRegistry()
    registry.register(_Statuses(replicas))
    return generate_latest(registry)
