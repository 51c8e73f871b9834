"""The OpenAPI page, made from the endpoints and the values their handlers decode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from trunkline import __version__

_PARAM = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ERROR = {
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
_NEW_EVENT = {
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
_SCHEMAS = {"Error": _ERROR, "NewEvent": _NEW_EVENT, "CloudEvent": _CLOUDEVENT}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_BATCH = {"type": "array", "items": _named("CloudEvent")}
PUBLISH_BODY = {
    "application/json": _named("NewEvent"),
    "application/cloudevents+json": _named("CloudEvent"),
    "application/cloudevents-batch+json": _BATCH,
}
EVENT_OUT = {
    "application/json": {"type": "object"},
    "application/cloudevents+json": _named("CloudEvent"),
    "*/*": {},  # the data of a binary one
}
EVENTS_OUT = {
    "application/json": {
        "type": "object",
        "required": ["topic", "events", "next"],
        "properties": {
            "topic": {"type": "string"},
            "partition": {"type": "integer"},
            "events": {"type": "array", "items": {"type": "object"}},
            "next": {"type": ["integer", "string"]},
        },
    },
    "application/cloudevents-batch+json": _BATCH,
}


class Described(Protocol):
    """What the page needs to know of an endpoint."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
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
    return {"application/json": _inlined(schema, parts)}


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


def document(endpoints: Iterable[Described], *, auth: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = _PARAM.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
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
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


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
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_"),
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
        else:
            found[status] = {"description": about, "content": reference}
    return found
