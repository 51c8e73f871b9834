"""Every endpoint, in one table."""

from __future__ import annotations

from starlette.responses import Response

from trunkline.broker import (
    asyncapi,
    definitions,
    endpoints,
    leases,
    log_lines,
    openapi,
    operations,
    streams,
    token_pages,
)
from trunkline.broker.http import Ask, Endpoint, reply
from trunkline.broker.openapi import (
    EVENT_OUT,
    EVENTS_OUT,
    FETCHED_OUT,
    PUBLISH_BODY,
    RECEIPT_OUT,
    RESULTS_OUT,
    body,
    parameter,
    text_answer,
)
from trunkline.patterns.schemas import Schema


async def show_openapi(ask: Ask) -> Response:
    return reply(openapi.document(ENDPOINTS, _schemas(ask), auth=ask.hub.rights.is_on))


async def show_asyncapi(ask: Ask) -> Response:
    host = ask.request.headers.get("host", "")
    protocol = "wss" if ask.hub.options.tls_cert else "ws"
    return reply(asyncapi.document(_schemas(ask), host, protocol))


def _schemas(ask: Ask) -> list[Schema]:
    """The schemas of the topics that the reader of a page may read."""
    registry = ask.hub.registry
    topics = [name for name in registry.topics() if ask.hub.allows(ask.who, "read", name)]
    return [registry.current(name) for name in topics]


_FROM = parameter("from", "an offset, earliest, latest, or a time in ISO 8601")
_PAGE = parameter("from", "an offset, earliest, latest, a time in ISO 8601, or next of a page")
_WHERE = parameter("where", "a condition in SQL, as in payload.total > 10")
_LIST = {
    **parameter("limit", "1000 if not given", 1, endpoints.PAGE_MAX),
    **parameter("after", "next of the page before"),
}
_PARTITION = parameter("partition", "all if not given", 0, 1023)
_TICKET = parameter("ticket", "of POST /tickets, where no header can be sent")

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/topics", endpoints.list_topics, "all topics", None, _LIST),
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
        RECEIPT_OUT,
        tag="events",
    ),
    Endpoint(
        "GET",
        "/topics/{topic}/log",
        log_lines.read_log,
        "a range of one partition as lines of the log, for bulk readers",
        None,
        {
            **parameter("partition", "0 if not given", 0, 1023),
            **parameter("from", "an offset", 1, log_lines.OFFSET_MAX),
            **parameter("to", "the offset to end before", 1, log_lines.OFFSET_MAX),
        },
        answers=text_answer(log_lines.MEDIA),
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
            **_TICKET,
        },
        answers=text_answer("text/event-stream"),
        tag="events",
        ticket=True,
    ),
    Endpoint(
        "GET",
        "/groups",
        endpoints.list_groups,
        "all groups",
        None,
        {**_LIST, **parameter("all", "true: those that keep the books of dead letters too")},
        tag="groups",
    ),
    Endpoint(
        "GET", "/topics/{topic}/groups/{group}", endpoints.get_group, "one group", tag="groups"
    ),
    Endpoint(
        "PATCH",
        "/topics/{topic}/groups/{group}",
        endpoints.edit_policy,
        "change options of a group's policy; the others stay",
        body(endpoints.NewPolicy),
        tag="groups",
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
        operations.seek_group,
        "move a group to an offset, earliest, latest or a time",
        body(operations.Seek),
        status=202,
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
        "POST",
        "/topics/{topic}/groups/{group}/fetch",
        leases.fetch,
        "lease records of a group to handles",
        body(leases.FetchLeases),
        answers=FETCHED_OUT,
        tag="leases",
    ),
    Endpoint(
        "POST",
        "/leases/ack",
        leases.ack_leases,
        "settle records by their handles",
        body(leases.AckLeases),
        answers=RESULTS_OUT,
        tag="leases",
    ),
    Endpoint(
        "POST",
        "/leases/nack",
        leases.nack_leases,
        "give records back for a later try",
        body(leases.NackLeases),
        answers=RESULTS_OUT,
        tag="leases",
    ),
    Endpoint(
        "POST",
        "/leases/extend",
        leases.extend_leases,
        "hold records for longer",
        body(leases.ExtendLeases),
        answers=RESULTS_OUT,
        tag="leases",
    ),
    Endpoint(
        "POST",
        "/leases/term",
        leases.term_leases,
        "make records dead letters now",
        body(leases.TermLeases),
        answers=RESULTS_OUT,
        tag="leases",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/purge",
        operations.purge_topic,
        "remove records below an offset or a time, settled or not",
        body(operations.Purge),
        status=202,
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/compact",
        operations.compact_topic,
        "keep the latest record of each key, now",
        status=202,
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
        operations.redrive,
        "give records back to the groups that gave them up",
        body(operations.Choice),
        status=202,
        tag="dlq",
    ),
    Endpoint(
        "POST",
        "/topics/{topic}/dlq/drop",
        operations.drop_dead,
        "close dead letters",
        body(operations.Choice),
        status=202,
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
    Endpoint("GET", "/jobs", operations.list_jobs, "work that runs, and that ended", tag="jobs"),
    Endpoint("GET", "/jobs/{job}", operations.get_job, "one job and its results", tag="jobs"),
    Endpoint("DELETE", "/jobs/{job}", operations.cancel_job, "end a job", tag="jobs"),
    Endpoint(
        "PUT",
        "/v1/stream/{topic}",
        streams.create_stream,
        "make a stream of the Durable Streams protocol",
        {"*/*": {}},
        status=201,
        answers={"*/*": {}},
        tag="streams",
        lenient=True,
    ),
    Endpoint(
        "POST",
        "/v1/stream/{topic}",
        streams.append_stream,
        "append to a stream",
        {"*/*": {}},
        status=204,
        tag="streams",
        lenient=True,
    ),
    Endpoint(
        "GET",
        "/v1/stream/{topic}",
        streams.read_stream,
        "read a stream from an offset on, or follow it",
        None,
        {
            **parameter("offset", "Stream-Next-Offset of the last answer, -1, or now"),
            **parameter("live", "long-poll or sse"),
            **parameter("cursor", "Stream-Cursor of the last answer"),
            **_TICKET,
        },
        answers={"*/*": {}},
        tag="streams",
        ticket=True,
        lenient=True,
    ),
    Endpoint(
        "DELETE",
        "/v1/stream/{topic}",
        streams.delete_stream,
        "remove a stream and its topic",
        status=204,
        tag="streams",
        lenient=True,
    ),
    Endpoint("GET", "/tokens", token_pages.list_tokens, "tokens without secrets", tag="access"),
    Endpoint(
        "POST",
        "/tokens",
        token_pages.create_token,
        "make a token; its text is in this answer alone",
        body(token_pages.NewToken),
        status=201,
        tag="access",
    ),
    Endpoint(
        "DELETE",
        "/tokens/{token}",
        token_pages.revoke_token,
        "make a token worthless",
        tag="access",
    ),
    Endpoint(
        "POST",
        "/tickets",
        token_pages.create_ticket,
        "a short-lived ticket for a browser's EventSource or WebSocket",
        body(token_pages.NewTicket),
        status=201,
        tag="access",
    ),
    Endpoint(
        "GET",
        "/definitions",
        definitions.export_definitions,
        "topics, schemas, groups and policies as one document",
        tag="broker",
    ),
    Endpoint(
        "POST",
        "/definitions",
        definitions.import_definitions,
        "make and change what a document defines; nothing is removed",
        body(definitions.Definitions),
        tag="broker",
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
