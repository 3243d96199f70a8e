"""What people do with the litellm package; run by its own Python: FILE BASE_URL MODEL."""

import asyncio
import json
import sys
import traceback

import litellm

ASK = [{"role": "user", "content": "Tell me a short story about a fox."}]
SHORT = {"max_tokens": 12, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


def chat(where):
    answer = litellm.completion(messages=ASK, **SHORT, **where)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12


def chat_stream(where):
    stream = litellm.completion(
        messages=ASK, stream=True, stream_options={"include_usage": True}, **SHORT, **where
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == litellm.completion(messages=ASK, **SHORT, **where).choices[0].message.content


def text(where):
    where = {**where, "model": where["model"].replace("openai/", "text-completion-openai/")}
    answer = litellm.text_completion(prompt="The fox", **SHORT, **where)
    assert answer.choices[0].text


def structured(where):
    schema = {
        "type": "object",
        "properties": {"legs": {"type": "integer"}},
        "required": ["legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = litellm.completion(messages=ASK, response_format=form, max_tokens=200, **where)
    if answer.choices[0].finish_reason == "stop":
        assert set(json.loads(answer.choices[0].message.content)) == {"legs"}


def tools(where):
    answer = litellm.completion(
        messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200, **where
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "add"


def unknown_model(where):
    try:
        litellm.completion(messages=ASK, **{**where, "model": "openai/no-such-model"})
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was accepted")


def asynchronous(where):
    async def ask():
        return await asyncio.gather(
            *(litellm.acompletion(messages=ASK, **SHORT, **where) for _ in range(4))
        )

    assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))


def main():
    base_url, model = sys.argv[1:]
    where = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "num_retries": 0}
    failed = 0
    for feature in (chat, chat_stream, text, structured, tools, unknown_model, asynchronous):
        try:
            feature(where)
        except Exception as error:
            failed += 1
            frame = traceback.extract_tb(error.__traceback__)[1]
            print(f"{feature.__name__}: FAILED at line {frame.lineno}: {error!r}"[:600])
        else:
            print(f"{feature.__name__}: works")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
