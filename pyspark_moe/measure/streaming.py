"""The timed part of a streamed completion, for every client that measures: one request, one answer, as few reads as possible."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

_LOOK_EVERY_S = 0.002  # a read for every token would take processor time from the server


def stream_completion(
    connection: socket.socket, request: dict[str, Any], receive: Callable[[socket.socket, bytearray], None], watch: Callable[[], None] | None, every: int
) -> tuple[bytearray, float, float]:
    """(all that came, seconds to the first event, seconds in all) of a POST to /completion. receive: adds to what came, and raises
    where nothing more comes. watch: called after the first event and, unless `every` is 0, after about `every` more, and so on."""
    body = json.dumps(request).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    received = bytearray()
    begin = time.perf_counter()
    connection.sendall(head.encode() + body)
    while b"data: " not in received:
        receive(connection, received)
    first = time.perf_counter() - begin
    if watch:
        watch()
    next_event = 1 + every
    while not received.endswith(b"0\r\n\r\n"):
        time.sleep(_LOOK_EVERY_S)
        receive(connection, received)
        if watch and every and received.count(b"data: ") >= next_event:
            watch()
            next_event = received.count(b"data: ") + every
    return received, first, time.perf_counter() - begin


def events_of(received: bytearray) -> list[dict[str, Any]]:
    """The JSON of every event."""
    return [json.loads(event) for event in re.findall(rb"data: (\{[^\n]*\})", received)]
