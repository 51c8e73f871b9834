"""The AsyncAPI page: every frame with its JSON Schema, and the topics that have one and that the
reader may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from trunkline import __version__, frames
from trunkline.broker.options import BrokerOptions
from trunkline.schemas import Schema

_ASKED = (
    *(frames.Auth, frames.Publish, frames.Subscribe, frames.Unsubscribe, frames.Ack, frames.Nack),
    *(frames.Extend, frames.Credit, frames.Call, frames.Ping),
)
_TOLD = (frames.Published, frames.Message, frames.Ok, frames.Failure, frames.Pong)


def document(schemas: Iterable[Schema], options: BrokerOptions) -> dict[str, Any]:
    found, parts = msgspec.json.schema_components(
        [*_ASKED, *_TOLD], ref_template="#/components/schemas/{name}", schema_hook=_hook
    )
    messages = {
        str(kind.__struct_config__.tag): {"name": kind.__struct_config__.tag, "payload": schema}
        for kind, schema in zip((*_ASKED, *_TOLD), found, strict=True)
    }
    channels: dict[str, Any] = {
        "frames": {
            "address": "/",
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        }
    }
    for one in schemas:
        channels[one.topic] = {
            "address": one.topic,
            "messages": {"event": {"payload": one.schema, "name": f"v{one.version}"}},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Trunkline broker", "version": __version__},
        "servers": {
            "this": {
                "host": f"{options.host}:{options.port}",
                "protocol": "wss" if options.tls_cert else "ws",
            }
        },
        "channels": channels,
        "operations": {
            "ask": _operation("receive", _ASKED),
            "tell": _operation("send", _TOLD),
        },
        "components": {"messages": messages, "schemas": parts},
    }


def _operation(action: str, kinds: Any) -> dict[str, Any]:
    place = "#/channels/frames/messages"
    return {
        "action": action,
        "channel": {"$ref": "#/channels/frames"},
        "messages": [{"$ref": f"{place}/{kind.__struct_config__.tag}"} for kind in kinds],
    }


def _hook(kind: Any) -> dict[str, Any]:
    """``Raw`` stands for any JSON value."""
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError(kind)
