"""Keys: where they come from, what is refused, and that no message gives one away."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import SettingsError
from deployments.access import Access
from deployments.api_keys import digest_text, new_key, read_keys
from deployments.openai_errors import AccessError
from deployments.settings import ServingSettings
from deployments.tenant_limits import Allowance

SECRET = "sk-very-secret-text"


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def access(path: Path | None, variable: str | None = None, **serving: object) -> Access:
    environ = {} if variable is None else {"COTERIE_API_KEYS": variable}
    settings = ServingSettings.model_validate(
        {"keys_file": None if path is None else str(path), **serving}
    )
    return Access(settings, environ)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_file_names_tenants_their_keys_and_limits(tmp_path: Path) -> None:
    key = new_key()
    path = keys_file(
        tmp_path,
        f"tenants:\n  acme:\n    keys: [{digest_text(key)}]\n    concurrency: 2\n"
        f"  other:\n    keys: [{digest_text('other-key')}]\n",
    )
    found = access(path, tenant_requests_per_minute=7)
    assert found.tenant(bearer(key)) == "acme"
    assert found.tenant([(b"X-Api-Key", b"other-key")]) == "other"
    assert found.allowance("acme") == Allowance(7, None, 2)
    assert found.allowance("other") == Allowance(7, None, None)


@pytest.mark.parametrize(
    ("variable", "key", "tenant"),
    [
        ("secret", "secret", "default"),
        (" a , b ", "b", "default"),
        ("acme:k1,beta:k2", "k2", "beta"),
        (digest_text("k"), "k", "default"),
        ("acme:" + digest_text("k"), "k", "acme"),
    ],
)
def test_the_environment_may_hold_keys_or_digests(variable: str, key: str, tenant: str) -> None:
    assert access(None, variable).tenant(bearer(key)) == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("wrong"),
        bearer(""),
        bearer("secret2"),
        [(b"authorization", b"Basic secret")],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
        [*bearer("secret"), (b"x-api-key", b"another")],
        [*bearer("secret"), *bearer("another")],
    ],
)
def test_without_one_right_key_nobody_enters(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(AccessError) as refused:
        access(None, "secret").tenant(headers)
    assert "secret2" not in str(refused.value)


def test_without_keys_everybody_is_one_tenant_with_the_default_limits() -> None:
    everybody = access(None, tenant_concurrency=3)
    assert not everybody.needs_key
    assert everybody.tenant(bearer("whatever")) == ""
    assert everybody.allowance("").concurrency == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: {}\n", "holds no key"),
        ("tenants:\n  acme:\n    keys: []\n", "holds no key"),
        (f"tenants:\n  acme:\n    keys: [{SECRET}]\n", "tenants.acme.keys.0: expected sha256"),
        (
            f"tenants:\n  acme:\n    key: {SECRET}\n",
            r"tenants.acme.\(not shown\): Extra .* fields are keys,",
        ),
        (f"tenants:\n  acme:\n    {SECRET}: 1\n", r"tenants.acme.\(not shown\): Extra"),
        (f"tenants:\n  {SECRET}: 1\n", r"tenants.\(not shown\): Input"),
        (f"tenants:\n  {SECRET}: {{keys: [a]}}\n", r"tenants.\(not shown\).keys.0: expected"),
        (f"{SECRET}: 1\n", r"\(not shown\): Extra"),
        ("tenants:\n  a:\n    keys: [{}]\n", "tenants.a.keys.0: Input"),
        ("tenants:\n  a: {keys: []}\n  b: {keys: []}\n  a: {keys: []}\n", "twice in line 4"),
        (f"tenants:\n  a:\n    {SECRET}: 1\n    {SECRET}: 2\n", "twice in line 4"),
        (f"tenants:\n  {SECRET} !:\n    keys: []\n", "a tenant's name"),
        (f"- {SECRET}\n", "KeysFile"),
        (f"tenants: [{SECRET}\n", "not valid YAML"),
        ("tenants:\n  a:\n    concurrency: 0\n", "tenants.a.concurrency"),
        (
            f"tenants:\n  a: {{keys: [{digest_text('k')}]}}\n  b: {{keys: [{digest_text('k')}]}}\n",
            "belongs to two tenants",
        ),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_a_key(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        access(keys_file(tmp_path, text))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("variable", ["", " , ", "acme:", "a b:key"])
def test_a_variable_that_is_set_but_holds_no_key_serves_nobody(variable: str) -> None:
    with pytest.raises(SettingsError, match="COTERIE_API_KEYS"):
        read_keys(None, {"COTERIE_API_KEYS": variable}, Allowance())


def test_a_reload_takes_new_keys_and_a_broken_file_leaves_the_old_ones(tmp_path: Path) -> None:
    path = keys_file(tmp_path, f"tenants:\n  a:\n    keys: [{digest_text('one')}]\n")
    found = access(path)
    keys_file(tmp_path, f"tenants:\n  a:\n    keys: [{digest_text('two')}]\n")
    assert found.reload() == 1
    assert found.tenant(bearer("two")) == "a"
    with pytest.raises(AccessError):
        found.tenant(bearer("one"))
    path.unlink()
    with pytest.raises(SettingsError, match="cannot read"):
        found.reload()
    assert found.tenant(bearer("two")) == "a"
