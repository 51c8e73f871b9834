"""The URL of a bus on NATS, and the names of its streams."""

from __future__ import annotations

import pytest

from trunkline.bus.nats.place import Place, deep, flat, parse
from trunkline.errors import InvalidOption


def test_a_url_names_servers_and_a_bus() -> None:
    assert parse("nats://127.0.0.1:4222") == Place(("nats://127.0.0.1:4222",))
    assert parse("nats://a,b:4333/shop") == Place(("nats://a:4222", "nats://b:4333"), "shop")
    assert parse("nats://[::1]:4333").servers == ("nats://[::1]:4333",)


def test_credentials_leave_the_url() -> None:
    place = parse("nats://ann:p%40ss@a,b/shop")
    assert (place.user, place.password, place.token) == ("ann", "p@ss", None)
    assert place.servers == ("nats://a:4222", "nats://b:4222")
    assert parse("nats://secret@a").token == "secret"


@pytest.mark.parametrize(
    "url", ["nats://", "nats://:4222", "nats://a:x", "nats://a/b.c", "nats://a?x=1", "tls://a"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption):
        parse(url)


def test_two_topics_never_share_a_stream() -> None:
    place = Place(("nats://a:4222",), "shop")
    topics = ["a.b", "a_b", "a-b", "a", "a.b.DLQ"]
    names = {place.stream(topic, number) for topic in topics for number in (0, 1, 10)}
    assert len(names) == 3 * len(topics)
    other = Place(("nats://a:4222",), "shop-a")
    assert other.stream("b", 0) not in names
    assert all(deep(flat(topic)) == topic for topic in topics)
