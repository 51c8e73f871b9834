from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from trunkline.access import (
    EVERYTHING,
    LOCAL,
    NOBODY,
    Action,
    Grant,
    Principal,
    admit,
    may,
    new_token,
    require,
    token_id,
)
from trunkline.errors import Denied, InvalidName, InvalidOption

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def who(*grants: Grant) -> Principal:
    return Principal("me", grants)


@pytest.mark.parametrize(
    ("grant", "action", "topic", "group", "allowed"),
    [
        (Grant(("publish",), ("orders",)), "publish", "orders", "", True),
        (Grant(("publish",), ("orders",)), "publish", "orders.eu", "", False),
        (Grant(("publish",), ("orders",)), "subscribe", "orders", "g", False),
        (Grant(("publish",), ("orders.*",)), "publish", "orders.eu", "", True),
        (Grant(("publish",), ("orders.*",)), "publish", "orders.eu.de", "", False),
        (Grant(("publish",), (">",)), "publish", "anything.at.all", "", True),
        (Grant(("publish",), (">",)), "publish", "system.metrics", "", False),
        (Grant(("publish",), (">",)), "publish", "orders.DLQ", "", False),
        (Grant(("read",), ("system.>",)), "read", "system.metrics", "", True),
        (Grant(("read",), ("orders.DLQ",)), "read", "orders.DLQ", "", True),
        (Grant(("read",), ("*.DLQ",)), "read", "orders.DLQ", "", True),
        (Grant(("read",), ("orders.>",)), "read", "orders.eu.DLQ", "", False),
        (Grant(("subscribe",), ("orders",), ("b",)), "subscribe", "orders", "b", True),
        (Grant(("subscribe",), ("orders",), ("b",)), "subscribe", "orders", "c", False),
        (Grant(("subscribe",), ("orders",), ("b.*",)), "subscribe", "orders", "b.x", True),
        (Grant(("subscribe",), ("orders.*",)), "subscribe", "orders.*", "g", True),
        (Grant(("subscribe",), ("orders.*",)), "subscribe", "orders.>", "g", False),
        (Grant(("subscribe",), ("orders.>",)), "subscribe", "orders.*.x", "g", True),
        (Grant(("subscribe",), ("orders.>",)), "subscribe", ">", "g", False),
        (Grant(("subscribe",), ("orders.eu",)), "subscribe", "orders.*", "g", False),
        (Grant(("admin",), ("orders",)), "publish", "orders", "", True),
        (Grant(("admin",), ("orders",)), "publish", "refunds", "", False),
        (Grant(("admin",), ("system.>",)), "admin", "orders", "", False),
        (Grant(("admin",), ("system.>",)), "subscribe", "system.>", "g", True),
        (Grant(("subscribe",), (">",)), "subscribe", ">", "g", False),
        (Grant(("subscribe",), (">", "system.>")), "subscribe", ">", "g", True),
        (Grant(("subscribe",), ("*.*",)), "subscribe", "*.*", "g", False),
        (Grant(("subscribe",), ("*",)), "subscribe", "*", "g", True),
        (Grant(("subscribe",), (">",)), "subscribe", "system.*", "g", False),
        (Grant(("subscribe",), (">",)), "subscribe", "*.DLQ", "g", False),
        (Grant(("subscribe",), (">",)), "subscribe", "orders.>", "g", True),
        (EVERYTHING, "admin", "system.access", "", True),
        (EVERYTHING, "subscribe", ">", "g", True),
    ],
    ids=str,
)
def test_a_grant_allows_what_it_says(
    grant: Grant, action: Action, topic: str, group: str, allowed: bool
) -> None:
    assert may(who(grant), action, topic, group) is allowed


def test_nothing_is_allowed_to_nobody() -> None:
    for action in ("publish", "subscribe", "read", "admin"):
        assert not may(NOBODY, action, "orders", "g")
    assert may(LOCAL, "admin", "system.access")


@pytest.mark.parametrize("topic", ["orders.secret", "orders.*", "orders.>", ">"])
def test_a_denial_beats_any_grant(topic: str) -> None:
    allow = Grant(("subscribe",), (">",))
    deny = Grant(("subscribe",), ("orders.secret",), deny=True)
    for grants in ((allow, deny), (deny, allow)):
        assert not may(who(*grants), "subscribe", topic, "g")
    assert may(who(allow, deny), "subscribe", "orders.open", "g")
    assert may(who(allow, deny), "subscribe", "refunds", "g")


def test_a_denial_says_nothing_of_its_reason() -> None:
    messages = set()
    for grants in ((), (Grant(("publish",), ("x",)),)):
        with pytest.raises(Denied) as caught:
            require(who(*grants), "publish", "orders")
        messages.add(str(caught.value))
    assert messages == {"access denied"}


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidName):
        Grant(("publish",), ("a//b",))


class TestTokens:
    def test_a_token_admits_its_agent(self) -> None:
        text, kept = new_token("me", [EVERYTHING], created=NOW)
        assert token_id(text) == kept.id
        found = admit(text, kept, NOW)
        assert found is not None
        assert (found.agent, found.grants) == ("me", (EVERYTHING,))
        assert text.split("_", 2)[2] not in str(kept)

    def test_what_is_not_that_token_admits_nobody(self) -> None:
        text, kept = new_token("me", [EVERYTHING], created=NOW)
        other, _ = new_token("you", [EVERYTHING], created=NOW)
        wrong = f"tl_{kept.id}_{other.rpartition('_')[2]}"
        for shown in (wrong, other, "", "tl_", text + "x", text.upper()):
            assert admit(shown, kept, NOW) is None
        assert admit(text, None, NOW) is None

    def test_an_expired_or_revoked_token_admits_nobody(self) -> None:
        import msgspec

        text, kept = new_token("me", [EVERYTHING], created=NOW, expires=NOW + timedelta(days=1))
        assert admit(text, kept, NOW + timedelta(hours=23)) is not None
        assert admit(text, kept, NOW + timedelta(days=1)) is None
        assert admit(text, msgspec.structs.replace(kept, revoked=True), NOW) is None

    def test_an_agent_has_a_name(self) -> None:
        for agent in ("", "x" * 201, "a\nb"):
            with pytest.raises(InvalidOption):
                new_token(agent, [], created=NOW)
