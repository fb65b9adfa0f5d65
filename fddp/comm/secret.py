"""The secret of a job, and signatures with it: a process without the secret is not a rank.

Source: challenge and response by HMAC (RFC 2104), as in Python's `multiprocessing.connection`.
"""

import hmac
import os
import secrets

SECRET = "FDDP_SECRET"


def new_secret() -> str:
    """Returns a fresh secret for a job, or a fresh challenge."""
    return secrets.token_hex(16)


def signature(*values: str | bytes) -> str:
    """Signs values with the job's secret; without a secret the signature proves nothing."""
    signing = hmac.new(os.fsencode(os.environ.get(SECRET, "")), digestmod="sha256")
    for value in values:
        if isinstance(value, str):
            value = value.encode(errors="surrogateescape")
        signing.update(len(value).to_bytes(8, "big"))  # 'ab', 'c' are not 'a', 'bc'
        signing.update(value)
    return signing.hexdigest()


def signed(claim: object, *values: str | bytes) -> bool:
    """Returns True if `claim` is the values' signature, in equal time for all false claims."""
    text = b""
    if isinstance(claim, str):
        text = claim.encode(errors="replace")
    return hmac.compare_digest(text, signature(*values).encode())
