"""The job's secret, and the signatures that it gives: a process without it is not a rank.

Source: challenge and response by HMAC (RFC 2104), as in Python's `multiprocessing.connection`.
"""

import hmac
import os
import secrets

SECRET = "FDDP_SECRET"


def new_secret() -> str:
    """A fresh secret for a job; also a challenge that was never used before."""
    return secrets.token_hex(16)


def signature(*parts: str | bytes) -> str:
    """Signs values with the job's secret; without a secret the signature proves nothing."""
    signing = hmac.new(os.fsencode(os.environ.get(SECRET, "")), digestmod="sha256")
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        signing.update(len(data).to_bytes(8, "big"))  # 'ab', 'c' are not 'a', 'bc'
        signing.update(data)
    return signing.hexdigest()


def signed(found: object, *parts: str | bytes) -> bool:
    """Whether a value is the signature of these values; takes equally long for all wrong ones."""
    text = found.encode(errors="replace") if isinstance(found, str) else b""
    return hmac.compare_digest(text, signature(*parts).encode())
