"""Which sessions are read first: the newest, and of as many projects as there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .base import SessionFile


def sample_sessions(files: Iterable[SessionFile]) -> Iterator[SessionFile]:
    """Every file once: the newest of each (source, project), then the second newest of each, and so on. Within a round the
    project that was worked on last comes first. The order depends on the files only, not on the order they come in."""
    groups: dict[tuple[str, str], list[SessionFile]] = {}
    for file in files:
        groups.setdefault((file.source, file.project), []).append(file)
    for group in groups.values():
        group.sort(key=lambda file: (-file.modified, str(file.path)))
    rounds = sorted(groups.items(), key=lambda item: (-item[1][0].modified, item[0]))
    for turn in range(max((len(group) for group in groups.values()), default=0)):
        for _, group in rounds:
            if turn < len(group):
                yield group[turn]
