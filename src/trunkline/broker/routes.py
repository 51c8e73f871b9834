"""Every endpoint, in one table."""

from __future__ import annotations

from starlette.responses import Response

from trunkline.broker import asyncapi, endpoints, openapi
from trunkline.broker.http import Ask, Endpoint, reply
from trunkline.broker.openapi import (
    EVENT_OUT,
    EVENTS_OUT,
    PUBLISH_BODY,
    body,
    parameter,
    text_answer,
)


async def show_openapi(ask: Ask) -> Response:
    return reply(openapi.document(ENDPOINTS, auth=ask.hub.rights.is_on))


async def show_asyncapi(ask: Ask) -> Response:
    registry = ask.hub.registry
    topics = [name for name in registry.topics() if ask.hub.allows(ask.who, "read", name)]
    host = ask.request.headers.get("host", "")
    protocol = "wss" if ask.hub.options.tls_cert else "ws"
    return reply(asyncapi.document(map(registry.current, topics), host, protocol))


_FROM = parameter("from", "an offset, earliest, latest, or a time in ISO 8601")
_PAGE = parameter("from", "an offset, earliest, latest, a time in ISO 8601, or next of a page")
_WHERE = parameter("where", "a condition in SQL, as in payload.total > 10")
_PARTITION = parameter("partition", "all if not given", 0, 1023)

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/topics", endpoints.list_topics, "all topics"),
    Endpoint(
        "POST",
        "/topics",
        endpoints.create_topic,
        "make a topic, or change it",
        body(endpoints.NewTopic),
        {},
        201,
    ),
    Endpoint("GET", "/topics/{topic}", endpoints.get_topic, "one topic"),
    Endpoint(
        "DELETE", "/topics/{topic}", endpoints.delete_topic, "remove a topic for good", status=204
    ),
    Endpoint(
        "GET", "/topics/{topic}/offsets", endpoints.offsets, "bounds, and where each group is"
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/events",
        endpoints.publish,
        "publish an event, or a batch of CloudEvents",
        PUBLISH_BODY,
        {},
        201,
        tag="events",
    ),
    Endpoint(
        "GET",
        "/topics/{topic}/events",
        endpoints.read_events,
        "read events, past any group; of several partitions by time",
        None,
        {
            **_PAGE,
            **_WHERE,
            **_PARTITION,
            **parameter("limit", "100 if not given", 1, endpoints.READ_MAX),
        },
        answers=EVENTS_OUT,
        tag="events",
    ),
    Endpoint(
        "GET",
        "/topics/{topic}/events/{partition:int}/{offset:int}",
        endpoints.read_event,
        "one event",
        None,
        parameter("form", "envelope, cloudevent or binary"),
        answers=EVENT_OUT,
        tag="events",
    ),
    Endpoint(
        "GET",
        "/topics/{topic}/tail",
        endpoints.tail,
        "follow events (server-sent events)",
        None,
        {
            **_FROM,
            **_WHERE,
            **_PARTITION,
            **parameter("limit", "end after so many; 0 for never", 0, 1_000_000),
        },
        answers=text_answer("text/event-stream"),
        tag="events",
    ),
    Endpoint(
        "GET",
        "/groups",
        endpoints.list_groups,
        "all groups",
        None,
        parameter("all", "true: those that keep the books of dead letters too"),
        tag="groups",
    ),
    Endpoint(
        "GET", "/topics/{topic}/groups/{group}", endpoints.get_group, "one group", tag="groups"
    ),
    Endpoint(
        "DELETE",
        "/topics/{topic}/groups/{group}",
        endpoints.delete_group,
        "remove a group",
        status=204,
        tag="groups",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/groups/{group}/seek",
        endpoints.seek_group,
        "move a group to an offset, earliest, latest or a time",
        body(endpoints.Seek),
        tag="groups",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/groups/{group}/pause",
        endpoints.pause_group,
        "deliver nothing",
        tag="groups",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/groups/{group}/resume",
        endpoints.resume_group,
        "deliver again",
        tag="groups",
    ),
    Endpoint(
        "GET",
        "/topics/{topic}/dlq",
        endpoints.list_dead,
        "dead letters",
        None,
        {
            **parameter("group", "of this group alone"),
            **parameter("closed", "true: those that are done with too"),
            **parameter("from", "the offset of a letter; next of the page before", 0, 2**62),
            **parameter("limit", "100 if not given", 1, endpoints.READ_MAX),
        },
        tag="dlq",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/dlq/redrive",
        endpoints.redrive,
        "give records back to the groups that gave them up",
        body(endpoints.Choice),
        tag="dlq",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/dlq/drop",
        endpoints.drop_dead,
        "close dead letters",
        body(endpoints.Choice),
        tag="dlq",
    ),
    Endpoint("GET", "/schemas", endpoints.list_schemas, "the schema of every topic", tag="schemas"),
    Endpoint(
        "GET", "/schemas/{topic}", endpoints.get_schema, "the schema of a topic", tag="schemas"
    ),
    Endpoint(
        "PUT",
        "/schemas/{topic}",
        endpoints.put_schema,
        "give a topic its next schema",
        body(endpoints.NewSchema),
        tag="schemas",
    ),
    Endpoint(
        "DELETE",
        "/schemas/{topic}",
        endpoints.delete_schema,
        "take anything",
        status=204,
        tag="schemas",
    ),
    Endpoint(
        "GET",
        "/schemas/{topic}/versions",
        endpoints.schema_versions,
        "all its versions",
        tag="schemas",
    ),
    Endpoint("GET", "/stats", endpoints.stats, "what happened since the start", tag="broker"),
    Endpoint(
        "GET",
        "/metrics",
        endpoints.metrics,
        "for Prometheus",
        answers=text_answer("text/plain"),
        tag="broker",
    ),
    Endpoint("GET", "/healthz", endpoints.healthz, "alive", open=True, tag="broker"),
    Endpoint("GET", "/readyz", endpoints.readyz, "ready", open=True, tag="broker"),
    Endpoint("GET", "/openapi.json", show_openapi, "this page", open=True, tag="broker"),
    Endpoint("GET", "/asyncapi.json", show_asyncapi, "the frames", open=True, tag="broker"),
)
