"""The process that tries a structure first: compiles it, and may be killed while it does.

`python -m engine.grammar_child FOLDER VOCAB_SIZE`; frames of four bytes of length (little endian)
and msgpack on stdin and stdout. One job after the other; an end of stdin is the end.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from core.errors import RequestError
from core.request import Structure
from engine.grammar_source import GrammarSource, compile_source, grammar_source

MEMORY_BYTES = 512 * 1024**2
"""What compiling may need beside the libraries; beyond, the job fails."""


class Job(msgspec.Struct, frozen=True):
    """Down: try this structure, in so many seconds of processor time at most."""

    structure: Structure
    limit_s: float


class Verdict(msgspec.Struct, frozen=True):
    """Up: the source to compile, or what is wrong with it. The first one says "ready"."""

    source: GrammarSource | None = None
    error: str | None = None


def read_frame(stream: IO[bytes]) -> bytes | None:
    """One message; None at the end."""
    prefix = stream.read(4)
    if len(prefix) < 4:
        return None
    return stream.read(int.from_bytes(prefix, "little"))


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """One message, at once."""
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(4, "little") + payload)
    stream.flush()


def main() -> None:
    """Answers jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers
    from engine.structure_matcher import MatcherFactory

    factory = MatcherFactory(Path(sys.argv[1]), int(sys.argv[2]))
    _limit_memory()
    write_frame(answers, Verdict())
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        job = msgspec.msgpack.decode(frame, type=Job)
        _limit_time(job.limit_s)
        write_frame(answers, _judge(factory, job.structure))


def _judge(factory: Any, structure: Structure) -> Verdict:
    try:
        source = grammar_source(structure, factory.special_texts)
        factory.check_start(compile_source(factory.compiler, source), source)
        return Verdict(source)
    except RequestError as error:
        return Verdict(error=str(error))
    # A structure is a program of the client's: whatever it makes of this process, it is refused.
    except Exception as error:
        return Verdict(error=f"The structure asked for is not usable: {type(error).__name__}.")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(limit_s: float) -> None:
    """Ends this process should nobody be left who kills it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end_s = int(used.ru_utime + used.ru_stime + limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
