"""The table of an event's fields, against the types that spell them out."""

from __future__ import annotations

from msgspec.structs import fields

from trunkline.event import Event, EventFields
from trunkline.fields import FIELDS, TEXTS


def test_the_table_has_the_fields_of_an_event_in_its_order() -> None:
    stored = [(field.name, field.encode_name) for field in fields(Event)]
    assert [(field.name, field.stored) for field in FIELDS] == stored


def test_publish_takes_every_field_but_topic_and_payload_by_name() -> None:
    names = {field.name for field in FIELDS} - {"topic", "payload"}
    assert set(EventFields.__annotations__) == names | {"delay_s"}


def test_no_door_has_two_fields_of_one_name() -> None:
    for door in ("stored", "column", "envelope", "cloudevent"):
        names = [name for field in FIELDS if (name := getattr(field, door))]
        assert len(names) == len(set(names)), door


def test_free_text_is_text_in_the_type() -> None:
    kinds = {field.name: field.type for field in fields(Event)}
    assert {kinds[name] for name in TEXTS} == {str | None}
