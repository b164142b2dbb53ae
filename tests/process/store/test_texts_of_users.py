"""Texts of users are cut where they go into the store or a line: of any length, of any characters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ft_wrapper._text import IN_LINE, IN_STORE, cut
from ft_wrapper.attribution import Interruption
from ft_wrapper.exception import HealthCheckError, JobAbort, RestartAbort, in_one_line
from ft_wrapper.protocol.records import Fault, Member, MemberRecord
from ft_wrapper.restart.loop import signature_of
from ft_wrapper.restart.report import describe_faults
from ft_wrapper.store import TCPStore, TCPStoreServer

CHARACTERS = st.characters(exclude_categories=[])  # lone surrogates, too
LONG = 9_000_000  # bytes, more than the store takes
# A text that is drawn, and one that is longer than what is written.
TEXTS = st.one_of(
    st.text(CHARACTERS), st.text(CHARACTERS, min_size=1).map(lambda text: text * (3 * IN_STORE // len(text)))
)
KINDS = st.sampled_from([ValueError, KeyError, OSError, SystemExit, RestartAbort, JobAbort, HealthCheckError])


class Broken(Exception):
    """Neither its text nor its repr can be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@pytest.fixture(scope="module")
def store() -> Iterator[TCPStore]:
    server = TCPStoreServer()
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))
    with contextlib.closing(server), contextlib.closing(client):
        yield client


@given(TEXTS, st.integers(3, 3 * IN_STORE))
def test_a_text_is_cut_between_two_characters(text: str, most: int) -> None:
    found = cut(text, most)
    whole = text.encode(errors="backslashreplace")
    assert len(found.encode()) <= most
    if len(whole) <= most:
        assert found.encode() == whole
    else:
        assert found[-1] == "…" and whole.startswith(found[:-1].encode())
        assert len(found.encode()) > most - 4


@example(ValueError, "x" * LONG, "E" * LONG)
@given(KINDS, TEXTS, TEXTS.filter(lambda text: "\0" not in text))
def test_what_was_raised_fits_into_a_line_of_a_log_and_of_the_store(
    store: TCPStore, kind: type[BaseException], text: str, name: str
) -> None:
    error = type(cut(name, 2 * LONG), (kind,), {})(text)
    error.add_note(text)
    assert len(signature_of(error).encode()) <= IN_LINE
    with contextlib.suppress(kind):
        raise error
    for said in (in_one_line(error), signature_of(error)):  # now that there is a place
        assert len(said.encode()) <= IN_LINE
    store.append("log", in_one_line(error) + signature_of(error) + "\n")
    assert store.check(["log"])


def test_an_exception_whose_text_cannot_be_had_is_named() -> None:
    assert in_one_line(Broken()) == f"{__name__}.Broken: <exception str() failed>"


@example(["x" * LONG])
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_what_is_written_of_a_member_fits_into_the_store(store: TCPStore, texts: list[str]) -> None:
    member = Member(0, 0)
    faults = [Fault(member, 0, Interruption.SOFT_TIMEOUT, text, host="here") for text in texts]
    for record in (*faults, MemberRecord("here", 1, ended_by=texts[0])):
        written = record.to_json()
        assert written.isascii() and len(written) <= 7 * IN_STORE  # \uxxxx is as long as two characters
        store.set("record", written)
        read = type(record).from_json(store.get("record").decode(), "record")
        assert json.loads(read.to_json()) == json.loads(written)
    assert len(describe_faults(faults).encode()) <= IN_LINE + 100  # how many others there are
