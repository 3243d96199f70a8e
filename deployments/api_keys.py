"""API keys and the tenants they belong to, as an operator writes them. Only digests are kept.

A key has the strength of a long random text, so one plain SHA-256 hides it; there is no password
to slow a guesser down for.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from core.config_model import ConfigModel
from core.errors import SettingsError
from deployments.ray_environment import KEYS_VARIABLE
from deployments.tenant_limits import Allowance

DEFAULT_TENANT = "default"
_KEY_PREFIX = "sk-coterie-"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class TenantEntry(ConfigModel):
    """A tenant in the keys file. A limit that is left out is that of serving.tenant_*."""

    keys: tuple[str, ...] = ()
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrency: int | None = Field(None, ge=1)

    def allowance(self, default: Allowance) -> Allowance:
        """The tenant's limits."""

        def of(name: str) -> int | None:
            own: int | None = getattr(self, name)
            return getattr(default, name) if own is None else own

        return Allowance(of("requests_per_minute"), of("tokens_per_minute"), of("concurrency"))


class KeysFile(ConfigModel):
    """The keys file: `tenants:` with a name each."""

    tenants: dict[str, TenantEntry]


class KeyRing:
    """All keys of one moment: digest to tenant, tenant to limits."""

    def __init__(self, tenant_of: dict[bytes, str], allowances: dict[str, Allowance]) -> None:
        self._digests = list(tenant_of.items())
        self._allowances = allowances

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, key: bytes) -> str | None:
        """Whose key it is; None for nobody's. Takes as long wherever, or whether, it is found."""
        digest = hashlib.sha256(key).digest()
        found = None
        for known, tenant in self._digests:
            if secrets.compare_digest(known, digest):
                found = tenant
        return found

    def allowance(self, tenant: str) -> Allowance | None:
        """What the tenant may do, None where nothing is written."""
        return self._allowances.get(tenant)


def new_key() -> str:
    """A fresh random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def digest_text(key: str) -> str:
    """How a key is written into the keys file."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path | None, environ: Mapping[str, str], default: Allowance) -> KeyRing | None:
    """The keys of the file and of the environment; None where neither is set: no access control.

    Raises SettingsError, which never quotes a key, where one of them is set and wrong or empty.
    """
    variable = environ.get(KEYS_VARIABLE)
    if path is None and variable is None:
        return None
    tenant_of: dict[bytes, str] = {}
    allowances: dict[str, Allowance] = {}
    for tenant, entry in _entries(path) if path is not None else ():
        _check_tenant(tenant, str(path))
        allowances[tenant] = entry.allowance(default)
        for position, text in enumerate(entry.keys):
            if not _DIGEST.fullmatch(text):
                raise SettingsError(
                    f"{path}: tenants.{tenant}.keys.{position}: expected sha256: and 64 "
                    'hexadecimal digits; "coterie admin keys hash" makes that of a key'
                )
            _add(tenant_of, text, tenant)
    for text in (variable or "").split(","):
        if text.strip():
            tenant, digest = _of_variable(text.strip())
            allowances.setdefault(tenant, default)
            _add(tenant_of, digest, tenant)
    if not tenant_of:
        source = f"the keys file {path}" if variable is None else KEYS_VARIABLE
        raise SettingsError(
            f"{source} is set but holds no key: nobody could use the service. Add one (see "
            '"coterie admin keys new --help"), or unset it to serve everybody.'
        )
    return KeyRing(tenant_of, allowances)


def _entries(path: Path) -> list[tuple[str, TenantEntry]]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the keys file {path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        # Without the parser's own text, which quotes what it found.
        raise SettingsError(f"the keys file {path} is not valid YAML{where}") from None
    try:
        return list(KeysFile.model_validate(data).tenants.items())
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        said = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults[:5])
        raise SettingsError(f"the keys file {path}: {said}") from None


def _of_variable(text: str) -> tuple[str, str]:
    if _DIGEST.fullmatch(text):
        return DEFAULT_TENANT, text
    tenant, separator, key = text.partition(":")
    if not separator:
        tenant, key = DEFAULT_TENANT, text
    _check_tenant(tenant, KEYS_VARIABLE)
    if not key:
        raise SettingsError(f"{KEYS_VARIABLE}: expected a key after {tenant}:")
    return tenant, key if _DIGEST.fullmatch(key) else digest_text(key)


def _check_tenant(tenant: str, source: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise SettingsError(
            f"{source}: a tenant's name has 1 to 64 letters, digits or any of . _ @ - and begins "
            "with a letter or digit; one of the names here has not"
        )


def _add(tenant_of: dict[bytes, str], text: str, tenant: str) -> None:
    digest = bytes.fromhex(text.removeprefix("sha256:"))
    if tenant_of.setdefault(digest, tenant) != tenant:
        raise SettingsError(
            f"one key belongs to two tenants, {tenant_of[digest]!r} and {tenant!r}; a key has one"
        )
