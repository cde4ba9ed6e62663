"""What a server says about its actions: its JSON schema, fetched once per episode and compared with the first one."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from envs.errors import EnvironmentFault
from envs.openenv.protocol import CALL_TOOL, SCHEMA_PATH, server_address
from envs.openenv.session import MAX_FRAME_BYTES, is_local, spread
from envs.openenv.settings import OpenEnvSettings

_first: dict[tuple[str, tuple[str, ...]], Any] = {}
"""What the servers of this process said first, by subject and addresses."""
_gone_since: dict[tuple[str, ...], float] = {}
"""When servers that cannot be reached were first found so, in `time.monotonic` seconds."""
_WHAT = "actions or observations"
POLL_S = 0.5
"""Seconds between two attempts to reach servers."""


def action_schema(settings: OpenEnvSettings, seed: int) -> Mapping[str, Any]:
    """The JSON schema of the environment's actions.

    Servers that this process has reached before may be restarting, so they are waited for, up to `capacity_timeout_s`
    per outage.

    Raises:
        EnvironmentFault: no server answers, it is not an OpenEnv server, or its schemas have changed.
    """
    while True:
        lost: EnvironmentFault | None = None
        for url in spread(settings.urls, seed):
            try:
                schemas = _fetch(url, settings)
            except EnvironmentFault as error:
                lost = error
                continue
            _gone_since.pop(settings.urls, None)
            check_unchanged(_WHAT, schemas, settings, url)
            return schemas["action"]
        since = _gone_since.setdefault(settings.urls, time.monotonic())
        known = first_seen(_WHAT, settings) is not None
        if not known or time.monotonic() >= since + settings.capacity_timeout_s:
            raise lost or EnvironmentFault("env.url is empty")
        time.sleep(POLL_S)


def first_seen(what: str, settings: OpenEnvSettings) -> Any:
    """What the servers said first; None if they were not asked yet."""
    return _first.get((what, settings.urls))


def check_unchanged(what: str, value: Any, settings: OpenEnvSettings, url: str) -> None:
    """Compare with what the servers said first.

    Raises:
        EnvironmentFault: it differs.
    """
    if _first.setdefault((what, settings.urls), value) != value:
        raise EnvironmentFault(
            f"the {what} of {url} are not those that this run began with; if this is meant, restart the run"
        )


def is_mcp(schema: Mapping[str, Any]) -> bool:
    """Whether the actions are calls of tools."""
    fields = fields_of(schema)
    return not fields or (fields.get("type", {}).get("const") == CALL_TOOL and "tool_name" in fields)


def fields_of(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The action's fields with their schemas, references resolved, without `metadata`."""
    definitions = schema.get("$defs", {})
    fields = {}
    for name, part in schema.get("properties", {}).items():
        reference = part.get("$ref") or next((p["$ref"] for p in part.get("allOf", ()) if "$ref" in p), "")
        fields[name] = {**definitions.get(reference.rpartition("/")[2], {}), **part}
    fields.pop("metadata", None)
    return fields


def _fetch(url: str, settings: OpenEnvSettings) -> dict[str, Any]:
    handlers = [urllib.request.ProxyHandler({})] if is_local(url) else []
    request = urllib.request.Request(server_address(url)[0] + SCHEMA_PATH, headers=settings.headers)
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=settings.connect_timeout_s) as reply:
            found = json.loads(reply.read(MAX_FRAME_BYTES))
        action, observation = found["action"], found["observation"]
        if not isinstance(action, Mapping) or not isinstance(action.get("properties", {}), Mapping):
            raise TypeError("its action schema is not a mapping")
        return {"action": action, "observation": observation}
    except urllib.error.HTTPError as error:
        raise EnvironmentFault(
            f"{url} is not an OpenEnv server: its {SCHEMA_PATH} answers HTTP {error.code}; correct env.url"
        ) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EnvironmentFault(f"no server answers at {url} ({reason}); start it, or correct env.url") from error
    except http.client.HTTPException as error:
        raise EnvironmentFault(f"{url} is not an OpenEnv server: it does not speak HTTP; correct env.url") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnvironmentFault(f"{url} is not an OpenEnv server: its {SCHEMA_PATH} has no schemas ({error})") from error
