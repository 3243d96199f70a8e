"""The rank's hold on a process that tries structures, and its end where one takes too long."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from core.errors import CoterieError, OverloadedError, RequestError
from core.request import Structure
from engine.grammar_child import Job, Verdict, write_frame
from engine.grammar_source import GrammarSource

_START_S = 120.0
_MAX_FRAME_BYTES = 64 * 1024**2
_PATIENCE = 4.0
"""Times the limit that a job may take where the host is too busy to give it its time."""
_OWN_ENDS = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT)
"""Ends that a structure brings about: its time, its depth, its memory within the process's limit.
Others, the kernel's where memory is short among them, come from outside."""
_POLL_S = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")


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
        """What to compile, found good within the limit of processor time.

        Raises RequestError for what is the structure's fault, OverloadedError where the process
        had not its time or was ended from outside, else CoterieError.
        """
        process = self._ready()
        try:
            if process.stdin is None:
                raise OSError("no pipe")
            end_s = _used_s(process.pid) + self._limit_s
            write_frame(process.stdin, Job(structure, self._limit_s))
            verdict = self._read(process, self._limit_s * _PATIENCE, end_s)
        except TimeoutError as error:
            used_up = process.poll() is None and _used_s(process.pid) >= end_s
            self._replace()
            if not used_up:
                raise self._come_back() from error
            raise RequestError(
                f"The structure asked for could not be compiled within {self._limit_s:g} s; "
                "use a simpler one."
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            code = _end_of(process)
            self._replace()
            if code is None or -code not in _OWN_ENDS:
                raise self._come_back() from error
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

    def _come_back(self) -> OverloadedError:
        return OverloadedError(
            "the host is too busy to try the structure asked for; come back later.", self._limit_s
        )

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
            code = None if process is None else process.poll()
            self.close()
            if code is not None and code < 0:  # killed from outside: another one may live
                raise self._come_back() from error
            raise CoterieError(f"the compiler of structures did not start: {error}") from error

    @staticmethod
    def _read(
        process: subprocess.Popen[bytes], limit_s: float, end_s: float | None = None
    ) -> Verdict:
        """The next verdict. Raises TimeoutError, or OSError where the process ended.

        `end_s`: processor time of the process, in all, that is a timeout too.
        """
        if process.stdout is None:
            raise OSError("no pipe")
        deadline = time.monotonic() + limit_s
        data, need = b"", 4
        while len(data) < need:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if end_s is not None:
                left = min(left, max(end_s - _used_s(process.pid), _POLL_S))
            if not select.select([process.stdout], [], [], left)[0]:
                if end_s is not None and _used_s(process.pid) >= end_s:
                    raise TimeoutError
                continue
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise OSError(f"it ended with {process.wait()}")
            data += part
            if need == 4 and len(data) >= 4:
                need = 4 + int.from_bytes(data[:4], "little")
                if need > _MAX_FRAME_BYTES:
                    raise OSError(f"a frame of {need} bytes")
        return msgspec.msgpack.decode(data[4:], type=Verdict)


def _used_s(pid: int) -> float:
    """Processor time of a process. Raises OSError where there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _end_of(process: subprocess.Popen[bytes]) -> int | None:
    """How a process ended whose pipe broke; None where it goes on."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None
