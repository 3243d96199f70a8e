"""Up to how many rows an expert the native kernels beat torch. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Mean rows of the experts that a call uses; more than the last count as the last."""
FASTER = 1.05
"""By so much native has to be faster."""


@dataclass(frozen=True)
class RowTable:
    """Native is used while a call's experts have at most `most_rows` rows each, on average."""

    most_rows: float

    def is_native(self, rows: int, experts: int) -> bool:
        """Whether a call with `rows` (token, expert) pairs over `experts` distinct ones is."""
        return rows <= self.most_rows * max(1, experts)


ALWAYS = RowTable(float("inf"))


def measured_table(
    seconds: Callable[[int], tuple[float, float]], enough: Callable[[], bool]
) -> RowTable:
    """Measures bucket after bucket until torch wins, as its share of the work grows with the rows.

    `seconds(rows)` is what native and torch take with so many rows an expert; a bucket that torch
    wins is measured again. `enough()` ends it: buckets not measured go to torch.
    """
    most = 0.0
    for at, rows in enumerate(BUCKETS):
        if enough():
            return RowTable(most)
        if not any(native * FASTER <= torch for native, torch in (seconds(rows) for _ in range(2))):
            return RowTable(most)
        # Up to half way, in ratio, to the next bucket.
        most = rows * 1.5 if at + 1 < len(BUCKETS) else float("inf")
    return RowTable(most)
