"""The rank: a Ray actor that holds the engine and steps it, beside a supervisor on its node.

This file itself needs neither Ray nor torch; the engine factory it is given imports torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.errors import CoterieError, RequestError
from core.freed_memory import return_freed_memory
from core.request import Request
from core.torch_environment import prepare_torch
from deployments.rank_channel import (
    Add,
    Cancel,
    ChannelError,
    Down,
    Fatal,
    Heartbeat,
    Hint,
    Idle,
    RankInfo,
    RankSocket,
    Ready,
    Rejected,
    Step,
    Stop,
)

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger("ray.serve")

HEARTBEAT_S = 1.0
INVARIANTS_EVERY_S = 1.0
"""Least time between two checks of the invariants. Every idle state that lasts is checked."""


def rank_info(engine: Engine) -> RankInfo:
    """What the supervisor and the gateway need to know of an engine."""
    return RankInfo(
        pid=os.getpid(),
        model_type=engine.shape.model_type,
        vocab_size=engine.shape.vocab_size,
        context_tokens=engine.limits.context_tokens,
        max_sequences=engine.limits.max_sequences,
        eos_ids=tuple(engine.eos_ids),
    )


class RankActor:
    """One device, one engine, one channel. `run` lasts as long as the rank."""

    def run(self, socket_path: str, engine_factory: str, settings: dict[str, Any]) -> None:
        """Make the engine, then step it until told to stop or the supervisor is gone.

        `engine_factory` is "module:function"; the function gets `settings`.
        """
        threads = int(settings.get("engine", {}).get("threads") or 0) or os.cpu_count() or 1
        # Ray limits OpenMP to the CPUs it reserved for the actor; ours is a placement count.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        prepare_torch()
        with RankSocket(socket_path) as link:
            loop = StepLoop(link)
            threading.Thread(target=loop.beat, daemon=True).start()
            threading.Thread(target=loop.read, daemon=True).start()
            try:
                engine = _import(engine_factory)(settings)
                link.send(Ready(rank_info(engine)))
                loop.run(engine)
            except ChannelError:
                return  # the supervisor is gone, and with it the reason to run
            # Whatever else ends the rank is told to the supervisor, which makes a new one.
            except Exception as error:
                loop.report(error)


class StepLoop:
    """Takes messages between steps, steps while there is work, sends each result up."""

    def __init__(self, link: RankSocket) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[Down | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._stopped = False
        self._checked_s = 0.0
        self._check_is_due = False
        self._hints_broken = False
        self._early: list[Down | None] = []
        """At most one message, which came while a step was put off."""

    def read(self) -> None:
        """Reader thread: from the socket to the inbox; None marks its end."""
        try:
            while (message := self._link.receive()) is not None:
                self._inbox.put(message)
        finally:
            # Also after a message that makes no sense: a deaf rank must not go on.
            self._inbox.put(None)

    def beat(self) -> None:
        """Heartbeat thread: also tells how long the present step lasts, so a hang shows."""
        while not self._stopped:
            began = self._step_began
            age_s = 0.0 if began is None else time.monotonic() - began
            try:
                self._link.send(Heartbeat(age_s))
            except ChannelError:
                return
            time.sleep(HEARTBEAT_S)

    def run(self, engine: Engine) -> None:
        """Until Stop or the end of the channel; closes the engine."""
        was_busy = True
        # Not every engine puts steps off.
        hold_s: Callable[[], float] = getattr(engine, "hold_s", float)
        try:
            while True:
                busy = engine.has_work()
                if was_busy and not busy:
                    self._report_idle(engine)
                was_busy = busy
                if not self._take_messages(engine, wait=not busy):
                    return
                was_busy = True
                if engine.has_work():
                    if (put_off_s := hold_s()) > 0 and self._waited_for_message(put_off_s):
                        continue
                    self._step_began = time.monotonic()
                    result = engine.step()
                    self._step_began = None
                    self._link.send(Step(result))
        finally:
            self._stopped = True
            engine.close()

    def report(self, error: Exception) -> None:
        """Tell the supervisor why the rank ends, if it still listens."""
        self._stopped = True
        kind = type(error).__name__ if isinstance(error, CoterieError) else "Exception"
        text = str(error) if isinstance(error, CoterieError) else f"{type(error).__name__}: {error}"
        try:
            self._link.send(Fatal(kind, text))
        except ChannelError:
            return

    def _take_messages(self, engine: Engine, wait: bool) -> bool:
        """Everything in the inbox; False when the rank is to end."""
        while wait or self._early or not self._inbox.empty():
            if self._early:
                message = self._early.pop()
            else:
                message = self._await_message(engine) if wait else self._inbox.get()
            wait = False
            if message is None or isinstance(message, Stop):
                return False
            if isinstance(message, Add):
                self._add(engine, message.request)
            elif isinstance(message, Cancel):
                engine.cancel(message.request_id, message.index)
            elif isinstance(message, Hint):
                self._hint(engine, message)
        return True

    def _waited_for_message(self, wait_s: float) -> bool:
        """Whether a message came within this time; it is the next to be taken."""
        try:
            self._early.append(self._inbox.get(timeout=wait_s))
        except queue.Empty:
            return False
        return True

    def _add(self, engine: Engine, request: Request) -> None:
        identity = request.request_id
        try:
            engine.add(request)
        except RequestError as error:
            self._link.send(Rejected(identity, type(error).__name__, str(error), error.param))
        # A request that breaks the engine's intake is refused; the others go on.
        except Exception as error:
            engine.cancel(identity)
            self._link.send(Rejected(identity, "CoterieError", f"not taken: {error!r}", None))

    def _hint(self, engine: Engine, hint: Hint) -> None:
        """What is fetched ahead of a request may fail without harm to anybody."""
        take = getattr(engine, "hint", None)
        if take is None or self._hints_broken:
            return
        try:
            take(
                domain=hint.domain,
                session=hint.session,
                tenant=hint.tenant,
                first_ids=hint.first_ids,
            )
        # Said once, and no hint is passed on any more: the answers do not depend on them.
        except Exception:
            self._hints_broken = True
            log.exception("The engine did not take a hint; it gets no more of them")

    def _await_message(self, engine: Engine) -> Down | None:
        """The next message; what was not checked on becoming idle is, if idleness lasts."""
        if self._check_is_due:
            try:
                return self._inbox.get(timeout=INVARIANTS_EVERY_S)
            except queue.Empty:
                self._report_idle(engine)
        return self._inbox.get()

    def _report_idle(self, engine: Engine) -> None:
        now = time.monotonic()
        self._check_is_due = now - self._checked_s < INVARIANTS_EVERY_S
        if not self._check_is_due:
            engine.check_invariants()
            return_freed_memory()
            self._checked_s = now
        self._link.send(Idle(engine.gauges(), checked=not self._check_is_due))


def _import(path: str) -> Callable[[dict[str, Any]], Any]:
    module, _, name = path.partition(":")
    factory: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return factory
