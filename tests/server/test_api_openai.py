"""OpenAI's API through OpenAI's own client, with a part of the experts fast."""
from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from harness import Server

MODEL = "demo"
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture
def client(api: Server, api_key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=api_key, max_retries=0) as made:
        yield made


def test_wrong_key_is_refused(api: Server) -> None:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.prompt_tokens > 5 and 0 < answer.usage.completion_tokens <= 12


def test_chat_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0).choices[0].message.content
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, stream=True))
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert len([p for p in parts if p]) > 2 and "".join(parts) == whole


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):\n", max_tokens=8, temperature=0, logprobs=2)
    assert answer.choices[0].text and answer.choices[0].finish_reason in ("length", "stop")
    assert answer.choices[0].logprobs is not None


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=8, temperature=0)
    assert answer.status in ("completed", "incomplete") and answer.output_text
    events = list(client.responses.create(model=MODEL, input="Say something.", max_output_tokens=8, temperature=0, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type == "response.completed"


def test_tool_call(tools_api: Server, api_key: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": parameters}}]
    with openai.OpenAI(base_url=f"{tools_api.url}/v1", api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=256, temperature=0
        )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls and len(calls) == 1
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"type": "string", "enum": ["red", "green"]}, "ok": {"type": "boolean"}},
        "required": ["color", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=wanted, max_tokens=64, temperature=0)
    thing = json.loads(answer.choices[0].message.content or "")
    assert set(thing) == {"color", "ok"} and thing["color"] in ("red", "green") and isinstance(thing["ok"], bool)


def test_models(client: openai.OpenAI) -> None:
    assert "target" in client.models.list().data[0].id
