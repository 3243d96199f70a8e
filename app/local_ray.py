"""A Ray of our own on this machine: loopback only, behind a token, ended with the process."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.errors import CoterieError
from deployments.ray_environment import MAX_BODY_VARIABLE, SERVE_ENVIRONMENT, source_folder

LOCAL_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    # Ray's switch for machines without a cluster: every port it opens is on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A Ray job is code execution: without this any local user could submit one.
    "RAY_AUTH_MODE": "token",
}
"""Set before Ray is imported, unless the user set them; every Ray process inherits them."""

MAX_TEMP_PATH = 24
"""Ray makes sockets some 80 characters below its folder, and a socket's path ends at 107 bytes."""


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A running local Ray."""

    address: str
    logs: Path
    """Folder of the log files of this run."""


def prepare_environment(max_body_bytes: int) -> None:
    """Sets what Ray's processes must find. Must come before `import ray`."""
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[MAX_BODY_VARIABLE] = str(max_body_bytes)
    paths = [source_folder(), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # One secret a run, handed to Ray's processes by their environment: no file to leak.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[LocalRay]:
    """Starts Ray for the time of the block; its files are removed unless the block raises.

    `prepare_environment` must have been called.
    """
    import ray

    short = len(tempfile.gettempdir()) <= MAX_TEMP_PATH
    folder = Path(tempfile.mkdtemp(prefix="coterie-", dir=None if short else "/tmp"))
    # Temporary files of every Ray process go there too, and so end with it.
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        try:
            context = ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                namespace="coterie",
                _temp_dir=str(folder),
            )
        except Exception as error:
            raise CoterieError(f"Ray did not start: {error}. Its logs are in {folder}.") from error
        session = Path(context.address_info["session_dir"])
        yield LocalRay(context.address_info["address"], session / "logs")
    except KeyboardInterrupt:
        # Whoever stops it, even while it starts or stops, wants no logs.
        _end(folder)
        raise
    except BaseException:
        with hushed():
            ray.shutdown()
        raise
    else:
        _end(folder)
    finally:
        if before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before


def _end(folder: Path) -> None:
    import ray

    with hushed():
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Nothing is printed: what ends inside is meant to, and Ray would report it as errors."""
    nowhere = io.StringIO()
    with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield
