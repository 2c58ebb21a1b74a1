"""A store whose values carry the proof that their writer has the job's token.

A store of torch accepts values from any program that reaches its port. Here each value has an HMAC-SHA256 over the job,
the key and the value. A value without a valid one is not parsed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from windlass.core.errors import WindlassError

_MAC_BYTES = 32
_MOST_BYTES = 4 * 1024**2


class ForgedValueError(WindlassError):
    """A value in the store was not written by a machine of this job.

    Attributes:
        key: where it lies.
        content: the bytes found, without their signature. Their sender is unknown; do not trust them.
    """

    def __init__(self, key: str, content: bytes) -> None:
        super().__init__(
            f"the value of {key!r} in the rendezvous store is not signed with the token of this job: it was written "
            "by a machine with another token, in an earlier job, or by another program; it was not read"
        )
        self.key = key
        self.content = content


class SignedStore(Store):
    """The keys under `prefix` of a store, signed with a token.

    Args:
        inner: the store that holds the values.
        token: the secret of the job.
        prefix: begins the name of every key; part of what is signed.
    """

    def __init__(self, inner: Any, token: bytes, prefix: str) -> None:
        super().__init__()
        self._inner = inner
        self._token = token
        self._prefix = prefix
        self._patience: timedelta = inner.timeout

    def below(self, prefix: str) -> SignedStore:
        """The same store, with a longer prefix."""
        return SignedStore(self._inner, self._token, f"{self._prefix}/{prefix}")

    def of_session(self, session: str) -> SignedStore:
        """The same keys, with values that are signed for one session and not accepted in another."""
        token = hmac.digest(self._token, b"session\0" + session.encode(), hashlib.sha256)
        return SignedStore(self._inner, token, self._prefix)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        # A signature may hold any byte, and the store's Python face takes text: both travel as hexadecimal digits.
        self._inner.set(self._name(key), self._sign(key, content).hex() + content.hex())

    def get(self, key: str) -> bytes:
        """The value under `key`; waits for it up to `timeout`. Raises ForgedValueError if it was written without the
        token.
        """
        self.wait([key])
        raw = self._inner.get(self._name(key))
        try:
            if len(raw) > 2 * _MOST_BYTES:
                raise ValueError("too long")
            whole = bytes.fromhex(raw.decode("ascii"))
        except ValueError:
            raise ForgedValueError(key, raw[:_MOST_BYTES]) from None
        mac, content = whole[:_MAC_BYTES], whole[_MAC_BYTES:]
        # In constant time: how long a comparison takes would tell how much of a forged signature is right.
        if not hmac.compare_digest(mac, self._sign(key, content)):
            raise ForgedValueError(key, content)
        return content

    def set_json(self, key: str, value: Any) -> None:
        self.set(key, json.dumps(value))

    def get_json(self, key: str) -> Any:
        return json.loads(self.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check([self._name(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._inner.wait([self._name(key) for key in keys], timeout or self._patience)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Counters are not signed: nothing but numbers of slots and of machines comes of them."""
        return int(self._inner.add(self._name(key), amount))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @property
    def timeout(self) -> timedelta:
        return self._patience

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _sign(self, key: str, content: bytes) -> bytes:
        name = self._name(key).encode()
        # With the length of the name, or two pairs of a name and a content could have one signature.
        return hmac.digest(self._token, len(name).to_bytes(8, "big") + name + content, hashlib.sha256)
