"""Does prefetch pay? What its reads saved and what they cost, and whether it goes on.

What would have happened without it is reckoned, from read times measured where nothing had been
prefetched: a pass that had to read `n` more experts would have waited for them, less what it could
have computed meanwhile. Plain numbers in, plain decisions out; no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PrefetchState = Literal["probing", "on", "off"]

PROBE_PASSES: Final = 512
"""Passes over layers in which prefetch has to show that it pays."""
REVIEW_PASSES: Final = 1024
"""While it is on, it is looked at so often."""
FIRST_REST_PASSES: Final = 1024
"""Passes between standing down and the next probe; doubled each time a probe fails."""
LONGEST_REST_PASSES: Final = 65536
LEAST_GAIN: Final = 0.01
"""Share of the time that stall hidden, less harm done, must save."""
MOST_WASTE: Final = 0.15
"""Bytes read for nothing, as a share of all other bytes read."""
_SUMS_KEPT: Final = 0.98


class ReadTimes:
    """Seconds until `n` experts have come that were asked for together: latency + n x pace.

    Least squares over decaying sums of what was measured.
    """

    def __init__(self) -> None:
        self._n = self._n1 = self._n2 = self._t = self._nt = 0.0

    def add(self, number: int, seconds: float) -> None:
        """`number` experts, asked for together, were all there after `seconds`."""
        self._n = self._n * _SUMS_KEPT + 1.0
        self._n1 = self._n1 * _SUMS_KEPT + number
        self._n2 = self._n2 * _SUMS_KEPT + number * number
        self._t = self._t * _SUMS_KEPT + seconds
        self._nt = self._nt * _SUMS_KEPT + number * seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._n1 > 0

    @property
    def pace_s(self) -> float:
        """What one more expert adds; never more than its share of the whole time."""
        if not self.known:
            return 0.0
        share = self._t / self._n1
        spread = self._n * self._n2 - self._n1 * self._n1
        if spread <= 1e-9 * self._n * self._n2:
            return share
        return min(max((self._n * self._nt - self._n1 * self._t) / spread, 0.0), share)

    def seconds(self, number: int) -> float:
        """Expected for `number` experts; 0 for none, and before anything was measured."""
        if not number or not self.known:
            return 0.0
        pace_s = self.pace_s
        return (self._t - pace_s * self._n1) / self._n + number * pace_s


@dataclass(slots=True)
class Window:
    """What was counted since the last verdict."""

    passes: int = 0
    busy_s: float = 0.0
    """Time of the steps."""
    hidden_s: float = 0.0
    """Stall that prefetched experts saved."""
    harm_s: float = 0.0
    """Stall that prefetch caused, and its own time."""
    wasted_bytes: int = 0
    other_bytes: int = 0
    """Read on demand, or prefetched and used."""


class Payoff:
    """Probing, on or off: prefetch stands down where it does not pay, and tries again later.

    probing -> on, or off; on -> probing when a review finds that it does not pay any more; off ->
    probing after a rest that doubles with each failed probe.
    """

    def __init__(self, always: bool = False) -> None:
        """`always`: never stand down, whatever is found."""
        self.state: PrefetchState = "on" if always else "probing"
        self.window = Window()
        self.last_gain = 0.0
        """Share of the time that prefetch saved in the last full window, net."""
        self._always = always
        self._rest_passes = FIRST_REST_PASSES

    def pass_ended(self) -> None:
        """One more pass over a layer; from time to time, a verdict."""
        window = self.window
        window.passes += 1
        if self.state == "off":
            if window.passes >= self._rest_passes:
                self._rest_passes = min(2 * self._rest_passes, LONGEST_REST_PASSES)
                self._enter("probing")
            return
        if window.passes < (PROBE_PASSES if self.state == "probing" else REVIEW_PASSES):
            return
        self.last_gain = (window.hidden_s - window.harm_s) / max(window.busy_s, 1e-9)
        pays = (
            self.last_gain >= LEAST_GAIN and window.wasted_bytes <= MOST_WASTE * window.other_bytes
        )
        if self._always or pays:
            self._rest_passes = FIRST_REST_PASSES
            self._enter("on")
        else:
            self._enter("probing" if self.state == "on" else "off")

    def _enter(self, state: PrefetchState) -> None:
        self.state = state
        self.window = Window()
