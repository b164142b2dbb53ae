"""Where a job's keys are in etcd, as text."""

from __future__ import annotations

import pytest

from ft_wrapper.store.address import EtcdAddress


@pytest.mark.parametrize(
    "endpoints",
    [
        "a:2379",
        "a:2379,10.0.0.1:2379",
        "[::1]:2379,b:2379",
        "b:2379,[::1]:2379",
        "https://a:2379,https://b:2379",
    ],
)
def test_text_and_back(endpoints: str) -> None:
    address = EtcdAddress(endpoints, "team/job 1", namespace="workers/1/", ca="/etc/ca.pem", ttl=60)
    assert EtcdAddress.parse(str(address)) == address


def test_the_usual_is_easy_to_read() -> None:
    assert str(EtcdAddress("a:2379,b:2379", "/ft_wrapper/job")) == "etcd://a:2379,b:2379/ft_wrapper/job"
