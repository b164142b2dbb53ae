"""What etcd's gateway answers, and what it means that it does not."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from ..exception import StoreError
from .etcd_endpoints import Endpoint

LARGEST_REQUEST = 1_500_000
"""The most bytes that etcd takes in a request, about, by default."""

# gRPC's codes, as the gateway gives them.
_NOT_FOUND, _UNAUTHENTICATED = 5, 16
_PASSING = {1, 2, 4, 10, 14}  # canceled, unknown, deadline exceeded, aborted, unavailable
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "invalid auth", "user name is empty")


class EtcdRefused(StoreError):
    """etcd answered that it will not. The message says what, and why.

    Attributes:
        code: gRPC's number of the reason.
        reason: etcd's words.
    """

    def __init__(self, message: str, code: int, reason: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def is_not_found(self) -> bool:
        """Whether there is no such thing."""
        return self.code == _NOT_FOUND

    @property
    def wants_login(self) -> bool:
        """Whether it came without a token that is valid."""
        return self.code == _UNAUTHENTICATED or any(words in self.reason for words in _LOGIN_AGAIN)

    @property
    def is_too_large(self) -> bool:
        """Whether the request was too large, for etcd or for what it is made of."""
        return "too large" in self.reason or "larger than max" in self.reason


class EtcdCompacted(StoreError):
    """What was asked for lies before etcd's last compaction: read again, and go on from there.

    Attributes:
        revision: the oldest revision that is kept.
    """

    def __init__(self, message: str, revision: int) -> None:
        super().__init__(message)
        self.revision = revision


class NoAnswer(Exception):
    """A member did not answer, or is not able to right now: another try may do better."""


def read_answer(what: str, endpoint: Endpoint, status: int, data: bytes) -> dict[str, Any]:
    """Returns an answer as JSON.

    Args:
        what: was asked.
        endpoint: who answers.
        status: of HTTP.
        data: the answer.

    Raises:
        NoAnswer: the member cannot answer now.
        EtcdCompacted: the answer is not kept any more.
        EtcdRefused: it does not want to.
        StoreError: it is no etcd.
    """
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if status == 200 and isinstance(reply, dict):
        inner = reply.get("error")
        if isinstance(inner, dict):  # of a stream
            raise refusal(what, endpoint, int(inner.get("grpc_code", 2)), str(inner.get("message")))
        return reply
    if isinstance(reply, dict) and "code" in reply:
        raise refusal(what, endpoint, int(reply["code"]), str(reply.get("error")))
    if status >= 500:
        raise NoAnswer(f"{endpoint} answers HTTP {status}")
    raise StoreError(
        f"{endpoint} does not answer {what} as etcd's v3 gateway does, but HTTP {status} "
        f"{data[:100]!r}; see whether it is an etcd of version 3.4 or later, and whether it wants https"
    )


def refusal(what: str, endpoint: Endpoint, code: int, reason: str) -> Exception:
    """What it means that a member refuses something.

    Args:
        what: was asked.
        endpoint: who answers.
        code: gRPC's number of the reason.
        reason: etcd's words.
    """
    if "compacted" in reason:
        return EtcdCompacted(f"{endpoint}: {what}: {reason}", 0)
    if "too many requests" in reason or (code in _PASSING and "invalid" not in reason):
        return NoAnswer(f"{endpoint}: {reason}")
    hint = ""
    if "too large" in reason:
        hint = f"; etcd takes no more than about {LARGEST_REQUEST} bytes a request"
    elif "space exceeded" in reason:
        hint = "; compact and defragment it, and disarm its alarm"
    elif "user name is empty" in reason:
        hint = "; it wants a user and a password"
    return EtcdRefused(f"{endpoint} refuses {what}: {reason}{hint}", code, reason)


def meaning_of(what: str, endpoint: Endpoint, error: Exception) -> Exception:
    """What an error of the HTTP library means.

    Args:
        what: was asked.
        endpoint: who was asked.
        error: the library's.
    """
    cause: BaseException | None = error
    hint = ""
    while cause is not None:
        # Who is spoken to with TLS and has none, or the other way round, hangs up; so does who is killed.
        if isinstance(cause, ssl.SSLEOFError | ConnectionResetError):
            hint = f"; see whether it {'speaks TLS' if endpoint.tls else 'wants https'}"
        if isinstance(cause, ssl.SSLError) and _is_final(cause):
            return StoreError(
                f"{endpoint}: {what}: no TLS connection: {cause.reason or cause}; see whether the "
                "certificates on both sides are right, and whether it speaks TLS at all"
            )
        if isinstance(cause, http.client.BadStatusLine) and not isinstance(
            cause, http.client.RemoteDisconnected
        ):
            return StoreError(f"{endpoint} does not speak HTTP: it is no etcd, or one that wants https")
        following = cause.__cause__ or cause.__context__
        cause = following or next((a for a in cause.args if isinstance(a, BaseException)), None)
    return NoAnswer(f"{endpoint}: {_plain(error)}{hint}")


def _is_final(error: ssl.SSLError) -> bool:
    """Whether it is about what the two sides show each other, so that another try does no better."""
    reason = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason or "WRONG_VERSION" in reason


def _plain(error: Exception) -> str:
    """An error in words, without the object that the HTTP library puts in front."""
    return str(error).rpartition(">: ")[2] or repr(error)
