from __future__ import annotations

import pytest

from serve_apps.access import Access
from serve_apps.limits import WireError

KEYED = Access(keys=("first-key", "second-key"), origins=("https://app.example",))


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_without_keys_this_machine_may_connect(client: str) -> None:
    Access().check(client, {})
    Access().check(client, {"origin": "http://localhost:3000"})


@pytest.mark.parametrize("client", [None, "10.0.0.7", "::ffff:10.0.0.7", "127.0.0.1.evil.example", "testclient", ""])
def test_without_keys_nobody_else_may(client: str | None) -> None:
    with pytest.raises(WireError) as caught:
        Access().check(client, {"authorization": "Bearer guess"})
    assert caught.value.code == "api_key_required"


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000"])
def test_without_keys_this_machine_is_called_by_its_own_names(host: str) -> None:
    Access().check("127.0.0.1", {"host": host})
    for other in ("evil.example", "localhost.evil.example", "10.0.0.7:8000", "["):
        with pytest.raises(WireError) as caught:
            Access().check("127.0.0.1", {"host": other})
        assert caught.value.code == "api_key_required"
        KEYED.check("10.0.0.7", {"host": other, "authorization": "Bearer first-key"})


@pytest.mark.parametrize("given", ["Bearer first-key", "bearer second-key", "Bearer  second-key "])
def test_any_of_the_keys_opens(given: str) -> None:
    KEYED.check("10.0.0.7", {"authorization": given})


@pytest.mark.parametrize(
    "given", [None, "", "first-key", "Basic first-key", "Bearer first", "Bearer first-keyy", "Bearer "]
)
def test_nothing_else_does_not_even_locally(given: str | None) -> None:
    with pytest.raises(WireError) as caught:
        KEYED.check("127.0.0.1", {} if given is None else {"authorization": given})
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://app.example", "null", "https://localhost.evil.example", "http://["]
)
def test_pages_from_elsewhere_may_not(origin: str) -> None:
    with pytest.raises(WireError) as caught:
        KEYED.check("127.0.0.1", {"origin": origin, "authorization": "Bearer first-key"})
    assert caught.value.code == "origin_not_allowed"


def test_listed_origin_may_and_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    KEYED.check("10.0.0.7", {"origin": "https://app.example", "authorization": "Bearer first-key"})
    monkeypatch.setenv("A2T_API_KEYS", " a, b,, ")
    monkeypatch.setenv("A2T_ALLOWED_ORIGINS", "")
    assert Access.from_env() == Access(keys=("a", "b"), origins=())
