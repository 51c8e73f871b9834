"""One tree of errors: drawn in the module's docstring, each with its facts and a way out."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import sys
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import msgspec
import pytest

from trunkline import errors, explain
from trunkline.errors import (
    Corrupt,
    FatalError,
    HandlerSignal,
    InvalidName,
    InvalidOption,
    NotFound,
    Reject,
    Retry,
    StorageError,
    TrunklineError,
)
from trunkline.patterns.inbox import Inbox
from trunkline.patterns.outbox import SqlOutbox
from trunkline.patterns.schemas import Registry

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TrunklineError | HandlerSignal)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_drawn_in_the_tree_and_says_what_it_means(kind: type[Exception]) -> None:
    assert re.search(rf"\b{kind.__name__}\b", errors.__doc__ or "")
    assert kind.__doc__


def test_the_tree_draws_no_error_that_does_not_exist() -> None:
    drawn = re.findall(r"(?:[├└]── |· |^ {4})([A-Z]\w+)", errors.__doc__ or "", re.M)
    assert sorted(drawn) == sorted(kind.__name__ for kind in CLASSES)


def test_the_tree_draws_the_parents_as_they_are() -> None:
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^((?:    |│   )*)(?:[├└]── )?((?:[A-Z]\w+)(?: · [A-Z]\w+)*)", line)
        if not found or not line.startswith("    "):
            continue
        depth = len(found[1]) // 4 - (0 if "── " in line[: found.end()] else 1)
        for name in found[2].split(" · "):
            kind = getattr(errors, name)
            expected = "Exception" if depth == 0 else parents[depth - 1]
            assert kind.__base__.__name__ == expected
        parents[depth:] = [found[2].split(" · ")[-1]]
    assert parents[0] == "HandlerSignal"


def test_an_error_carries_its_facts_as_fields() -> None:
    error = Corrupt("damaged", path="wal/a.jsonl", position=17, hint="run verify")
    assert (error.path, error.position) == ("wal/a.jsonl", 17)
    assert error.hint == "run verify"
    assert str(error) == "damaged (run verify)"
    assert isinstance(error, StorageError)
    with pytest.raises(AttributeError, match="nope"):
        _ = error.nope


def test_an_error_without_a_message_says_what_its_class_says() -> None:
    assert str(InvalidName()) == "The name is not valid."
    assert str(InvalidName("bad")) == "bad"


@pytest.mark.parametrize("remake", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_travels_between_processes_whole(remake: object) -> None:
    assert callable(remake)
    error = remake(InvalidOption("no", name="x", value=5, hint="yes"))
    assert type(error) is InvalidOption
    assert (error.message, error.hint, error.name, error.value) == ("no", "yes", "x", 5)


def test_what_a_handler_says_is_no_error_of_the_bus() -> None:
    assert not issubclass(HandlerSignal, TrunklineError)
    assert Retry(2.5).delay_s == 2.5
    assert Retry().delay_s is None
    assert str(Retry(reason="busy")) == "busy"
    assert Reject("bad").reason == "bad"
    assert isinstance(FatalError("bad"), Reject)


@pytest.mark.parametrize("signal", [Retry(2.5, "busy"), Reject("bad"), FatalError("worse")])
def test_a_signal_travels_between_processes_whole(signal: HandlerSignal) -> None:
    again = pickle.loads(pickle.dumps(signal))
    assert type(again) is type(signal)
    assert str(again) == str(signal)
    assert vars(again) == vars(signal)


class Inner(msgspec.Struct, kw_only=True):
    kind: Literal["a", "b"] = "a"
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    at: datetime | None = None


class Outer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    items: list[int] = []
    names: dict[str, str] = {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"name":5}', "name must be text, not 5"),
        ('{"name":["x"]}', "name must be text, not a list"),
        ("{}", "name is missing"),
        ('{"name":"a","more":1}', "there is no field more"),
        ('{"name":"a","inner":{"kind":"z"}}', "inner.kind cannot be 'z'"),
        ('{"name":"a","inner":{"count":-1}}', "inner.count must be a whole number >= 0, not -1"),
        ('{"name":"a","items":[1,"x"]}', 'items[1] must be a whole number, not "x"'),
        ('{"name":"a","names":{"k":1}}', "a value in names must be text, not a whole number"),
        (
            '{"name":"a","inner":{"at":"now"}}',
            'inner.at must be a time like 2026-05-04T12:00:00Z, not "now"',
        ),
        ('{"name":', "it ends in the middle"),
        ("[" * 5000, "it is nested too deep"),
        ('{"name":nope}', "it is not JSON: invalid character at byte 12, in '{\"name\":nope}'"),
    ],
)
def test_what_a_decoder_said_becomes_a_sentence_with_the_field_and_the_value(
    data: str, said: str
) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)) as caught:
        msgspec.json.decode(data, type=Any if data[0] == "[" else Outer)
    assert explain.reason(caught.value, data.encode()) == said


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("sqlalchemy", "outbox", SqlOutbox),
        ("sqlalchemy", "outbox", Inbox),
        ("jsonschema_rs", "schemas", lambda bus: asyncio.run(Registry(bus).add("orders", {}))),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(
    module: str, extra: str, use: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotFound, match=f"{module} is not installed") as caught:
        use(SimpleNamespace(begin=None))  # looks like an engine
    assert caught.value.hint == f"pip install 'trunkline[{extra}]'"
