"""How commands find the services that this user runs here, and reach them through Ray.

Ray's token for a service lies in a file that its user alone can read, for as long as the service
runs. What the token permits, to run code as that user, that user can do anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from app.local_ray import hushed, prepare_environment
from core.cache_folder import cache_folder
from core.errors import CoterieError

log = logging.getLogger(__name__)

_TOKEN = "RAY_AUTH_TOKEN"
_CONNECT_S = 5.0
_SAME_START_S = 60.0
"""A process's start shifts a little when the clock is set; ids come again later than this."""


class RunningService(msgspec.Struct, frozen=True):
    """A `coterie serve` of this user on this machine."""

    pid: int
    url: str
    ray_address: str
    ray_token: str | None
    created_s: float | None = None
    """When its process began: another one may have the same id later."""

    @property
    def runs(self) -> bool:
        """Whether that very process lives."""
        try:
            now_s = psutil.Process(self.pid).create_time()
        except psutil.AccessDenied:
            return True
        except (psutil.Error, ValueError, OverflowError):
            return False
        return self.created_s is None or abs(now_s - self.created_s) < _SAME_START_S


@contextlib.contextmanager
def recorded(ray_address: str, url: str) -> Iterator[None]:
    """For the time of the block, commands in other terminals find this process's service.

    Where the cache folder cannot be written, they do not, and serving goes on.
    """
    token, created_s = os.environ.get(_TOKEN), psutil.Process().create_time()
    service = RunningService(os.getpid(), url, ray_address, token, created_s)
    path = _folder() / f"{socket.gethostname()}-{service.pid}.json"
    try:
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(service))
    except OSError as error:
        log.warning("coterie admin will not find this service: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def running_services() -> list[RunningService]:
    """All of this user that live now on this machine."""
    found = []
    for path in sorted(_folder().glob(f"{socket.gethostname()}-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if not (_is_private(_folder()) and _is_private(path)):
                continue
            service = msgspec.json.decode(path.read_bytes(), type=RunningService)
            if service.runs:
                found.append(service)
            else:
                path.unlink(missing_ok=True)  # it was killed
    return found


def _folder() -> Path:
    return cache_folder() / "running"


def _is_private(path: Path) -> bool:
    """Made by this user, and closed to others: nobody planted it."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def choose(url: str | None) -> RunningService:
    """The one service there is, or the one at `url`. Raises CoterieError."""
    services = running_services()
    fitting = [service for service in services if url in (None, service.url)]
    if len(fitting) == 1:
        return fitting[0]
    where = ", ".join(service.url for service in services) or "none"
    wanted = "one service" if url is None else f"a service at {url}"
    raise CoterieError(
        f"expected {wanted} started by you with coterie serve on this machine, found: {where}. "
        "Name one with --url, or a Ray cluster with --address."
    )


def _require_listener(address: str) -> None:
    """Raises CoterieError where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise CoterieError(
            f"cannot reach Ray at {address}: {error}. Give the address that `ray start` printed."
        ) from error


@contextlib.contextmanager
def connected(url: str | None, address: str | None) -> Iterator[None]:
    """Connected to the Ray of a service: of `address` (with Ray's own variables), else a local one.

    Raises CoterieError.
    """
    if address is None:
        service = choose(url)
        address = service.ray_address
        if service.ray_token is not None:
            os.environ[_TOKEN] = service.ray_token
    _require_listener(address)
    prepare_environment(0)
    import ray
    from ray import serve  # noqa: F401  # sets its logger's level, so before ours

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        with hushed():
            ray.init(
                address=address, namespace="coterie", log_to_driver=False, logging_level="ERROR"
            )
    except Exception as error:
        raise CoterieError(f"cannot reach Ray at {address}: {error}") from error
    try:
        yield
    finally:
        with hushed():
            ray.shutdown()
