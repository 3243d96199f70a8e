"""Compiles the native expert kernels: `python -m expert_pool.kernels.build`.

Plain C++ without torch's or Python's headers: any compiler that takes GCC's options, in seconds.
`make install` runs it with --optional, where a missing compiler is no error: experts are then
computed by torch. Without --optional, what is there is compiled again. The library lies in the
environment, named after what it was made from, so that one of other sources is never loaded. $CXX
names another compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from core.errors import CoterieError

SOURCES = Path(__file__).parent / "native"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    # One compiler contracts a * b + c by itself, another only where it is told.
    "-ffp-contract=fast",
    "-w",
)
_X86_FLAGS = {
    "avx2.cpp": ("-mavx2", "-mfma"),
    "avx512_bf16.cpp": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
        *("-mavx2", "-mfma"),
    ),
}
_NEWEST = "avx512_bf16.cpp"
"""What older compilers do not know; compiled before what refers to it."""
_TIMEOUT_S = 300


class BuildError(CoterieError):
    """The kernels cannot be compiled here."""


def fingerprint() -> str:
    """Names the sources, flags and kind of processor that a library is made from."""
    if not SOURCES.is_dir():
        raise FileNotFoundError(f"no folder {SOURCES}")
    digest = hashlib.sha256(platform.machine().encode())
    digest.update(repr((_FLAGS, sorted(_X86_FLAGS.items()))).encode())
    # Nothing that an editor leaves beside them.
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def folder() -> Path:
    """Where libraries lie: in the Python environment."""
    return Path(sys.prefix) / "lib" / "coterie"


def library_path() -> Path:
    """The library of the present sources, built or not."""
    return folder() / f"expert-kernels-{fingerprint()}.so"


def compiler() -> list[str]:
    """The command of a C++ compiler. Raises BuildError where there is none."""
    value = os.environ.get("CXX", "")
    try:
        named = shlex.split(value)
    except ValueError as error:
        raise BuildError(f"expected a command in $CXX, found {value!r}: {error}") from error
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler found (looked for {' '.join(named[:1]) or ', '.join(_COMPILERS)}); "
        "install one (Debian: g++) or name it in $CXX, then run make kernels"
    )


def build(again: bool = False) -> Path:
    """Compiles what is not compiled yet, or is to be again, and returns the library.

    Raises BuildError, and leaves a library that is there.
    """
    try:
        target = library_path()
        if target.is_file() and not again:
            return target
        command = compiler()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as made_in:
            made = _compile(command, Path(made_in))
            # At once: a server that starts meanwhile finds all of it or nothing.
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"cannot write the kernels to {folder()}: {error}") from error
    return target


def _compile(command: list[str], folder: Path) -> Path:
    machine_flags = _X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else {}
    objects: list[str] = []
    missing: list[str] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        made = folder / f"{source.stem}.o"
        flags = [*_FLAGS, *machine_flags.get(source.name, ())]
        try:
            _run([*command, *flags, *missing, "-c", str(source), "-o", str(made)])
        except BuildError:
            if source.name != _NEWEST:
                raise
            # Before GCC 10 and Clang 9 nobody knew these instructions.
            missing.append("-DCOTERIE_NO_AVX512_BF16")
            print(f"{shlex.join(command)} knows no AVX512_BF16: going without", file=sys.stderr)
        else:
            objects.append(str(made))
    library = folder / "kernels.so"
    _run([*command, "-shared", *objects, "-o", str(library), "-lm"])
    return library


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optional", action="store_true", help="succeed where it cannot be built")
    options = parser.parse_args()
    try:
        # Who asks for them wants them now: perhaps a better compiler came, or a file went bad.
        print(f"expert kernels: {build(again=not options.optional)}")
    except BuildError as error:
        print(f"expert kernels not built, torch computes instead: {error}", file=sys.stderr)
        sys.exit(0 if options.optional else 1)


if __name__ == "__main__":
    main()
