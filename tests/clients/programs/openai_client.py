"""What people do with the openai package; run by its own Python: FILE BASE_URL MODEL.

Each feature is a function; what the server refuses or answers wrongly fails with its name.
"""

import asyncio
import json
import sys
import traceback

import openai
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Tell me a short story about a fox."}]
SHORT = {"max_tokens": 12, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Animal(BaseModel):
    name: str
    legs: int


def models(client, model):
    assert model in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(model).id == model


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=ASK, **SHORT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def chat_stream(client, model):
    usage = {"include_usage": True}
    stream = client.chat.completions.create(
        model=model, messages=ASK, stream=True, stream_options=usage, **SHORT
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(model=model, messages=ASK, **SHORT)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


def chat_conversation(client, model):
    turns = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And now?"},
    ]
    answer = client.chat.completions.create(
        model=model,
        messages=turns,
        max_completion_tokens=8,
        n=2,
        stop=["\n\n"],
        seed=7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=True,
        top_logprobs=2,
        user="someone",
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs.content


def completions(client, model):
    answer = client.completions.create(
        model=model, prompt=["Once upon a time,", "The fox"], logprobs=1, **SHORT
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 12


def completions_stream(client, model):
    parts = client.completions.create(model=model, prompt="The fox", stream=True, **SHORT)
    text = "".join(part.choices[0].text for part in parts)
    assert text == client.completions.create(model=model, prompt="The fox", **SHORT).choices[0].text


def json_object(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, response_format={"type": "json_object"}, max_tokens=200
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def json_schema(client, model):
    # The package makes the schema from a class and reads the answer back into it.
    try:
        answer = client.chat.completions.parse(
            model=model, messages=ASK, response_format=Animal, max_tokens=400, temperature=0
        )
    except openai.LengthFinishReasonError:
        return
    assert isinstance(answer.choices[0].message.parsed, Animal)


def tools_required(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def tools_round_trip(client, model):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = client.chat.completions.create(
        model=model, messages=turns, tools=[WEATHER], tool_choice="auto", **SHORT
    )
    assert answer.choices[0].message.role == "assistant"


def tools_stream(client, model):
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[WEATHER],
        tool_choice=named,
        stream=True,
        max_tokens=200,
        temperature=0,
    )
    arguments = ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            arguments += call.function.arguments or ""
    assert set(json.loads(arguments)) == {"city"}


def errors(client, model):
    try:
        client.chat.completions.create(model="no-such-model", messages=ASK)
    except openai.NotFoundError as error:
        assert "no-such-model" in error.message
    else:
        raise AssertionError("an unknown model was accepted")


def asynchronous(client, model):
    async def ask():
        other = openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)
        async with other:
            several = [
                other.chat.completions.create(model=model, messages=ASK, **SHORT) for _ in range(4)
            ]
            return await asyncio.gather(*several)

    texts = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert all(texts)


FEATURES = [
    models,
    chat,
    chat_stream,
    chat_conversation,
    completions,
    completions_stream,
    json_object,
    json_schema,
    tools_required,
    tools_round_trip,
    tools_stream,
    errors,
    asynchronous,
]


def main():
    base_url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    failed = 0
    for feature in FEATURES:
        try:
            feature(client, model)
        except Exception as error:
            failed += 1
            frame = traceback.extract_tb(error.__traceback__)[1]
            print(f"{feature.__name__}: FAILED at line {frame.lineno}: {error!r}"[:600])
        else:
            print(f"{feature.__name__}: works")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
