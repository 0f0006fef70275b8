"""Messages that were read before: a resumed or forked session begins with a copy of the older one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

from .base import Message


class Repeated:
    """Remembers every message it has seen: 8 bytes of a hash for its name and for each pair of neighbours (about 200 bytes
    of memory a message).

    A message is a copy when it has the name (Claude Code's uuid, the id of a tool call) of an older one, or when it follows
    the same message as one of an older session that says the same. So "yes" is not a copy of every other "yes", and a copied
    part of a session is noticed wherever it was cut off. Of a session's first message nothing is known but the text: without
    a name it is a copy when the second one is too.
    """

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self._pairs: set[bytes] = set()

    def tell(self, messages: Iterable[Message], source: str) -> Iterator[tuple[Message, bool]]:
        """The messages of one session in their order, each with whether it is new. Asks for at most one ahead. `source`
        separates the names that different agents give."""
        first: Message | None = None
        before: bytes | None = None
        pairs: set[bytes] = set()  # of this session: what is said twice in it is no copy
        try:
            for message in messages:
                own = message.digest()
                pair = _mark((before or b"first") + own)
                name = _mark(f"{source} {message.key}".encode()) if message.key else None
                known = name in self._names
                copied = known or pair in self._pairs
                if name is not None:
                    self._names.add(name)
                pairs.add(pair)
                if before is None and copied and not known:
                    first = message
                else:
                    if first is not None:
                        yield first, not copied
                        first = None
                    yield message, not copied
                before = own
            if first is not None:
                yield first, True
        finally:
            self._pairs |= pairs


def _mark(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
