"""A layer-major pass of long prompts, run in slices between decode steps.

The model's own forward code cannot be left and entered again, so it runs in a thread of its own.
The two threads hand one baton back and forth: never do both run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from core.step import PoolStepStats
from engine.batcher import Batch, Batcher
from engine.paged_runner import PagedRunner
from engine.sequence import Sequence
from engine.stock_runner import StockRunner
from expert_pool.layer_major import layer_major
from expert_pool.pool import ExpertPool


class _BrokenOff(BaseException):
    """Unwinds the forward pass; nothing on the way may take it for an error of its own."""


class PrefillPass:
    """One pass. Made, resumed and broken off by the step thread."""

    def __init__(
        self, runner: PagedRunner | StockRunner, batch: Batch, may_go_on: Callable[[bool], bool]
    ) -> None:
        """`may_go_on(within_layer)`: whether nothing else is due where the pass could pause."""
        self.batch = batch
        self._may_go_on = may_go_on
        self.stats = PoolStepStats()
        """Rows that failed in the slices so far."""
        self._runner = runner
        self._threads = torch.get_num_threads()
        self._go = threading.Semaphore(0)
        self._halted = threading.Semaphore(0)
        self._broken_off = False
        self._logits: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="prefill-pass", daemon=True)
        self._thread.start()

    def resume(self) -> torch.Tensor | None:
        """Runs until something else is due; the logits when no layer is left.

        Raises what the forward pass raised.
        """
        self._go.release()
        self._halted.acquire()
        if self._error is not None:
            raise self._error
        return self._logits

    @property
    def is_over(self) -> bool:
        """No layer is left, or one raised."""
        return self._logits is not None or self._error is not None

    def add_faults(self, stats: PoolStepStats) -> None:
        """Notes what failed in a slice; afterwards `stats` names the rows of all slices."""
        for name in ("bad_rows", "failed_rows"):
            rows = {*getattr(self.stats, name), *getattr(stats, name)}
            setattr(self.stats, name, tuple(sorted(rows)))
            setattr(stats, name, getattr(self.stats, name))

    def break_off(self) -> None:
        """Ends it where it is, between two layers."""
        self._broken_off = True
        self._go.release()
        self._thread.join()

    def _work(self) -> None:
        self._go.acquire()
        try:
            if not self._broken_off:
                torch.get_num_threads()  # a thread's first look resets its count
                torch.set_num_threads(self._threads)
                with layer_major(self._pause):
                    self._logits = self._runner.run(self.batch.plan)
        except _BrokenOff:
            pass
        # Raised again in the step thread, whose business it is.
        except BaseException as error:
            self._error = error
        finally:
            self._halted.release()

    def _pause(self, within_layer: bool) -> bool:
        if self._may_go_on(within_layer):
            return False
        self._halted.release()
        self._go.acquire()
        if self._broken_off:
            raise _BrokenOff
        return True


def activation_bytes(model: Any) -> int:
    """Bytes that one token's intermediate results take at most while it passes a layer, experts
    aside: residual, normed and rotated copies, the widest projections, and sums in float32.
    """
    head = model.get_output_embeddings()
    hidden = model.get_input_embeddings().weight
    widest = max(
        (
            module.out_features
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ),
        default=0,
    )
    size = int(hidden.shape[1])
    return hidden.element_size() * (4 * size + 3 * widest) + 2 * 4 * size


class Turns:
    """Decides what runs next: a step, or a slice of the pass under way.

    Where sequences decode, steps and slices take turns, and a slice lasts about as long as the
    step before: the pass takes half of the time. Else a slice is one MoE layer.
    """

    def __init__(
        self,
        runner: PagedRunner | StockRunner,
        batcher: Batcher,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._batcher = batcher
        self._pass: PrefillPass | None = None
        self._slice_is_next = True
        self._clock = clock
        self._step_s = 0.0
        self._slice_began_s = 0.0

    def next_batch(self) -> Batch:
        """A step, or the pass, of which `run` runs one slice."""
        if self._pass is None and (batch := self._batcher.plan_pass()) is not None:
            self._pass = PrefillPass(self._runner, batch, self._may_go_on)
            self._slice_is_next = True
        if self._pass is None:
            return self._batcher.plan()
        if self._slice_is_next or not self._batcher.has_decoding:
            self._slice_is_next = False
            return self._pass.batch
        self._slice_is_next = True
        return self._batcher.plan()

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits of a batch that is through; None for a pass that is not."""
        began = self._clock()
        if self._pass is None or batch is not self._pass.batch:
            logits = self._runner.run(batch.plan)
            self._step_s = self._clock() - began
            return logits
        self._slice_began_s = began
        return self._pass.resume()

    def note_faults(self, batch: Batch, stats: PoolStepStats) -> None:
        """`stats` of the last slice of a pass name the rows that failed in any of them."""
        if self._pass is not None and batch is self._pass.batch:
            self._pass.add_faults(stats)
            if self._pass.is_over:
                self._pass = None

    def break_off(self, sequence: Sequence | None = None) -> None:
        """Gives up the pass under way, if `sequence` is in it; the others in it begin again.

        The pools' and pages' state is what it was, but for what a stock cache holds.
        """
        if sequence is not None and not self._batcher.is_passing(sequence):
            return
        stock = isinstance(self._runner, StockRunner)
        if self._pass is not None:
            self._pass.break_off()
            if stock:
                self._runner.release(other.sequence_id for other in self._pass.batch.sequences)
            self._pass = None
        self._batcher.break_off(start_over=stock)

    def _may_go_on(self, within_layer: bool) -> bool:
        """Asked in the pass's thread while the step thread waits for it."""
        if not self._batcher.has_decoding:
            return within_layer
        return self._clock() - self._slice_began_s < self._step_s


def pass_tokens(model: Any, pool: ExpertPool, prefill_bytes: int) -> int:
    """Tokens of a layer-major pass: 0 where all experts have slots, and reading is no matter."""
    if sum(pool.residency.quotas) == sum(layer.num_experts for layer in pool.index.layers):
        return 0
    return prefill_bytes // activation_bytes(model)
