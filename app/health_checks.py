"""What `coterie doctor` looks at: each check gives what it found and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from packaging.requirements import Requirement

from app.preflight import PreflightProcess, by_device
from app.settings import Settings
from core.config_model import format_bytes
from core.errors import CoterieError
from deployments.access import Access
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.shared_object import instructions
from expert_pool.model_location import locate

READ_BYTES = 256 * 1024**2
"""Most that the disk check reads."""
READ_S = 5.0
_BLOCK_BYTES = 8 * 1024**2
_ALIGNMENT = 4096
_SLOW_BYTES_S = 100e6
_RAY_THRESHOLD = 0.95
_THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
_FEW_FILES = 4096
_TEMP_BYTES = 1024**3
_SHARED_BYTES = 64 * 1024**2
_FOREIGN_RAY = ("RAY_ADDRESS", "RAY_SERVE_ENABLE_HA_PROXY")

State = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """One check: how it is, what was found, what to do where that is not fine."""

    name: str
    state: State
    found: str
    advice: str = ""


def findings(settings: Settings | None, serving_only: Settings) -> Iterator[Finding]:
    """All checks, one after the other; those of a model only where `settings` name one."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", python),
        ("packages", packages),
        ("environment", environment),
        ("processors", processors),
        ("kernels", kernels),
        ("open files", open_files),
        ("temporary files", temporary_files),
        ("shared memory", shared_memory),
        ("port", lambda: port(serving_only)),
        ("access", lambda: access(serving_only)),
    ]
    if settings is not None:
        checks += [("disk", lambda: disk(settings)), ("memory", lambda: memory(settings))]
    for name, check in checks:
        try:
            yield check()
        # A check that breaks is a finding too; the others go on.
        except Exception as error:
            said = str(error) if isinstance(error, CoterieError) else repr(error)
            yield Finding(name, "error", said)


def python() -> Finding:
    """Version and platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return Finding("python", "error", found, "use Python 3.11 to 3.13")
    if platform.system() != "Linux":
        return Finding("python", "warning", found, "Coterie is tested on Linux")
    return Finding("python", "ok", found)


def packages() -> Finding:
    """Installed versions against those that the project asks for."""
    wrong, shown = [], []
    for line in importlib.metadata.requires("coterie") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if wanted.name in ("ray", "torch", "transformers"):
            shown.append(f"{wanted.name} {version}")
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version}, expected {wanted.specifier}")
    if wrong:
        return Finding("packages", "error", "; ".join(wrong), "install the project again")
    return Finding("packages", "ok", ", ".join(shown))


def environment() -> Finding:
    """Variables with which Ray would do something else than expected."""
    odd = [name for name in _FOREIGN_RAY if os.environ.get(name)]
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        return Finding(
            "environment",
            "warning",
            f"RAY_AUTH_MODE is {mode}",
            "a Ray job is code execution: unset it where others can reach this machine's ports",
        )
    if odd:
        return Finding(
            "environment", "warning", f"set: {', '.join(odd)}", "unset for coterie serve"
        )
    return Finding("environment", "ok", "nothing in the way")


def processors() -> Finding:
    """Cores and how busy they are."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    load = os.getloadavg()[0]
    found = f"{count} to use, load {load:.1f}"
    if load > count:
        advice = "other programs keep them busy; answers will be slower"
        return Finding("processors", "warning", found, advice)
    return Finding("processors", "ok", found)


def kernels() -> Finding:
    """Whether the native expert kernels are there, and what they use of the processor."""
    try:
        return Finding("kernels", "ok", f"native, {instructions()}")
    except BuildError as error:
        advice = "bf16 experts are computed by torch, which is slower for few rows"
        return Finding("kernels", "warning", str(error), advice)


def open_files() -> Finding:
    """The limit on open files: connections and sockets of Ray."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at most (hard limit {hard})"
    if 0 <= soft < _FEW_FILES:
        return Finding("open files", "warning", found, f"ulimit -n {_FEW_FILES} before serving")
    return Finding("open files", "ok", found)


def temporary_files() -> Finding:
    """Room for Ray's logs and sockets."""
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free in {folder}"
    if free < _TEMP_BYTES:
        return Finding("temporary files", "error", found, f"free {format_bytes(_TEMP_BYTES)}")
    return Finding("temporary files", "ok", found)


def shared_memory() -> Finding:
    """Where Ray's object store lies; small in containers by default."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "warning", "/dev/shm is missing", "Ray uses files instead")
    total = shutil.disk_usage(folder).total
    found = f"{format_bytes(total)} in /dev/shm"
    if total < _SHARED_BYTES:
        return Finding("shared memory", "warning", found, "start the container with --shm-size=1g")
    return Finding("shared memory", "ok", found)


def port(settings: Settings) -> Finding:
    """Whether the service could listen."""
    host, number = settings.serving.host, settings.serving.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            found = f"{host}:{number}: {error.strerror}"
            return Finding("port", "warning", found, "fine if it is coterie; else choose --port")
    return Finding("port", "ok", f"{host}:{number} is free")


def access(settings: Settings) -> Finding:
    """Keys, and who can reach the port."""
    host = settings.serving.host
    keys = Access(settings.serving).needs_key
    found = f"{'keys are needed' if keys else 'no keys'}, address {host}"
    if not keys and not (host == "localhost" or host.startswith("127.") or host == "::1"):
        advice = "whoever reaches this address can use the model: set serving.keys_file"
        return Finding("access", "warning", found, advice)
    return Finding("access", "ok", found)


def disk(settings: Settings) -> Finding:
    """How fast the checkpoint's largest file is read, past the page cache where possible."""
    folder = locate(settings.model)
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if not files:
        return Finding("disk", "error", f"no safetensors in {folder}", "name a checkpoint's folder")
    nbytes, seconds, direct = read_speed(files[-1].resolve())
    speed = nbytes / max(seconds, 1e-9)
    how = "from the device" if direct else "perhaps from the page cache"
    found = f"{format_bytes(speed)}/s over {format_bytes(nbytes)} {how}"
    if speed < _SLOW_BYTES_S:
        advice = "a missing expert will be slow: use a faster disk or more --expert-memory"
        return Finding("disk", "warning", found, advice)
    return Finding("disk", "ok", found)


def read_speed(path: Path) -> tuple[int, float, bool]:
    """(bytes, seconds, whether the page cache was passed by) of one bounded sequential read."""
    import mmap

    flags, direct = os.O_RDONLY | getattr(os, "O_DIRECT", 0), hasattr(os, "O_DIRECT")
    try:
        descriptor = os.open(path, flags)
    except OSError:
        descriptor, direct = os.open(path, os.O_RDONLY), False
    buffer = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as O_DIRECT wants it
    done, began = 0, time.monotonic()
    try:
        while done < READ_BYTES and time.monotonic() - began < READ_S:
            count = os.preadv(descriptor, [buffer], done)
            done += count
            if count < _BLOCK_BYTES or count % _ALIGNMENT:
                break
    finally:
        os.close(descriptor)
        buffer.close()
    return done, time.monotonic() - began, direct


def memory(settings: Settings) -> Finding:
    """What all replicas need against what is free, and against where Ray ends processes."""
    folders = [locate(str(entry.model)).resolve() for entry in settings.entries()]
    parts, ends = [], False
    for device, plans in by_device(PreflightProcess(settings, folders).result()):
        # Too much is refused by the check itself; Ray's own limit is known here.
        count = sum(plan.replicas for plan in plans)
        need, have = sum(plan.all_need_bytes for plan in plans), plans[0].available_bytes
        replicas = f"{count} replica{'s' if count > 1 else ''}"
        if not plans[0].is_on_cpu:
            replicas = "one replica"
        parts.append(
            f"{format_bytes(need)} for {replicas} on {device}, {format_bytes(have)} available"
        )
        if device.startswith("cpu"):
            threshold = float(os.environ.get(_THRESHOLD_VARIABLE, _RAY_THRESHOLD))
            total, used = memory_in_use()
            if need > threshold * total - used:
                ends = True
                parts.append(f"Ray ends processes from {threshold:.0%} of {format_bytes(total)} on")
    found = "; ".join(parts)
    if ends:
        return Finding("memory", "error", found, "leave more room, or raise Ray's threshold")
    return Finding("memory", "ok", found)


def memory_in_use(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, used) in bytes of this machine, or of its container where that has a limit."""
    machine = psutil.virtual_memory()
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return machine.total, machine.total - machine.available
    if limit >= machine.total:
        return machine.total, machine.total - machine.available
    return limit, used
