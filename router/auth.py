"""Who may call the public and the admin API: bearer keys.

A *principal* names the holder of a key without being the key: what prompts share in a prefix cache is decided by it,
so a caller can neither read nor probe what another's prompts left there. Without a key file everybody is nobody in
particular: one principal, empty. Keys are compared as digests and in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from router.openai.errors import ApiError
from router.openai.sse import send_json

PRINCIPAL = "k3.principal"  # of a scope: bytes


class Keys:
    """The accepted keys. Empty: everybody is let in."""

    def __init__(self, keys: Collection[str] = ()) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._digests

    def principal(self, authorization: str) -> bytes | None:
        """Whose header it is, 32 bytes; empty when no key is asked for; None when it is nobody's."""
        if self.is_open:
            return b""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return hashlib.sha256(b"principal\0" + digest).digest() if any(matches) else None


class KeyGate:
    """Lets requests to guarded paths pass with a key only, and notes the principal in their scope."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        count_error: Callable[[str | None], None],
        open_paths: Collection[str] = (),
    ) -> None:
        """count_error(code): told of every answer that is an error."""
        self._app = app
        self._keys = keys
        self._count_error = count_error
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        principal = self._keys.principal(header)
        if principal is None and scope["path"] not in self._open:
            error = _refusal(bool(header))
            self._count_error(error.code)
            await send_json(send, error.status, error.body, error.headers)
            return
        await self._app({**scope, PRINCIPAL: principal or b""}, receive, send)


def _refusal(has_header: bool) -> ApiError:
    message = (
        "the API key is not known here"
        if has_header
        else "an API key is needed: send the header Authorization: Bearer KEY"
    )
    return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
