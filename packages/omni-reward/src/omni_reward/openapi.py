"""The OpenAPI document of the server: what docs/reward-protocol.md says, for machines."""

from importlib.metadata import version
from typing import Any

from omni_reward.media import MEDIA_KINDS
from omni_reward.wire import MAX_ID_CHARS, PROTOCOL

Json = dict[str, Any]

ERRORS = {  # status -> what it says
    400: "the body breaks a rule of the protocol; the message names it",
    401: "the token is missing or wrong",
    408: "the body took too long to arrive",
    409: "the request id is that of an earlier request with another body",
    413: "the body is longer than the server accepts",
    415: "Content-Type is not application/octet-stream, or Content-Encoding is set",
    500: "the scorer failed",
    503: "too much is waiting already; Retry-After says when to come back",
}
BODY = (
    "A safetensors blob: a tensor per kind of media, and in its metadata the key `request` with a JSON object of "
    "`protocol`, `request_id`, `ids`, `prompts` and `meta`."
)


def document(*, has_token: bool) -> Json:
    """The document of a server with or without a token."""
    paths = {
        "/healthz": {"get": _operation("Whether the server answers", "Health")},
        "/info": {"get": _operation("What the server accepts", "Info", 401, guarded=has_token)},
        "/openapi.json": {"get": _operation("This document", "Document")},
        "/score": {"post": _operation("Scores of the samples in the body", "Reply", *ERRORS, guarded=has_token)},
    }
    paths["/score"]["post"]["requestBody"] = {
        "required": True,
        "description": BODY,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
    components: Json = {"schemas": _schemas()}
    if has_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    info = {"title": "omni-reward", "version": version("omni-reward"), "description": "docs/reward-protocol.md"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(summary: str, schema: str, *errors: int, guarded: bool = False) -> Json:
    responses = {"200": {"description": summary, "content": _json(schema)}}
    for status in errors:
        if status != 401 or guarded:
            responses[str(status)] = {"description": ERRORS[status], "content": _json("Error")}
    return {"summary": summary, "responses": responses} | ({"security": [{"token": []}]} if guarded else {})


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(properties: Json, *optional: str) -> Json:
    """Schema of an object that holds these properties and may hold others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def _schemas() -> Json:
    text, whole = {"type": "string"}, {"type": "integer", "minimum": 0}
    number = {"type": "number"}
    limits = ("max_body_bytes", "max_batch", "max_waiting", "max_waiting_bytes", "receive_timeout_s")
    result = {
        "id": text,
        "score": {"type": ["number", "null"]},
        "abstained": text,
        "parts": {"type": "object", "additionalProperties": number},
        "details": {"type": "object"},
    }
    info = {
        "protocol": {"const": PROTOCOL},
        "scorer": text,
        "scorer_version": text,
        "version": text,
        "media": {"type": "array", "items": {"enum": sorted(MEDIA_KINDS)}},
        "batch_size": {"type": ["integer", "null"], "minimum": 1},
        "limits": _object({name: number if name.endswith("_s") else whole for name in limits}),
    }
    reply = {
        "protocol": {"const": PROTOCOL},
        "request_id": {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS},
        "scorer": text,
        "results": {"type": "array", "minItems": 1, "items": _object(result, "abstained")},
    }
    return {
        "Document": {"type": "object"},
        "Error": _object({"error": _object({"code": text, "message": text})}),
        "Health": _object({"status": {"const": "ok"}}),
        "Info": _object(info),
        "Reply": _object(reply),
    }
