"""Compiled grammars of structures: made aside, each once, kept while they are used."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import CheckpointError, CoterieError, OverloadedError, RequestError
from core.request import Structure
from engine.grammar_process import GrammarProcess
from engine.grammar_source import GrammarSource, compile_source

if TYPE_CHECKING:
    from engine.structure_matcher import MatcherFactory

MAX_GRAMMARS = 256
MAX_WAITING = 16
"""Structures that wait for a compiler; beyond, requests with new ones are turned away."""
_COMPILERS = 2
_ERROR_BYTES = 1024


class Grammar:
    """A structure on its way to being compiled; `done` once it is or cannot be."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.source: GrammarSource | None = None
        self.compiled: Any = None
        self.error: CoterieError | None = None
        self.done = False

    @property
    def size_bytes(self) -> int:
        """Memory that it takes; grows while masks are made for it."""
        size = _ERROR_BYTES + 2 * len(self.structure.text)
        return size if self.compiled is None else size + int(self.compiled.memory_size_bytes)


class GrammarCache:
    """Asked by the step loop, worked for by two threads, each with a process that may be killed.

    A structure is first tried in such a process. What it compiled within the limit is compiled
    again here, where the masks are needed: xgrammar's serialised form can be a thousand times
    larger than the grammar. Refusals are kept too, so that a bad structure costs its limit once;
    what a busy host or a process ended from outside made of it is not.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        limit_s: float,
        memory_bytes: int,
        on_done: Callable[[Grammar], None],
    ) -> None:
        """`on_done` is called from a worker's thread."""
        self._model = (model_dir, vocab_size)
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._on_done = on_done
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Structure, Grammar] = OrderedDict()
        self._jobs: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._processes: list[GrammarProcess] = []
        self._factory: MatcherFactory | None = None
        self._factory_lock = threading.Lock()
        self._closed = False

    @property
    def factory(self) -> MatcherFactory:
        """Makes matchers; imports xgrammar when it is first needed."""
        with self._factory_lock:
            if self._factory is None:
                from engine.structure_matcher import MatcherFactory

                self._factory = MatcherFactory(*self._model)
            return self._factory

    def get(self, structure: Structure) -> Grammar:
        """The grammar, perhaps not done yet. Raises OverloadedError where too many wait."""
        with self._lock:
            key = Structure(structure.kind, structure.text)
            found = self._grammars.get(key)
            if found is None:
                waiting = sum(not grammar.done for grammar in self._grammars.values())
                if waiting >= MAX_WAITING:
                    raise OverloadedError(
                        f"{waiting} structures are being compiled; come back later.", self._limit_s
                    )
                found = self._grammars[key] = Grammar(key)
                self._start_worker(waiting)
                self._jobs.put(found)
            self._grammars.move_to_end(key)
            self._evict()
            return found

    def __len__(self) -> int:
        return len(self._grammars)

    def close(self) -> None:
        """End the processes and, as soon as they notice, the threads."""
        self._closed = True
        for process in self._processes:
            self._jobs.put(None)
            process.close()

    def _start_worker(self, waiting: int) -> None:
        if len(self._processes) < min(_COMPILERS, waiting + 1):
            process = GrammarProcess(*self._model, self._limit_s)
            self._processes.append(process)
            threading.Thread(
                target=self._work, args=(process,), name="grammars", daemon=True
            ).start()

    def _work(self, process: GrammarProcess) -> None:
        while (grammar := self._jobs.get()) is not None and not self._closed:
            try:
                grammar.source, grammar.compiled = self._compile(process, grammar.structure)
            except CoterieError as error:
                grammar.error = error
            # A thread that died would leave its requests waiting for ever.
            except Exception as error:
                grammar.error = CoterieError(f"a structure could not be compiled: {error!r}")
            if grammar.error is not None and not isinstance(grammar.error, RequestError):
                with self._lock:
                    self._grammars.pop(grammar.structure, None)
            grammar.done = True
            self._on_done(grammar)
        process.close()

    def _compile(self, process: GrammarProcess, structure: Structure) -> tuple[GrammarSource, Any]:
        process.start()
        try:
            factory = self.factory  # made while the process starts
        except CheckpointError as error:
            raise RequestError(f"This model can give no structured output: {error}") from error
        source = process.judge(structure)
        return source, compile_source(factory.compiler, source)

    def _evict(self) -> None:
        size = sum(grammar.size_bytes for grammar in self._grammars.values())
        for key, grammar in list(self._grammars.items())[:-1]:
            if len(self._grammars) <= MAX_GRAMMARS and size <= self._memory_bytes:
                return
            if grammar.done:
                del self._grammars[key]
                size -= grammar.size_bytes
