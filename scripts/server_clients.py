"""Tests a running server with real clients; run by `scripts/server_clients.sh`, which installs them and starts the servers.

Arguments: the URL of a server with the demo pair, and of one whose model calls tools (scripts/tiny_caller.py)."""

import json
import sys
import typing

import anthropic
import litellm
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PROMPT = "impl Iterator for Counter {\n"
MESSAGES = [{"role": "user", "content": PROMPT}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
done = []


class Size(pydantic.BaseModel):
    width: typing.Annotated[int, pydantic.Field(ge=0, le=99)]
    unit: typing.Literal["mm", "cm"]


def shows(test):
    test()
    done.append(test.__name__)
    print(f"passed: {test.__name__}", flush=True)


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def with_openai_chats(url):
    """Returns the text that greedy chats and completions have."""
    client = openai_client(url)
    model = client.models.list().data[0].id
    create = client.chat.completions.create
    want = create(model=model, messages=MESSAGES, max_tokens=48, temperature=0).choices[0]
    assert want.finish_reason == "length" and want.message.content

    @shows
    def openai_chat_streamed_is_the_whole():
        stream = create(
            model=model, messages=MESSAGES, max_tokens=48, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert text_of(chunks) == want.message.content
        assert chunks[-1].usage.completion_tokens == 48

    @shows
    def openai_logprobs():
        chat = create(model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3)
        content = chat.choices[0].logprobs.content
        assert len(content) == 8 and all(len(token.top_logprobs) == 3 for token in content)
        assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in content)

    @shows
    def openai_choices_stop_seed_and_bias():
        several = create(model=model, messages=MESSAGES, max_tokens=24, temperature=0.9, seed=5, n=3)
        again = create(model=model, messages=MESSAGES, max_tokens=24, temperature=0.9, seed=5, n=3)
        assert len({choice.index for choice in several.choices}) == 3
        off = {"speculative": {"enabled": False}}
        several, again = (
            create(model=model, messages=MESSAGES, max_tokens=24, temperature=0.9, seed=5, n=3, extra_body=off)
            for _ in range(2)
        )
        assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
        stopped = create(model=model, messages=MESSAGES, max_tokens=200, stop="\n").choices[0]
        assert stopped.finish_reason == "stop" and "\n" not in stopped.message.content
        biased = create(model=model, messages=MESSAGES, max_tokens=24, temperature=0, logit_bias={"300": -100})
        assert biased.choices[0].message.content

    return want.message.content


def with_openai_texts(url, want):
    client = openai_client(url)
    model = client.models.list().data[0].id
    create = client.chat.completions.create

    @shows
    def openai_completions():
        completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=48, temperature=0, logprobs=2)
        assert completion.choices[0].text == want
        assert len(completion.choices[0].logprobs.tokens) == 48

    @shows
    def openai_responses():
        response = client.responses.create(model=model, input=PROMPT, max_output_tokens=48, temperature=0)
        assert response.output_text == want and response.status == "incomplete"
        with client.responses.stream(model=model, input=PROMPT, max_output_tokens=48, temperature=0) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == want

    @shows
    def openai_errors():
        for call, kind in [
            (lambda: create(model="gpt-4o", messages=MESSAGES), openai.NotFoundError),
            (lambda: create(model=model, messages=MESSAGES, tool_choice="required"), openai.BadRequestError),
            (lambda: create(model=model, messages=MESSAGES, temperature=-1), openai.BadRequestError),
        ]:
            try:
                call()
            except kind as error:
                assert error.body["message"]
            else:
                raise AssertionError(kind)

    @shows
    def openai_json_schema():
        parse = client.chat.completions.parse
        size = parse(model=model, messages=MESSAGES, max_tokens=300, response_format=Size).choices[0].message.parsed
        assert size.unit in ("mm", "cm")
        size = client.responses.parse(model=model, input=PROMPT, max_output_tokens=300, text_format=Size).output_parsed
        assert size.unit in ("mm", "cm")


def with_openai_calls(url):
    caller = openai_client(url)

    @shows
    def openai_tools():
        tools = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}]
        messages = [{"role": "user", "content": "Umbrella?"}]
        chat = caller.chat.completions.create(model="caller", messages=messages, tools=tools, max_tokens=50)
        (call,) = chat.choices[0].message.tool_calls
        assert chat.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Ulm"}
        with caller.chat.completions.stream(model="caller", messages=messages, tools=tools, max_tokens=50) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        messages += [
            chat.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sun"},
        ]
        answer = caller.chat.completions.create(model="caller", messages=messages, tools=tools, max_tokens=50).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("It is sunny.", "stop"), answer

    @shows
    def openai_forced_calls():
        def offered(name):
            number = {"type": "integer", "minimum": 0, "maximum": 99}
            parameters = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
            return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}

        ask = {"model": "caller", "messages": [{"role": "user", "content": "?"}], "tools": [offered("one"), offered("two")]}
        named = {"type": "function", "function": {"name": "two"}}
        for choice, names in [("required", ["one", "two"]), (named, ["two"])]:
            chat = caller.chat.completions.create(**ask, tool_choice=choice, parallel_tool_calls=False, max_tokens=100)
            (call,) = chat.choices[0].message.tool_calls
            assert call.function.name in names and 0 <= json.loads(call.function.arguments)["n"] <= 99

    @shows
    def openai_responses_call_functions():
        # Not strict: the tiny caller writes the city without quotes.
        tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}]
        response = caller.responses.create(model="caller", input="Umbrella?", tools=tools)
        (call,) = response.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Ulm"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        items = [{"role": "user", "content": "Umbrella?"}, call.model_dump(exclude_none=True), output]
        assert caller.responses.create(model="caller", input=items, tools=tools).output_text == "It is sunny."


def with_anthropic(url, caller_url, want):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    caller = anthropic.Anthropic(base_url=caller_url, api_key="none", max_retries=0)

    @shows
    def anthropic_messages():
        # The demo pair has no default sampling parameters: this is greedy.
        message = client.messages.create(model="demo", messages=MESSAGES, max_tokens=48)
        assert message.content[0].text == want and message.stop_reason == "max_tokens"
        with client.messages.stream(model="demo", messages=MESSAGES, max_tokens=48) as stream:
            assert "".join(stream.text_stream) == want
        assert client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens == message.usage.input_tokens

    @shows
    def anthropic_tools():
        tools = [{"name": "weather", "description": "The weather.", "input_schema": WEATHER}]
        messages = [{"role": "user", "content": "Umbrella?"}]
        message = caller.messages.create(model="caller", messages=messages, tools=tools, max_tokens=50)
        (call,) = message.content
        assert (message.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Ulm"})
        with caller.messages.stream(model="caller", messages=messages, tools=tools, max_tokens=50) as stream:
            assert stream.get_final_message().content[0].input == {"city": "Ulm"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        answer = caller.messages.create(model="caller", messages=messages, tools=tools, max_tokens=50)
        assert answer.content[0].text == "It is sunny."


def with_litellm(url, want):
    @shows
    def litellm_chat():
        arguments = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 48, "temperature": 0}
        whole = litellm.completion(model="openai/demo", messages=MESSAGES, **arguments)
        assert whole.choices[0].message.content == want
        stream = litellm.completion(model="openai/demo", messages=MESSAGES, stream=True, **arguments)
        assert text_of(stream) == want


def with_pydantic_ai(caller_url):
    @shows
    def pydantic_ai_agent_calls_its_tool():
        provider = OpenAIProvider(base_url=f"{caller_url}/v1", api_key="none")
        agent = pydantic_ai.Agent(OpenAIChatModel("caller", provider=provider), instructions="Be brief.")
        cities = []

        @agent.tool_plain(strict=False)
        def weather(city: str) -> str:
            """The weather."""
            cities.append(city)
            return "sun"

        assert (agent.run_sync("Umbrella?").output, cities) == ("It is sunny.", ["Ulm"])

    @shows
    def pydantic_ai_output_is_of_its_type():
        # The default: the output is the arguments of a required tool call.
        provider = OpenAIProvider(base_url=f"{caller_url}/v1", api_key="none")
        agent = pydantic_ai.Agent(OpenAIChatModel("caller", provider=provider), output_type=Size)
        size = agent.run_sync("How large?").output
        assert 0 <= size.width <= 99 and size.unit in ("mm", "cm")


if __name__ == "__main__":
    demo, caller = sys.argv[1:]
    text = with_openai_chats(demo)
    with_openai_texts(demo, text)
    with_openai_calls(caller)
    with_anthropic(demo, caller, text)
    with_litellm(demo, text)
    with_pydantic_ai(caller)
    print(f"passed: {len(done)} tests")
