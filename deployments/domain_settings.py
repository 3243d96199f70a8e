"""Settings of domains: how a request is labelled with what it is about, and with its session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from core.config_model import ConfigModel
from core.errors import SettingsError

BUNDLED_NAME = "bundled"
OFF = "off"
UNKNOWN = "unknown"
"""What a text of none of the domains is labelled; no domain is called so."""
LABEL_PATTERN = r"[a-z0-9_-]{1,64}"
DomainLabel = Annotated[str, StringConstraints(pattern=f"^{LABEL_PATTERN}$")]

_MAX_LABELS = 256
_MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = 64


class DomainSettings(ConfigModel):
    """What a request is about, so that it goes to where the experts for that are."""

    classifier: Annotated[str, Field(min_length=1)] = BUNDLED_NAME
    """What guesses a text's domain: "bundled" (nine domains), "off", or a file that `coterie
    domains train` made."""
    labels: tuple[DomainLabel, ...] = ()
    """Domains that the header x-coterie-domain may name beside those of the classifier."""
    overrule: Annotated[float, Field(ge=0.5, le=1.0)] = 0.95
    """How sure the classifier must be of another domain to overrule a client's hint; 1: hints are
    always followed, those of clients that seem to hint wrongly as well."""
    session_key_file: str | None = None
    """File of 16 to 64 secret bytes for the hashes of session ids; without it, they hide an id
    only from those who cannot guess it."""

    @model_validator(mode="after")
    def _few_labels(self) -> DomainSettings:
        if len(self.labels) > _MAX_LABELS or UNKNOWN in self.labels:
            raise ValueError(
                f'expected at most {_MAX_LABELS} labels, none of them "{UNKNOWN}", found '
                f"{len(self.labels)}: {', '.join(self.labels[:8])}"
            )
        return self

    def resolved(self) -> DomainSettings:
        """With absolute paths, as replicas run in a working directory of their own."""
        changes: dict[str, str] = {}
        if self.classifier not in (BUNDLED_NAME, OFF):
            changes["classifier"] = str(Path(self.classifier).expanduser().resolve())
        if self.session_key_file is not None:
            changes["session_key_file"] = str(Path(self.session_key_file).expanduser().resolve())
        return self.model_copy(update=changes)

    def session_key(self) -> bytes:
        """The bytes of the key file; none without one. Raises SettingsError."""
        if self.session_key_file is None:
            return b""
        path = Path(self.session_key_file).expanduser()
        try:
            with path.open("rb") as file:
                key = file.read(_MAX_KEY_BYTES + 1)
        except OSError as error:
            raise SettingsError(
                f"domains.session_key_file: {path} cannot be read: {error.strerror or error}"
            ) from error
        if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
            raise SettingsError(
                f"domains.session_key_file: expected {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes in "
                f"{path}, found {'more' if len(key) > _MAX_KEY_BYTES else len(key)}; make it with "
                f"`head -c 32 /dev/urandom > {path}`"
            )
        return key
