"""What a supervisor adds up from its ranks' steps: counters that only grow, a few gauges."""

from __future__ import annotations

from core.step import StepStats


class StepTotals:
    """All steps of all ranks that one supervisor has had. A new rank goes on where one ended."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._recall: dict[str, float] = {}
        self._batch: dict[str, float] = {}
        self.add(StepStats(step=0, step_s=0.0))

    def add(self, stats: StepStats) -> None:
        """Count one step."""
        pool, prefetch, hints = stats.pool, stats.pool.prefetch, stats.pool.hints
        counted = {
            "decode_tokens": stats.decode_tokens,
            "prefill_tokens": stats.prefill_tokens,
            "preemptions": stats.preemptions,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "step_s": stats.step_s,
            "expert_hits": pool.demand_hits,
            "expert_misses": pool.demand_misses,
            "expert_misses_disk": pool.disk_misses,
            "expert_misses_host": pool.host_misses,
            "expert_bytes_disk": pool.bytes_read,
            "expert_bytes_host": pool.host_bytes,
            "expert_evictions": pool.evictions,
            "expert_returns": pool.returns,
            "expert_rereads": pool.rereads,
            "expert_stall_s": pool.stall_s,
            "expert_read_s": pool.read_s,
            "expert_compared_misses": pool.compared_misses,
            "expert_optimum_misses": pool.optimum_misses,
            "prefetch_useful_bytes": prefetch.used_bytes,
            "prefetch_wasted_bytes": prefetch.wasted_bytes,
            "prefetch_hidden_s": prefetch.hidden_s,
            "hints": hints.received,
            "hint_begun": hints.begun,
            "hint_useful": hints.useful,
            "hint_wasted": hints.wasted,
            "hint_regretted": hints.regretted,
            "hint_dropped": hints.dropped,
            "wrong_labels": hints.wrong_labels,
            "held_s": 0.0 if stats.batch is None else stats.batch.held_s,
        }
        for name, amount in counted.items():
            self._totals[name] = self._totals.get(name, 0) + amount
        self._gauges = {
            "experts_resident": float(pool.resident),
            "prefetch_on": float(prefetch.state == "on"),
            "hints_on": float(hints.state == "on"),
        }
        if stats.batch is not None:
            self._batch = {
                "batch_sequences": float(stats.batch.sequences),
                "batch_prefill_tokens": float(stats.batch.prefill_tokens),
                "step_predicted_s": stats.batch.predicted_s,
                "step_model_error": stats.batch.model_error,
            }
        for predictor, recall in prefetch.recall.items():  # told from time to time
            self._recall[f"prefetch_recall_{predictor}"] = recall

    def as_dict(self) -> dict[str, float]:
        """Everything by name, as plain numbers."""
        return {**self._totals, **self._gauges, **self._batch, **self._recall}
