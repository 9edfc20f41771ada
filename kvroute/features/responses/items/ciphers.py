"""Encrypts what clients keep for the server: reasoning, and summaries of conversations.

Only routers of the same cluster can decrypt it, and only for the tenant and the `cache_salt` of the
request that it was made for. What cannot be decrypted is foreign: another server has made it, or
this one for another tenant.
"""

from base64 import urlsafe_b64encode
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from cryptography.fernet import Fernet, InvalidToken

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.gate import Caller
from kvroute.features.responses.stores.leased_values import owner

Kind = Literal["reasoning", "summary"]  # what is encrypted
KEY_BYTES = 32


class Cipher:
    """Encrypts and decrypts for one owner, that is for one tenant and `cache_salt`.

    Args:
        caller: the sender of the request. With API keys, the key is derived from the secret of the
            file of keys, so it stays the same when the cluster starts again.
        cache_salt: the `cache_salt` of the request.
        shared: the secret of a cluster without API keys: the URL of Redis with its password, which
            all routers know.
    """

    def __init__(self, caller: Caller, cache_salt: str | None, shared: str) -> None:
        secret = b"" if caller.tenant else blake2b(shared.encode()).digest()
        salt = owner(caller, cache_salt).encode(errors="surrogatepass")
        keyed = blake2b(salt, key=secret, digest_size=KEY_BYTES, person=b"encrypted items")
        self._fernet = Fernet(urlsafe_b64encode(keyed.digest()))

    def encrypt(self, kind: Kind, content: Any) -> str:
        """Return JSON content as an `encrypted_content`."""
        return self._fernet.encrypt(msgspec.json.encode((kind, content))).decode()

    def decrypt(self, kind: Kind, encrypted: str) -> Any:
        """Return the content; None if it is foreign, or of another kind."""
        try:
            found, content = msgspec.json.decode(self._fernet.decrypt(encrypted))
        except (InvalidToken, TypeError, ValueError, *DECODE_ERRORS):
            return None
        return content if found == kind else None
