"""The OpenAPI page, made from the endpoints and the values their handlers decode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from trunkline import __version__
from trunkline.broker.asyncapi import moved
from trunkline.broker.spelling import ALIASES
from trunkline.patterns.schemas import Schema

_PARAM = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string"},
        "hint": {"type": "string"},
        "path": {"type": "string"},
    },
}
_REFUSALS = {
    "400": "the request is not valid",
    "401": "no valid token",
    "403": "not allowed",
    "404": "not there",
    "409": "it conflicts with what is there",
    "413": "too large",
    "415": "another media type is needed",
    "421": "another name is needed",
    "429": "too many requests",
    "503": "not now",
    "507": "no room on the device",
}
_CLOUDEVENT = {
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "minLength": 1},
        "source": {"type": "string", "minLength": 1},
        "type": {"type": "string", "minLength": 1},
        "time": {"type": "string", "format": "date-time"},
        "data": {},
    },
}
_NEW_EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["payload"],
    "additionalProperties": False,
    "properties": {
        "payload": {},
        "key": {"type": ["string", "null"]},
        "headers": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
        "payload_sha256": {"type": ["string", "null"]},
        "type": {"type": ["string", "null"]},
        "id": {"type": ["string", "null"]},
    },
}
_TIME = {"type": "string", "format": "date-time"}
_EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["id", "ts", "time", "topic", "partition", "offset", "payload"],
    "properties": {
        "id": {"type": "string"},
        "ts": {"type": "integer", "description": "time in epoch milliseconds"},
        "time": _TIME,
        "topic": {"type": "string"},
        "key": {"type": "string"},
        "partition": {"type": "integer"},
        "offset": {"type": "integer"},
        "attempts": {"type": "integer"},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        "payload_sha256": {"type": "string"},
        "payload": {},
    },
}
_RECEIPT = {
    "type": "object",
    "required": ["topic", "partition", "offset", "id", "duplicate", "durability"],
    "properties": {
        "topic": {"type": "string"},
        "partition": {"type": "integer"},
        "offset": {"type": "integer"},
        "id": {"type": "string"},
        "duplicate": {"type": "boolean"},
        "durability": {"type": "string"},
    },
}
_RESULT = {
    "type": "object",
    "required": ["handle", "ok", "state"],
    "properties": {
        "handle": {"type": "string"},
        "ok": {"type": "boolean"},
        "state": {"enum": ["acked", "nacked", "held", "dead", "free", "taken", "settled", "gone"]},
        "delay_s": {"type": "number"},
        "leased_until": _TIME,
        "message": {"type": "string"},
    },
}
_SCHEMAS = {
    "Error": _ERROR,
    "NewEvent": _NEW_EVENT,
    "CloudEvent": _CLOUDEVENT,
    "Event": _EVENT,
    "Receipt": _RECEIPT,
    "LeaseResult": _RESULT,
}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_BATCH = {"type": "array", "items": _named("CloudEvent")}
PUBLISH_BODY = {
    "application/json": _named("NewEvent"),
    "application/cloudevents+json": _named("CloudEvent"),
    "application/cloudevents-batch+json": _BATCH,
}
RECEIPT_OUT = {
    "application/json": {
        "anyOf": [
            _named("Receipt"),
            {
                "type": "object",
                "required": ["receipts"],
                "properties": {"receipts": {"type": "array", "items": _named("Receipt")}},
            },
        ]
    }
}
EVENT_OUT = {
    "application/json": _named("Event"),
    "application/cloudevents+json": _named("CloudEvent"),
    "*/*": {},  # the data of a binary one
}


def _events(item: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["topic", "events", "next"],
        "properties": {
            "topic": {"type": "string"},
            "partition": {"type": "integer"},
            "events": {"type": "array", "items": item},
            "next": {"type": ["integer", "string"]},
        },
    }


def _fetched(item: dict[str, Any]) -> dict[str, Any]:
    delivery = {
        "type": "object",
        "required": ["handle", "attempt", "leased_until", "event"],
        "properties": {
            "handle": {"type": "string"},
            "attempt": {"type": "integer"},
            "leased_until": _TIME,
            "event": item,
        },
    }
    return {
        "type": "object",
        "required": ["topic", "group", "deliveries"],
        "properties": {
            "topic": {"type": "string"},
            "group": {"type": "string"},
            "deliveries": {"type": "array", "items": delivery},
        },
    }


def _results() -> dict[str, Any]:
    return {"results": {"type": "array", "items": _named("LeaseResult")}}


EVENTS_OUT = {
    "application/json": _events(_named("Event")),
    "application/cloudevents-batch+json": _BATCH,
}
FETCHED_OUT = {"application/json": _fetched(_named("Event"))}
RESULTS_OUT = {
    "application/json": {
        "type": "object",
        "required": ["results"],
        "properties": _results(),
    }
}


class Described(Protocol):
    """What the page needs to know of an endpoint."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def handler(self) -> Any: ...
    @property
    def about(self) -> str: ...
    @property
    def body(self) -> dict[str, Any] | None: ...
    @property
    def query(self) -> Mapping[str, Any]: ...
    @property
    def status(self) -> int: ...
    @property
    def answers(self) -> dict[str, Any] | None: ...
    @property
    def open(self) -> bool: ...
    @property
    def tag(self) -> str: ...


def body(kind: Any) -> dict[str, Any]:
    """The schema of a JSON body."""
    (schema,), parts = msgspec.json.schema_components([kind])
    found = _inlined(schema, parts)
    for name, member in list(found["properties"].items()):
        if name in ALIASES:
            older = {**member, "deprecated": True, "description": f"an older name of {name}"}
            found["properties"][ALIASES[name]] = older
    return {"application/json": found}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _inlined(one, parts) for name, one in schema.items()}


def parameter(
    name: str, about: str, low: int | None = None, high: int | None = None
) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "string"}
    if low is not None:
        kind = {"type": "integer", "minimum": low, "maximum": high}
    return {name: {"description": about, "schema": kind}}


def text_answer(media: str) -> dict[str, Any]:
    return {media: {"type": "string"}}


def document(
    endpoints: Iterable[Described], schemas: Iterable[Schema], *, auth: bool
) -> dict[str, Any]:
    """The page. A topic that has a schema has paths of its own, so that a client that is generated
    from the page knows the type of its payload.
    """
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = _PARAM.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    components = dict(_SCHEMAS)
    for one in schemas:
        components |= _typed(one)
        for path in _TYPED:
            own = paths.setdefault(path.replace("{topic}", one.topic), {})
            own.update(_of_topic(paths[path], one.topic))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Trunkline broker",
            "version": __version__,
            "description": "Topics, events, groups and dead letters over HTTP.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}] if auth else [],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


# The paths whose bodies and answers hold payloads, and what holds them there.
_TYPED = ("/topics/{topic}/events", "/topics/{topic}/groups/{group}/fetch")


def _part(topic: str, what: str) -> str:
    """The name of a topic's own schema. A topic has no ``__`` in its name."""
    return f"{what}__{topic}"


def _typed(one: Schema) -> dict[str, Any]:
    """The payload of a topic, and what holds it."""
    payload = _part(one.topic, "Payload")
    place = f"#/components/schemas/{payload}"
    schema = one.schema if isinstance(one.schema, dict) else ({} if one.schema else {"not": {}})
    found = {payload: moved(schema, place, place)}
    for what, plain in (("NewEvent", _NEW_EVENT), ("Event", _EVENT)):
        properties: Any = plain["properties"]
        found[_part(one.topic, what)] = {
            **plain,
            "properties": {**properties, "payload": _named(payload)},
        }
    return found


def _of_topic(operations: dict[str, Any], topic: str) -> dict[str, Any]:
    """The operations of a path with ``{topic}``, for one topic."""
    found = {}
    for method, operation in operations.items():
        own = {**operation, "operationId": f"{operation['operationId']}__{_word(topic)}"}
        rest = [one for one in operation.get("parameters", ()) if one["name"] != "topic"]
        own["parameters"] = rest
        for what in ("NewEvent", "Event"):
            own = _pointed(own, _named(what)["$ref"], _named(_part(topic, what))["$ref"])
        found[method] = own
    return found


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)


def _pointed(value: Any, old: str, new: str) -> Any:
    """A value whose references to one schema are to another."""
    if isinstance(value, list):
        return [_pointed(one, old, new) for one in value]
    if not isinstance(value, dict):
        return new if value == old else value
    return {name: _pointed(one, old, new) for name, one in value.items()}


def _operation(endpoint: Described) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0}
            if kind == "int"
            else {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_.-]+$"},
        }
        for name, kind in _PARAM.findall(endpoint.path)
    ]
    parameters += [{"name": name, "in": "query", **about} for name, about in endpoint.query.items()]
    found: dict[str, Any] = {
        "summary": endpoint.about,
        "operationId": endpoint.handler.__name__,
        "tags": [endpoint.tag],
        "responses": _responses(endpoint),
    }
    if parameters:
        found["parameters"] = parameters
    if endpoint.body is not None:
        content = {media: {"schema": schema} for media, schema in endpoint.body.items()}
        found["requestBody"] = {"required": True, "content": content}
    if endpoint.open:
        found["security"] = []
    return found


def _responses(endpoint: Described) -> dict[str, Any]:
    done: dict[str, Any] = {"description": endpoint.about}
    if endpoint.status != 204:
        answers = endpoint.answers or {"application/json": {"type": "object"}}
        done["content"] = {media: {"schema": schema} for media, schema in answers.items()}
    found = {str(endpoint.status): done}
    if endpoint.status == 201:
        found["200"] = {**done, "description": "it was there"}
    reference = {"application/json": {"schema": _named("Error")}}
    for status, about in _REFUSALS.items():
        if status == "503" and endpoint.path == "/readyz":
            found[status] = {**done, "description": about}
        elif status == "409" and endpoint.path.startswith("/leases/"):
            lost = {**_ERROR, "properties": {**_ERROR["properties"], **_results()}}
            found[status] = {
                "description": about,
                "content": {"application/json": {"schema": lost}},
            }
        else:
            found[status] = {"description": about, "content": reference}
    return found
