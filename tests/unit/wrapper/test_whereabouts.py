"""Where ranks stood when they hung is one key in the store: not all ranks of a large job write there."""

from __future__ import annotations

from unittest import mock

import pytest

from ft_wrapper.protocol.records import CollectivePosition
from ft_wrapper.restart import call
from ft_wrapper.restart.call import Call
from ft_wrapper.restart.loop import Hang


@pytest.mark.parametrize(
    ("rank", "tells"), [(0, True), (511, True), (512, False), (16_383, False), (None, True)]
)
def test_only_the_first_512_ranks_say_where_they_stood(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, tells: bool
) -> None:
    this = mock.Mock()
    ends = this.own.thread_agreement.ends
    ends.finished_in.return_value = []
    monkeypatch.setattr(call.warm_up, "announce_cuda", lambda client: None)
    monkeypatch.setattr(call.dataclasses, "replace", lambda fault, position: fault)
    this.state.rank, this.own.memory.is_accused = rank, False
    this._current.hang = Hang("in all_reduce", CollectivePosition(), "a.py:5", since=0.0, is_cause=True)
    Call._publish(this)
    assert ends.log_fault.called is tells
