"""Prompts from a corpus, as the model's chat template renders what came before an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from ..errors import EngineError, MeasurementError
from ..history import Conversation, Message
from ..history.corpus import message_object
from .server import MeasuredServer

Prompt = tuple[int, ...]
_BYTES_PER_TOKEN = 8  # from above, so that what is cut here would not have been in the prompt


def messages_before_an_answer(conversation: Conversation, most_bytes: int) -> list[Message]:
    """The messages that an assistant's message follows, which one by a hash of the conversation's name; all of them in a
    conversation without any. From the front only so many are left out that at most most_bytes or one message remain, and
    then others up to one by the user, which templates want first. Pure."""
    messages = list(conversation.messages)
    answers = [i for i, message in enumerate(messages) if message.role == "assistant" and i > 0]
    if answers:
        name = f"{conversation.session.source} {conversation.session.session} {conversation.thread}".encode("utf-8", "replace")
        messages = messages[: answers[int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % len(answers)]]
    first, n_bytes = len(messages) - 1, messages[-1].n_bytes
    while first > 0 and n_bytes + messages[first - 1].n_bytes <= most_bytes:
        first -= 1
        n_bytes += messages[first].n_bytes
    start = next((i for i in range(first, len(messages)) if messages[i].role == "user"), first)
    return messages[start:]


def make_prompts(conversations: Iterable[Conversation], server: MeasuredServer, n: int, n_tokens: int) -> list[Prompt]:
    """Token ids of n prompts, one of each conversation and in their order, fewer when there are fewer; of each the last
    n_tokens. Where the template refuses the messages they are read as plain text. Raises MeasurementError when there is
    none, EngineError, StalledError."""
    prompts: list[Prompt] = []
    for conversation in conversations:
        if len(prompts) == n:
            break
        messages = messages_before_an_answer(conversation, n_tokens * _BYTES_PER_TOKEN)
        status, value = server.ask("POST", "/apply-template", {"messages": [message_object(message) for message in messages]})
        text = value["prompt"] if status == 200 else "\n\n".join(message.text for message in messages)
        tokens = _tokenize(server, text)
        if tokens:
            prompts.append(tuple(tokens[-n_tokens:]))
    if not prompts:
        raise MeasurementError("There are no prompts: the corpus has no conversation with text.")
    return prompts


def _tokenize(server: MeasuredServer, text: str) -> list[int]:
    body: dict[str, Any] = {"content": text, "add_special": True, "parse_special": True}
    status, value = server.ask("POST", "/tokenize", body)
    if status != 200 or not isinstance(value, dict):
        raise EngineError(f"The server '{server.name}' could not tokenize a prompt: {value!r}.")
    return list(value["tokens"])
