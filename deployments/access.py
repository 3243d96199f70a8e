"""Who may use the service: keys of requests against the keys that are configured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from deployments.api_keys import KeyRing, read_keys
from deployments.openai_errors import AccessError
from deployments.settings import ServingSettings
from deployments.tenant_limits import Allowance

OPEN_ROUTES = frozenset({"/health", "/ready"})
"""What is answered without a key. Everything else needs one once keys are configured, routes that
do not exist included."""
_NEED = 'send it as the header "Authorization: Bearer KEY"'


class Access:
    """Tells a request's tenant by its key. Without keys everybody is the tenant ""."""

    def __init__(self, serving: ServingSettings, environ: Mapping[str, str] | None = None) -> None:
        """Reads the keys. Raises SettingsError."""
        self._path = None if serving.keys_file is None else Path(serving.keys_file).expanduser()
        self._environ = dict(os.environ if environ is None else environ)
        self._default = Allowance(
            serving.tenant_requests_per_minute,
            serving.tenant_tokens_per_minute,
            serving.tenant_concurrency,
        )
        self._ring: KeyRing | None = self._read()

    @property
    def needs_key(self) -> bool:
        """Whether keys are configured."""
        return self._ring is not None

    def reload(self) -> int:
        """Read the keys file again; the number of keys. On SettingsError the old keys stay."""
        self._ring = self._read()
        return 0 if self._ring is None else len(self._ring)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Whose request it is. Raises AccessError."""
        if self._ring is None:
            return ""
        given = set()
        for name, value in headers:
            if name.lower() == b"authorization":
                scheme, _, key = value.strip().partition(b" ")
                if scheme.lower() != b"bearer":
                    raise AccessError(f"Expected a Bearer key; {_NEED}.")
                given.add(key.strip())
            elif name.lower() == b"x-api-key":
                given.add(value.strip())
        if len(given) > 1:
            raise AccessError("Expected one key, found different ones in the headers.")
        if not given:
            raise AccessError(f"This service needs an API key; {_NEED}.")
        tenant = self._ring.tenant(given.pop())
        if tenant is None:
            raise AccessError("This API key is not known here.")
        return tenant

    def allowance(self, tenant: str) -> Allowance:
        """What the tenant may do."""
        own = None if self._ring is None else self._ring.allowance(tenant)
        return self._default if own is None else own

    def _read(self) -> KeyRing | None:
        return read_keys(self._path, self._environ, self._default)
