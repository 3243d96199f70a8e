"""The rank's hold on a process that tries structures, and its end where one takes too long."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from core.errors import CoterieError, RequestError
from core.request import Structure
from engine.grammar_child import Job, Verdict, write_frame
from engine.grammar_source import GrammarSource

_START_S = 120.0
_MAX_FRAME_BYTES = 64 * 1024**2


class GrammarProcess:
    """Started at the first job and after each end; for one thread at a time."""

    def __init__(self, model_dir: Path, vocab_size: int, limit_s: float) -> None:
        self._command = [
            sys.executable, "-m", "engine.grammar_child", str(model_dir), str(vocab_size),
        ]  # fmt: skip
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._process is None else self._process.pid

    def judge(self, structure: Structure) -> GrammarSource:
        """What to compile, found good within the limit. Raises RequestError, else CoterieError."""
        process = self._ready()
        try:
            if process.stdin is None:
                raise OSError("no pipe")
            write_frame(process.stdin, Job(structure, self._limit_s))
            verdict = self._read(process, self._limit_s)
        except TimeoutError as error:
            self._replace()
            raise RequestError(
                f"The structure asked for could not be compiled within {self._limit_s:g} s; "
                "use a simpler one."
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            self._replace()
            raise RequestError(
                "The structure asked for ended its compiler: it needs too much memory or nests too "
                "deeply; use a simpler one."
            ) from error
        if verdict.source is None:
            raise RequestError(verdict.error or "The structure asked for is not usable.")
        return verdict.source

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        self._is_ready = False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        continue  # what was still to be written has no reader

    def _replace(self) -> None:
        # At once: the next structure need not wait for all of its start.
        self.close()
        self.start()

    def start(self) -> None:
        """Start the process where there is none; `judge` waits until it is ready."""
        if self._process is not None:
            return
        # The interpreter's own path: the process must find what this one found.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {
            **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _ready(self) -> subprocess.Popen[bytes]:
        self.start()
        process = self._process
        try:
            if process is None:
                raise OSError("it was closed")
            if not self._is_ready:
                self._read(process, _START_S)
                self._is_ready = True
            return process
        except (TimeoutError, OSError, msgspec.DecodeError) as error:
            self.close()
            raise CoterieError(f"the compiler of structures did not start: {error}") from error

    @staticmethod
    def _read(process: subprocess.Popen[bytes], limit_s: float) -> Verdict:
        """The next verdict. Raises TimeoutError, or OSError where the process ended."""
        if process.stdout is None:
            raise OSError("no pipe")
        deadline = time.monotonic() + limit_s
        data, need = b"", 4
        while len(data) < need:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise OSError(f"it ended with {process.wait()}")
            data += part
            if need == 4 and len(data) >= 4:
                need = 4 + int.from_bytes(data[:4], "little")
                if need > _MAX_FRAME_BYTES:
                    raise OSError(f"a frame of {need} bytes")
        return msgspec.msgpack.decode(data[4:], type=Verdict)
