"""The AsyncAPI page: every frame with its JSON Schema, and the topics that have one and that the
reader may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import msgspec

from trunkline import __version__
from trunkline.patterns.schemas import Schema
from trunkline.wire import frames

_ASKED = (
    *(frames.Auth, frames.Publish, frames.Subscribe, frames.Unsubscribe, frames.Ack, frames.Nack),
    *(frames.Extend, frames.Credit, frames.Call, frames.Ping),
)
_TOLD = (
    *(frames.Published, frames.Message, frames.Revoked, frames.Ok, frames.Failure, frames.Pong),
)


def document(schemas: Iterable[Schema], host: str, protocol: str) -> dict[str, Any]:
    """``host`` is the name, with the port, that led the reader here."""
    found, parts = msgspec.json.schema_components(
        [*_ASKED, *_TOLD], ref_template="#/components/schemas/{name}", schema_hook=_hook
    )
    messages = {
        str(kind.__struct_config__.tag): {"name": kind.__struct_config__.tag, "payload": schema}
        for kind, schema in zip((*_ASKED, *_TOLD), found, strict=True)
    }
    channels: dict[str, Any] = {
        "/": {  # no topic has this name
            "address": "/",
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        }
    }
    operations = {"ask": _operation("receive", _ASKED), "tell": _operation("send", _TOLD)}
    for one in schemas:
        place = f"#/channels/{one.topic}/messages/event/payload"
        channels[one.topic] = {
            "address": one.topic,
            "messages": {"event": {"payload": _payload(one, place), "name": f"v{one.version}"}},
        }
        for name, action in (("publish", "receive"), ("deliver", "send")):
            channel = f"#/channels/{one.topic}"
            operations[f"{name}__{one.topic}"] = {
                "action": action,
                "channel": {"$ref": channel},
                "messages": [{"$ref": f"{channel}/messages/event"}],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Trunkline broker", "version": __version__},
        "servers": {"this": {"host": host, "protocol": protocol}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": parts},
    }


def _operation(action: str, kinds: Any) -> dict[str, Any]:
    place = "#/channels/~1/messages"
    return {
        "action": action,
        "channel": {"$ref": "#/channels/~1"},
        "messages": [{"$ref": f"{place}/{kind.__struct_config__.tag}"} for kind in kinds],
    }


def _payload(one: Schema, place: str) -> Any:
    """The schema as a part of this page, whose own schemas are a superset of draft 7."""
    if isinstance(one.schema, bool):
        return {} if one.schema else {"not": {}}
    if "draft-04" in str(one.schema.get("$schema")):
        schema = moved(one.schema, f"{place}/schema", f"{place}/schema")
        return {"schemaFormat": "application/schema+json;version=draft-04", "schema": schema}
    return moved(one.schema, place, place)


def moved(schema: Any, root: str, here: str) -> Any:
    """With references that lead to the same place as before. ``#`` was ``root``, which is not the
    beginning of this page; a name can only be looked up in the schema itself.
    """
    if isinstance(schema, list):
        return [moved(one, root, f"{here}/{index}") for index, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    if here != root and not str(schema.get("$id", "#")).startswith("#"):
        root = here
    found: dict[str, Any] = {}
    for word, value in schema.items():
        below = f"{here}/{_token(word)}"
        if word == "$ref" and isinstance(value, str):
            if value == "#" or value.startswith("#/"):
                found[word] = root + value[1:]
            else:
                found.setdefault("description", f"{value} in the topic's schema")
        elif word in _BY_NAME and isinstance(value, dict):
            found[word] = {
                name: moved(one, root, f"{below}/{_token(name)}") for name, one in value.items()
            }
        else:
            found[word] = value if word in _VALUES else moved(value, root, below)
    return found


def _token(name: str) -> str:
    """A step of a JSON pointer, in a URL."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")


def _hook(kind: Any) -> dict[str, Any]:
    """``Raw`` stands for any JSON value."""
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError(kind)
