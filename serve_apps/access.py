"""Who may connect: API keys, and which web pages. No Ray, no sockets."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from serve_apps.limits import WireError


@dataclass(frozen=True)
class Access:
    """Without keys only this machine may connect. `origins` are the web origins whose pages may open a socket; pages
    served from this machine always may."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    @classmethod
    def from_env(cls) -> Access:
        """`A2T_API_KEYS` and `A2T_ALLOWED_ORIGINS`, separated by commas."""

        def listed(name: str) -> tuple[str, ...]:
            return tuple(v for part in os.environ.get(name, "").split(",") if (v := part.strip()))

        return cls(keys=listed("A2T_API_KEYS"), origins=listed("A2T_ALLOWED_ORIGINS"))

    def check(self, client: str | None, headers: Mapping[str, str]) -> None:
        """Raises WireError if this client (its address; header names in lower case) may not connect."""
        origin = headers.get("origin")
        if origin and origin not in self.origins and not _is_loopback(_hostname(origin)):
            raise WireError("origin_not_allowed", f"pages from {origin[:200]} may not connect; see A2T_ALLOWED_ORIGINS")
        if not self.keys:
            host = headers.get("host")  # a name that somebody else makes point here, or a proxy's
            if not _is_loopback(client) or (host and not _is_loopback(_hostname(f"//{host}"))):
                raise WireError("api_key_required", "without A2T_API_KEYS this server answers its own machine only")
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = [secrets.compare_digest(given.strip().encode(), key.encode()) for key in self.keys]  # never cut short
        if scheme.lower() != "bearer" or not any(known):
            raise WireError("invalid_api_key", "send Authorization: Bearer with one of the server's keys")


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # such as http://[
        return None


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
