"""The OpenAPI description of the routes, and a page of it that needs nothing from elsewhere."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

from deployments.field_kinds import Strict
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """One route as the description tells it."""

    method: str
    path: str
    summary: str
    body: type[Strict] | None = None
    streams: bool = False
    open: bool = False
    """Answered without an API key."""


ROUTES = (
    Route("post", "/v1/chat/completions", "An answer to a chat", ChatRequest, streams=True),
    Route("post", "/v1/completions", "A text going on", CompletionRequest, streams=True),
    Route("post", "/tokenize", "Token ids of a text or a chat", TokenizeRequest),
    Route("post", "/detokenize", "The text of token ids", DetokenizeRequest),
    Route("get", "/v1/models", "The models served"),
    Route("get", "/v1/models/{name}", "One model"),
    Route("get", "/health", "Whether the gateway lives", open=True),
    Route("get", "/ready", "Whether the model can answer; 503 while it cannot", open=True),
    Route("get", "/metrics", "Counters and gauges in Prometheus' text format"),
    Route("get", "/openapi.json", "This description"),
    Route("get", "/docs", "This description as a page"),
)

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(version: str) -> Json:
    """The OpenAPI 3.1 document; `version` is that of the service."""
    schemas: Json = {"Error": _ERROR}
    paths: Json = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Coterie", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: Json) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if route.path == "/docs":
        content = {"text/html": {"schema": {"type": "string"}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}}
    responses: Json = {
        "200": {"description": "The answer", "content": content},
        "4XX": {"description": "The request is at fault; the message says how", **error},
        "503": {"description": "Not now; Retry-After says when to come back", **error},
    }
    if route.path == "/ready":
        responses["503"] = {"description": "Not ready", "content": content}
    operation: Json = {
        "summary": route.summary,
        "operationId": f"{route.method}_{route.path.strip('/').replace('/', '_').strip('{}')}",
        "responses": responses,
        "security": [{}] if route.open else [{}, {"key": []}],
    }
    if "{name}" in route.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.body is not None:
        schema = route.body.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[route.body.__name__] = schema
        ref = {"$ref": _REF.format(model=route.body.__name__)}
        content = {"application/json": {"schema": ref}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def page(document: Json) -> str:
    """The document as one HTML page: no script, no style sheet, no font from anywhere."""
    parts = [f"<h1>Coterie {html.escape(document['info']['version'])}</h1><p>{_ABOUT}</p>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = html.escape(f"{method.upper()} {path}")
            parts.append(
                f"<h2><code>{title}</code></h2><p>{html.escape(operation['summary'])}.</p>"
            )
            if "requestBody" in operation:
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_fields(document["components"]["schemas"][ref.split("/")[-1]]))
    return _PAGE.format(body="".join(parts))


def _fields(schema: Json) -> str:
    required = schema.get("required", [])
    lines = []
    for name in sorted(schema["properties"], key=lambda name: name not in required):
        field = schema["properties"][name]
        mark = " <b>required</b>" if name in required else ""
        kind = html.escape(_kind(field))
        about = html.escape(field.get("description", ""))
        lines.append(
            f"<tr><td><code>{html.escape(name)}</code>{mark}</td><td>{kind}</td><td>{about}</td></tr>"
        )
    return f"<table><tr><th>field</th><th>kind</th><th></th></tr>{''.join(lines)}</table>"


def _kind(field: Json) -> str:
    """A schema in a few words."""
    if "anyOf" in field:
        kinds = [_kind(option) for option in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        return str(field["$ref"].split("/")[-1])
    if "enum" in field or "const" in field:
        options = field.get("enum", [field.get("const")])
        return " or ".join(json.dumps(option) for option in options)
    bounds = [f"from {field['minimum']}"] if "minimum" in field else []
    if field.get("maximum", 2**62) < 2**62:
        bounds.append(f"to {field['maximum']}")
    kind = str(field.get("type", "any value"))
    if kind == "array" and "items" in field:
        kind = f"list of {_kind(field['items'])}"
    return " ".join([kind, *bounds])


_ABOUT = (
    "OpenAI's routes and the extensions that vLLM made common. A field that is not listed is "
    "refused by name; null is the same as leaving a field out."
)
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Coterie</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;vertical-align:top;
padding:.3rem .6rem;border-bottom:1px solid #ddd}}b{{font-size:.8em}}
@media(prefers-color-scheme:dark){{body{{background:#161616;color:#ddd}}}}</style>{body}</html>"""
