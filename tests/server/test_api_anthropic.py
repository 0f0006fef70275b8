"""Anthropic's API through Anthropic's own client."""
from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from harness import Server

MESSAGES = [{"role": "user", "content": "Say something."}]
# newer clients have no argument for the temperature, but the API does
REQUEST = {"model": "demo", "max_tokens": 12, "messages": MESSAGES, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(api: Server, api_key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key=api_key, max_retries=0) as made:
        yield made


def test_messages(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**REQUEST, system="You are brief.")
    assert answer.role == "assistant" and answer.content[0].type == "text" and answer.content[0].text
    assert answer.usage.input_tokens > 3 and 0 < answer.usage.output_tokens <= 12


def test_streaming_gives_the_same_text(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**REQUEST).content[0].text
    with client.messages.stream(**REQUEST) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(parts) > 2 and "".join(parts) == whole == final.content[0].text


def test_tool_use(tools_api: Server, api_key: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": schema}]
    with anthropic.Anthropic(base_url=tools_api.url, api_key=api_key, max_retries=0) as client:
        answer = client.messages.create(**REQUEST | {"max_tokens": 64}, tools=tools, tool_choice={"type": "any"})
    used = [block for block in answer.content if block.type == "tool_use"]
    # llama-server lets this API call tools in parallel whatever the request says, and the biased model never has enough
    assert used[0].name == "get_weather" and used[0].input["city"] in ("Paris", "Rome")


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES)
    usage = client.messages.create(**REQUEST).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_wrong_key_is_refused(api: Server) -> None:
    with anthropic.Anthropic(base_url=api.url, api_key="wrong", max_retries=0) as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**REQUEST)
