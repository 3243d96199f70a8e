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
from typing import Any

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from core.config_model import ConfigModel
from core.errors import SettingsError
from deployments.ray_environment import KEYS_VARIABLE
from deployments.tenant_limits import Allowance

DEFAULT_TENANT = "default"
_KEY_PREFIX = "sk-coterie-"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LIKE_KEY = re.compile(
    r"(?i)(sk|pk|key)[-_.].*|[0-9a-f]{16,}|sha256.*|.{33,}|.*[A-Za-z0-9_-]{24,}.*"
)
_HIDDEN = "(not shown)"


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


_FIELDS = {*KeysFile.model_fields, *TenantEntry.model_fields}


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
                    f"{path}: tenants.{_shown(tenant)}.keys.{position}: expected sha256: and 64 "
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
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the keys file {path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        # Without the parser's own text, which quotes what it found.
        reason = "has a name twice" if isinstance(error, _TwiceError) else "is not valid YAML"
        raise SettingsError(f"the keys file {path} {reason}{where}") from None
    try:
        return list(KeysFile.model_validate(data).tenants.items())
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        said = "; ".join(_fault_text(fault) for fault in faults[:5])
        raise SettingsError(f"the keys file {path}: {said}") from None


class _TwiceError(yaml.constructor.ConstructorError):
    """A mapping has a name twice, of which YAML would silently take the last."""


class _UniqueKeys(yaml.SafeLoader):
    """A loader that takes no name twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise _TwiceError(None, None, "a name twice", name.start_mark)
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def _fault_text(fault: ErrorDetails) -> str:
    """Where and what, with nothing of the file but names of fields and of tenants."""
    parts = []
    for depth, part in enumerate(fault["loc"]):
        if depth == 1 and isinstance(part, str):
            parts.append(_shown(part))
        elif (depth == 3 and isinstance(part, int)) or part in _FIELDS or part == "[key]":
            parts.append(str(part))
        else:
            parts.append(_HIDDEN)
    text = f"{'.'.join(parts)}: {fault['msg']}"
    if fault["type"] == "extra_forbidden" and len(parts) > 1:
        text += f"; the fields are {', '.join(TenantEntry.model_fields)}"
    return text


def _shown(tenant: str) -> str:
    """A tenant's name, unless it may be a key that was written in its place."""
    fits = _TENANT.fullmatch(tenant) and not _LIKE_KEY.fullmatch(tenant)
    return tenant if fits else _HIDDEN


def _of_variable(text: str) -> tuple[str, str]:
    if _DIGEST.fullmatch(text):
        return DEFAULT_TENANT, text
    tenant, separator, key = text.partition(":")
    if not separator:
        tenant, key = DEFAULT_TENANT, text
    _check_tenant(tenant, KEYS_VARIABLE)
    if not key:
        raise SettingsError(f"{KEYS_VARIABLE}: expected a key after {_shown(tenant)}:")
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
            f"one key belongs to two tenants, {_shown(tenant_of[digest])} and {_shown(tenant)}; "
            "a key has one"
        )
