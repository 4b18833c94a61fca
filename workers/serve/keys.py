"""Who is this client? The key that it shows says which tenant it is, and nothing else does.

    # a line a key: the key, blanks, its tenant
    sk-3f9a…  search
    sk-77c1…  search          two keys of one tenant: to change them one at a time
    sk-0b2e…  support

Owner: each worker, read when it starts; a reload (SIGHUP) reads it anew. Readers: app.
Invariants
    I1  Every key is compared, each in constant time, whatever was shown.
    I2  A file that others can read, or a line that is not a key and a tenant, is a ConfigError at start.
Leaves out: where the key stands in a request (app), what a tenant means for rows (identity).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from shmcache.errors import ConfigError

_LEAST_KEY_CHARACTERS = 16


class ApiKeys:
    """Tenants by key. The keys themselves are not kept, only their SHA-256, all of one length."""

    def __init__(self, tenants: dict[bytes, str]) -> None:
        self._tenants = tenants

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a key file. Raises ConfigError."""
        try:
            with path.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                lines = stream.read().decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {path}: {error}") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"key file {path} can be read by others: chmod 600 {path}")
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or len(words[0]) < _LEAST_KEY_CHARACTERS:
                raise ConfigError(
                    f"key file {path}, line {number}: a key of at least {_LEAST_KEY_CHARACTERS} characters, "
                    "a blank and a tenant"
                )
            if _digest(words[0]) in tenants:
                raise ConfigError(f"key file {path}, line {number}: this key stands there twice")
            tenants[_digest(words[0])] = words[1]
        if not tenants:
            raise ConfigError(f"key file {path} holds no key")
        return cls(tenants)

    def tenant_of(self, key: str) -> str | None:
        """Whose key this is, None where it is nobody's."""
        shown, found = _digest(key), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, shown):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
