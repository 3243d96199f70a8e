"""Popularity of names that clients choose, such as domains: a bounded number, shared out fairly."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt

from expert_pool.popularity import Popularity


class LabelTable:
    """Rows by (tenant, name), the longest unused at the front.

    A full table drops a row of the tenant that has the most of them: whoever invents names drops
    its own.
    """

    def __init__(
        self, num_layers: int, num_experts: int, half_life_tokens: float, most_rows: int
    ) -> None:
        self.most_rows = most_rows
        self.rows: OrderedDict[tuple[str, str], Popularity] = OrderedDict()
        self._shape = (num_layers, num_experts)
        self._half_life_tokens = half_life_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(row.counts.nbytes + row.tokens.nbytes for row in self.rows.values())

    def find(self, tenant: str, name: str) -> Popularity | None:
        """A name's row of a tenant."""
        return self.rows.get((tenant, name))

    def of(self, name: str) -> dict[str, Popularity]:
        """A name's rows by tenant."""
        return {key[0]: row for key, row in self.rows.items() if key[1] == name}

    def add(
        self,
        tenant: str,
        name: str,
        counts: npt.NDArray[np.floating] | npt.NDArray[np.int64],
        tokens: npt.NDArray[np.floating],
    ) -> None:
        """As `Popularity.add_all`; the row is made where there is none."""
        if not self.most_rows:
            return
        row = self.rows.get((tenant, name))
        if row is None:
            if len(self.rows) >= self.most_rows:
                self._drop_one(tenant)
            row = Popularity(*self._shape, self._half_life_tokens, np.float32)
            self.rows[tenant, name] = row
        self.rows.move_to_end((tenant, name))
        row.add_all(counts, tokens)

    def _drop_one(self, comer: str) -> None:
        held = Counter(tenant for tenant, _ in self.rows)
        held[comer] += 1  # who comes with a row too many is counted with it
        most = max(held.values())
        for key in self.rows:
            if held[key[0]] == most:
                del self.rows[key]
                return
        self.rows.popitem(last=False)
