"""Text out of transcripts: any JSON value in, clean text out. Pure, and linear in the length of the input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from .base import ReadReport

_SURROGATES = re.compile("[\ud800-\udfff\0]")
# An image inside a text, as a data URL, or bare: no language has runs of 1024 letters and digits. The look-behind keeps the
# search linear: a run is looked at from its start only.
_DATA_URL = re.compile(r"data:[-\w.+]{1,64}/[-\w.+]{1,64}(?:;[-\w.=+]{1,64}){0,4};base64,[A-Za-z0-9+/=_-]*")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/\\])[A-Za-z0-9+/]{1024,}={0,2}")
_MAX_NESTING = 8  # of content in content; agents use 2
_MAX_BLOCKS = 10_000  # of one message


def clean(text: str, limit: int, report: ReadReport, without_binary: str = "") -> str:
    """The text without inline images (replaced by `without_binary`), encodable as UTF-8, at most `limit` bytes of it."""
    if len(text) > 4 * limit + 4096:  # what is cut anyway need not be searched
        text = text[: 4 * limit + 4096]
    if "base64," in text:
        text, n = _DATA_URL.subn(without_binary, text)
        report.skip("inline images", n) if n else None
    if len(text) >= 1024:
        text, n = _BASE64.subn(without_binary, text)
        report.skip("inline images", n) if n else None
    text = _SURROGATES.sub("\ufffd", text)
    if len(text) * 4 > limit:
        data = text.encode()
        if len(data) > limit:
            report.skip("texts that were cut")
            text = data[:limit].decode("utf-8", "ignore")
    return text


def string(value: Any) -> str:
    """A short name or id that must be text; "" for anything else."""
    return _SURROGATES.sub("\ufffd", value[:256]) if isinstance(value, str) else ""


def arguments(value: Any, limit: int, report: ReadReport) -> str:
    """What a tool was called with, as the text of a JSON object: a string that is one stays as it was sent, anything else
    becomes {"input": value}. "{}" when that is impossible or too long to be whole, since half of it would be no JSON."""
    if isinstance(value, str):
        try:
            sent = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            sent = None
        if isinstance(sent, dict):
            cleaned = clean(value, 16 * limit, report, without_binary="0")
            return _whole(cleaned, limit, report)
    if not isinstance(value, dict):
        value = {} if value is None else {"input": value}
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        report.skip("arguments that are not JSON")
        return "{}"
    return _whole(clean(text, 16 * limit, report, without_binary="0"), limit, report)


def _whole(text: str, limit: int, report: ReadReport) -> str:
    if len(text) * 4 > limit and len(text.encode()) > limit:
        report.skip("arguments that are too long")
        return "{}"
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def block_texts(content: Any, report: ReadReport, text_keys: Iterable[str] = ("text",)) -> list[str]:
    """Every text of a message's content: a string, a block, or a list of those, one in another. No recursion.

    Blocks of binary data are counted as images, blocks without any text as unknown.
    """
    texts: list[str] = []
    stack: list[tuple[Any, int]] = [(content, 0)]
    n_left = _MAX_BLOCKS
    while stack:
        value, depth = stack.pop()
        n_left -= 1
        if n_left < 0 or depth > _MAX_NESTING:
            report.skip("blocks that are nested too deeply")
            if n_left < 0:
                break
            continue
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in reversed(value[: n_left + 1])]
        elif isinstance(value, dict):
            found = [value[key] for key in text_keys if isinstance(value.get(key), str)]
            source = value.get("source")
            if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
                found.append(source["data"])  # a document that is text
            if found:
                texts += found
            elif is_image(value):
                report.skip("images")
            elif isinstance(value.get("content"), (list, str, dict)):
                stack.append((value["content"], depth + 1))
            else:
                report.skip("blocks of unknown kinds")
        elif value is not None:
            report.skip("blocks of unknown kinds")
    return texts


def is_image(block: dict[str, Any]) -> bool:
    """Whether a block is an image, audio, a PDF or the like."""
    kind = block.get("type")
    if isinstance(kind, str) and kind in ("image", "input_image", "image_url", "input_audio", "audio", "input_file", "local_image"):
        return True
    source = block.get("source")
    return isinstance(source, dict) and source.get("type") != "text"


def without_blocks(text: str, tags: Iterable[str], report: ReadReport) -> str:
    """The text without <tag>...</tag> for each of the tags; an opening tag that is never closed stays as it is."""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        kept: list[str] = []
        at = 0
        while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
            kept.append(text[at:start])
            at = end + len(closing)
            report.skip("inserted texts")
        if kept:
            text = "".join(kept) + text[at:]
    return text
