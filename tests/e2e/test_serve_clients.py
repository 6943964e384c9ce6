# SPDX-License-Identifier: MIT
"""inferd serve with the clients people use: the openai and anthropic packages, curl."""
import asyncio
import json
import shutil
import signal
import subprocess

import pytest
from conftest import INFERD, SLOW
from serving import Server

KEY = "sk-test"
MODEL = "Story MoE 15M"
ASK = [{"role": "user", "content": "Tell me a story."}]


def need(package):
    return pytest.importorskip(package, reason=f"the Python package '{package}' is not installed (PyPI out of reach?)")


def start(world, tmp_path, *options):
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    world.expertd(*options)
    return Server(world, "--api-key-file", keys, "--temperature", "0")


@pytest.fixture
def server(world, tmp_path):
    return start(world, tmp_path)


@pytest.fixture
def slow_server(world, tmp_path):
    """A long answer takes most of a minute: there is time to do something in its middle."""
    return start(world, tmp_path, "--link-gbps", "0.05")


def openai_client(server, **kw):
    openai = need("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key=kw.pop("key", KEY), timeout=60 * SLOW, max_retries=0, **kw)


def anthropic_client(server, **kw):
    anthropic = need("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key=kw.pop("key", KEY), timeout=60 * SLOW, max_retries=0, **kw)


def test_openai(server):
    openai = need("openai")
    client = openai_client(server)
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    chat = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=20, logprobs=True,
                                          top_logprobs=2)
    choice = chat.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    assert chat.usage.completion_tokens == 20 and chat.usage.prompt_tokens > 5
    text, usage = "", None
    for event in client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, stream=True,
                                                stream_options={"include_usage": True}):
        if event.choices:
            text += event.choices[0].delta.content or ""
        usage = event.usage or usage
    assert text == choice.message.content
    assert usage.completion_tokens == 20 and usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, extra_body={"top_k": 1})
    streamed = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, stream=True)
    assert "".join(e.choices[0].text for e in streamed if e.choices) == done.choices[0].text != ""
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=200, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {
            "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
            "additionalProperties": False}}})
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert e.value.param == "n"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 4000}])
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.AuthenticationError):
        openai_client(server, key="sk-wrong").models.list()


def test_openai_leaves_in_the_middle(slow_server):
    server = slow_server
    client = openai_client(server)
    events = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, extra_body={"ignore_eos": True})
    next(iter(events))
    events.close()
    headers = {"X-Api-Key": KEY}
    status = server.world.until(lambda: not (t := server.get("/v1/status", headers=headers)[2])["running"] and t,
                                what="the work stops")
    assert status["queue"]["cancelled"] == 1


@pytest.mark.slow
def test_64_openai_clients_at_once(server):
    openai = need("openai")

    async def ask(client, i):
        if i % 2:
            r = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8)
            return r.choices[0].message.content
        text = ""
        async for e in await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True):
            text += e.choices[0].delta.content or ""
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, timeout=120 * SLOW,
                                      max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(64)))
    answers = asyncio.run(all_of_them())
    assert len(set(answers)) == 1 and answers[0]


def test_openai_stream_that_fails(world):
    openai = need("openai")
    d = world.expertd("--link-gbps", "0.05")
    server = Server(world, "--resume-seconds", "1")
    events = openai_client(server).chat.completions.create(model=MODEL, messages=ASK, stream=True,
                                                           extra_body={"ignore_eos": True})
    next(iter(events))
    d.kill()
    with pytest.raises(openai.APIError, match="expertd"):
        for _ in events:
            pass
    with pytest.raises(openai.InternalServerError) as e:
        openai_client(server).chat.completions.create(model=MODEL, messages=ASK)
    assert e.value.status_code == 503


def test_anthropic(server):
    anthropic = need("anthropic")
    client = anthropic_client(server)
    message = client.messages.create(model=MODEL, max_tokens=20, messages=ASK)
    assert message.role == "assistant" and message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 20 and message.content[0].type == "text"
    text = message.content[0].text
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK) as events:
        assert "".join(events.text_stream) == text
        final = events.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 20
    total = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == total
    word = text.split()[3]
    stopped = client.messages.create(model=MODEL, max_tokens=20, messages=ASK, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text[:text.index(word)]
    talk = client.messages.create(model=MODEL, max_tokens=5, system="You tell stories.", messages=[
        *ASK, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}, {"role": "user", "content": "Do!"}])
    assert talk.usage.output_tokens <= 5
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(model=MODEL, max_tokens=5, messages=ASK,
                               tools=[{"name": "f", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        client.messages.create(model=MODEL, max_tokens=2000, messages=ASK,
                               thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-9", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client(server, key="wrong").messages.create(model=MODEL, max_tokens=5, messages=ASK)


def test_anthropic_stream_that_fails(world):
    anthropic = need("anthropic")
    d = world.expertd("--link-gbps", "0.05")
    server = Server(world, "--resume-seconds", "1")
    with pytest.raises(anthropic.APIError, match="expertd"):
        with anthropic_client(server).messages.stream(model=MODEL, max_tokens=2000, messages=[
                {"role": "user", "content": "Tell me a long story."}]) as events:
            for i, _ in enumerate(events.text_stream):
                if i == 0:
                    d.kill()


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
def test_curl(server):
    def curl(*argv):
        return subprocess.run(["curl", "-sS", "-m", str(60 * SLOW), *argv], capture_output=True, text=True)
    key = ["-H", f"Authorization: Bearer {KEY}"]
    body = json.dumps({"messages": ASK, "max_tokens": 5})
    whole = curl(*key, server.url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    assert json.loads(whole.stdout)["usage"]["completion_tokens"] == 5
    streamed = curl("-N", *key, server.url + "/v1/chat/completions", "-d", json.dumps({**json.loads(body), "stream": True}))
    assert streamed.stdout.endswith("data: [DONE]\n\n") and streamed.stdout.startswith("data: {")
    assert json.loads(curl(server.url + "/v1/models").stdout)["error"]["code"] == "invalid_api_key"
    chunked = curl(*key, "-H", "Transfer-Encoding: chunked", server.url + "/v1/chat/completions", "-d", body)
    assert json.loads(chunked.stdout)["choices"][0]["message"] == json.loads(whole.stdout)["choices"][0]["message"]
    head = curl(*key, "-I", server.url + "/health")
    assert head.stdout.startswith("HTTP/1.1 200")


def test_chat_url(server, world, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    options = ["chat", "--url", server.url, "--api-key-file", key, "--temperature", "0", "-n", "20"]

    def chat(*more, lines, argv=options):
        return subprocess.run([INFERD, *map(str, argv), *more], input="\n".join(lines) + "\n", capture_output=True,
                              text=True, timeout=60 * SLOW)
    here = world.inferd("chat", "--temperature", "0", "-n", "20", "--quiet", input="Tell me a story.\nAnd then?\n").stdout
    r = chat(lines=["Tell me a story.", "And then?"])
    assert r.returncode == 0 and not r.stderr and r.stdout == here
    first, second, third = map(json.loads, chat("--json", lines=[
        "Tell me a story.", "And then?", "/clear", "Tell me a story."]).stdout.splitlines())
    assert [first["text"], second["text"]] == here.splitlines() and third["text"] == first["text"]
    assert second["cached_tokens"] >= first["prompt_tokens"] and first["stop"] == "length"
    # Errors have one line each; a turn that failed is taken back.
    r = chat("--json", lines=["word " * 3000, "Tell me a story."])
    failed, after = map(json.loads, r.stdout.splitlines())
    assert "context" in failed["error"] and after["text"] == first["text"] and r.returncode == 0
    for argv, word in [(["chat", "--url", server.url], "API key"), (["chat", "--url", "https://x"], "http://"),
                       (["chat", "--url", "http://127.0.0.1:1"], "inferd serve"),
                       (["chat", "--url", server.url, "--api-key-file", "/nonexistent"], "api-key-file")]:
        r = chat(lines=["x"], argv=argv)
        assert r.returncode == 1 and word in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr


def test_chat_url_is_cut_by_ctrl_c(slow_server, world, tmp_path):
    server = slow_server
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    p = world.spawn([INFERD, "chat", "--url", server.url, "--api-key-file", key, "--ignore-eos", "-n", "2000"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    p.stdin.write(b"Tell me a story.\n")
    p.stdin.flush()
    assert p.stdout.read(20)
    p.send_signal(signal.SIGINT)
    headers = {"X-Api-Key": KEY}
    world.until(lambda: server.get("/v1/status", headers=headers)[2]["queue"]["cancelled"] == 1, what="the work stops")
    world.until(lambda: "answer cut" in p.log.read_text(), what="the client says so")
    p.stdin.close()
    assert p.wait(60 * SLOW) == 0


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": {
              "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
              "required": ["city", "days"]}}},
         {"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("template", ["qwen3", *(pytest.param(t, marks=pytest.mark.slow)
                                                 for t in ("qwen2.5", "llama3.1"))])
def test_tools(world, template):
    """Calls that must be made: the story writer would make none by itself."""
    openai = need("openai")
    world.expertd()
    server = Server(world, "--chat-template", template)
    client = openai_client(server)
    named = {"type": "function", "function": {"name": "weather"}}
    call = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": named, "max_tokens": 300, "temperature": 1}
    for seed in range(3):
        choice = client.chat.completions.create(**call, seed=seed).choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
        made = choice.message.tool_calls
        assert len(made) == 1 and made[0].function.name == "weather"
        arguments = json.loads(made[0].function.arguments)
        assert set(arguments) == {"city", "days"} and isinstance(arguments["days"], int)
        parts = []
        for event in client.chat.completions.create(**call, seed=seed, stream=True):
            for c in event.choices:
                parts += c.delta.tool_calls or []
                finish = c.finish_reason
        assert finish == "tool_calls" and parts[0].function.name == "weather" and parts[0].id and parts[0].index == 0
        assert json.loads("".join(p.function.arguments for p in parts)) == arguments
    names = {client.chat.completions.create(**{**call, "tool_choice": "required", "seed": s, "temperature": 2}
                                            ).choices[0].message.tool_calls[0].function.name for s in range(12)}
    assert names <= {"weather", "now"}
    # Results come back; none and auto leave the answer free.
    history = [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "weather", "arguments": '{"city": "Rome", "days": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    for how in "auto", "none":
        r = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, tool_choice=how, max_tokens=5)
        assert r.choices[0].message.content is not None
    with pytest.raises(openai.BadRequestError, match="nothing"):
        client.chat.completions.create(**{**call, "tool_choice": {"type": "function", "function": {"name": "nothing"}}})
    need("anthropic")
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    ask = {"model": MODEL, "max_tokens": 300, "messages": ASK, "tools": tools,
           "tool_choice": {"type": "tool", "name": "weather"}}
    message = anthropic_client(server).messages.create(**ask)
    assert message.stop_reason == "tool_use"
    (block,) = [b for b in message.content if b.type == "tool_use"]
    assert block.name == "weather" and set(block.input) == {"city", "days"}
    with anthropic_client(server).messages.stream(**ask) as events:
        final = events.get_final_message()
    assert final.stop_reason == "tool_use" and set(final.content[0].input) == {"city", "days"}
    again = anthropic_client(server).messages.create(**{**ask, "tool_choice": {"type": "auto"}, "max_tokens": 5}, **{})
    assert again.usage.output_tokens <= 5
    answered = anthropic_client(server).messages.create(model=MODEL, max_tokens=5, tools=tools, messages=[
        *ASK, {"role": "assistant", "content": [b.model_dump(include={"type", "id", "name", "input"})
                                                for b in message.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]}])
    assert answered.usage.output_tokens <= 5


def test_a_template_without_forced_calls_refuses_them_by_name(world):
    openai = need("openai")
    world.expertd()
    client = openai_client(Server(world, "--chat-template", "glm4.5"))
    with pytest.raises(openai.BadRequestError, match="glm4.5") as e:
        client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required")
    assert e.value.param == "tool_choice"
    # What is asked of the reasoning must be in the template's power.
    for template, kw, ok in [("glm4.5", {"reasoning_effort": "none"}, True), ("glm4.5", {"reasoning_effort": "low"}, False),
                             ("chatml", {"reasoning_effort": "none"}, True),
                             ("chatml", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, False),
                             ("deepseek-r1", {"reasoning_effort": "none"}, False),
                             ("gpt-oss", {"reasoning_effort": "low"}, True)]:
        client = openai_client(Server(world, "--chat-template", template))
        ask = {"model": MODEL, "messages": ASK, "max_tokens": 2, **kw}
        if ok:
            assert client.chat.completions.create(**ask).usage.completion_tokens
        else:
            with pytest.raises(openai.BadRequestError, match=template) as e:
                client.chat.completions.create(**ask)
            assert e.value.param in ("reasoning_effort", "chat_template_kwargs")
