# SPDX-License-Identifier: MIT
"""Tests of tiny_agent.py, in the order and under the titles of its sections.

Pure parts are tables. The loop is compared as a whole trace. HTTP is tested against a real server
on 127.0.0.1 that replays bytes; files, shells and terminals are real. `make test` runs them all;
`python3 test_tiny_agent.py bench` measures instead.
"""
import ast
import contextlib
import datetime
import gzip
import inspect
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tiny_agent as ta
from tiny_agent import (AssistantMessage, Failed, Provider, ProviderError, Rule, ScriptedProvider,
                        Session, ToolCall, ToolError, ToolResultMessage, UserMessage, Workspace)

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "tiny_agent.py"
SOURCE = PROGRAM.read_text("utf-8")
KEY = "sk-test-canary-7351"
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")


# ─── Helpers ─────────────────────────────────────────────────────────────────────────────────────

def run_agent(replies, folder, task="go", *, mode="auto", watch=lambda event, agent: None, **more):
    """(the events of a run with a scripted model, the agent)"""
    provider = replies if isinstance(replies, Provider) else ScriptedProvider(replies)
    agent = ta.Agent(provider, Workspace(folder), mode=mode, **more)
    events = []
    for event in agent.run(task):
        events.append(event)
        watch(event, agent)
    return events, agent


def trace(events) -> str:
    """A short line an event."""
    def line(event) -> str:
        match event:
            case ta.MessageStart(message) | ta.MessageEnd(message):
                what = message.role
                if isinstance(event, ta.MessageEnd) and what == "assistant":
                    what += f" {message.stop_reason}"
                return f"{event.type} {what}"
            case ta.ToolStart():
                return f"tool_start {event.name} {event.decision}"
            case ta.ToolEnd():
                return f"tool_end {event.name} {'error' if event.is_error else 'ok'}"
            case ta.Retry():
                return f"retry {event.attempt} {event.error['kind']}"
            case ta.RunEnd(reason, error):
                return f"run_end {reason}{' ' + error['kind'] if error else ''}"
        return event.type
    return "\n".join(line(event) for event in events
                     if not isinstance(event, (ta.TextDelta, ta.ToolcallDelta, ta.ToolOutput)))


def of(kind, events):
    """The events of a class."""
    return [event for event in events if isinstance(event, kind)]


def results(agent) -> list[str]:
    """The contents of the tool results on the branch."""
    return [e.message.content for e in agent.session.active_path()
            if isinstance(e.message, ToolResultMessage)]


class Server:
    """Replays replies on a port of its own; `requests` holds (path, headers, body) of each.

    A reply is a dict: status, headers, chunks (bytes, each sent as one HTTP chunk), end: "eof",
    "cut" (no last chunk) or "stall", and after: an Event it waits for. The last one repeats.
    """

    def __init__(self, *replies):
        self.replies, self.requests, self.closing = list(replies), [], threading.Event()
        self.started = threading.Event()
        self.started.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *arguments):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.requests.append((self.path, self.headers, json.loads(body or b"null")))
                reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                reply.get("after", server.started).wait(30)
                with contextlib.suppress(OSError):
                    self.play(reply)

            do_GET = do_POST

            def play(self, reply):
                self.send_response(reply.get("status", 200))
                for name, value in {"Content-Type": "text/event-stream",
                                    **reply.get("headers", {})}.items():
                    self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in reply.get("chunks", ()):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if reply.get("end") == "stall":
                    server.closing.wait(30)
                self.close_connection = True
                if reply.get("end", "eof") == "eof":
                    self.wfile.write(b"0\r\n\r\n")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.root = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.url = self.root + "/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def body(self, number=-1) -> dict:
        return self.requests[number][2]


@pytest.fixture
def serve():
    """A function that starts a Server; all are closed after the test."""
    servers = []

    def start(*replies):
        servers.append(Server(*replies))
        return servers[-1]
    yield start
    for server in servers:
        server.close()


def sse(*objects) -> bytes:
    return b"".join(b"data: " + (o.encode() if isinstance(o, str) else json.dumps(o).encode())
                    + b"\n\n" for o in objects)


def delta(finish=None, **fields) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call_delta(index=None, id=None, name=None, arguments=None, **more) -> dict:
    call = {"index": index, "id": id, "function": {"name": name, "arguments": arguments}, **more}
    return delta(tool_calls=[{k: v for k, v in call.items() if v is not None}])


def stream_of(*objects, **more) -> dict:
    return {"chunks": [sse(*objects)], **more}


def says(text="fine", finish="stop") -> dict:
    return stream_of(delta(content=text), delta(finish), "[DONE]")


def error_reply(status, body, **headers) -> dict:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return {"status": status, "chunks": [data] if data else [],
            "headers": {"Content-Type": "application/json", **headers}}


TOOLS = [ta.tool_schema(function) for function in Workspace(".").tools().values()]


def ask(provider, messages=(UserMessage("hi"),), tools=TOOLS, abort=None):
    """(the deltas, the Done or Failed) of one request."""
    *events, end = provider.stream("system", list(messages), tools, abort)
    return events, end


def host(server, name="custom", **habits) -> Provider:
    return Provider(name, server.url, "m", **habits)


def received(server, **habits) -> AssistantMessage:
    """The message that a server's reply becomes; fails on an error."""
    _, end = ask(host(server, **habits))
    assert isinstance(end, ta.Done), end
    return end.message


def refused(server, **habits) -> ProviderError:
    _, end = ask(host(server, **habits))
    assert isinstance(end, Failed), end
    return end.error


def cli(folder, *words, stdin="", env=(), timeout=30):
    """Runs the program as a process in a folder, with a home there and no keys."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8",
                   "AGENT_HOME": str(folder / "home"), **dict(env)}
    if os.name != "posix":
        environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, str(PROGRAM), *map(str, words)], cwd=folder, text=True,
                          input=stdin, capture_output=True, env=environment, timeout=timeout,
                          encoding="utf-8")


@pytest.fixture
def quick(monkeypatch):
    """Own waits of no length, so that retries cost no time."""
    monkeypatch.setattr(ta, "WAITS", (0, 0, 0, 0))


@pytest.fixture(autouse=True)
def own_secrets(monkeypatch):
    monkeypatch.setattr(ta, "SECRETS", set())
    for provider in ta.PROVIDERS.values():
        if provider.key_env:
            monkeypatch.delenv(provider.key_env, raising=False)


# ─── Messages and events ─────────────────────────────────────────────────────────────────────────

MESSAGES = {
    "user": UserMessage("hi ‮ \ud83d"),
    "assistant": AssistantMessage(
        "a", (ToolCall("1", "note", {"text": "x"}), ToolCall("2", "note", None, "{bad")), "hm",
        "tool_use", None, ta.Usage(1, 2, 3, 0.5), "groq", "m", {"groq": {"x": [1]}}),
    "tool result": ToolResultMessage("1", "note", "done", True, {"diff": "+a"})}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_message_survives_json(message):
    assert ta.from_json(json.loads(json.dumps(ta.to_json(message)))) == message


@pytest.mark.parametrize("data", [{}, {"role": "tool"}, {"role": "user", "content": ["x"]}])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError):
        ta.from_json(data)


def test_unknown_and_missing_fields_of_a_message_do_not_matter():
    assert ta.from_json({"role": "assistant", "content": None, "refusal": None, "audio": 1}) == \
        AssistantMessage()


@pytest.mark.parametrize("text, shown", [
    ("plain é 日本", "plain é 日本"), ("a\x1b[2Jb", "a\\x1b[2Jb"), ("a\rb", "a\\rb"),
    ("a\r\nb\tc", "a\nb\tc"), ("x\u202ey", "x\\u202ey"), ("x\u200by", "x\\u200by"),
    ("\x9b", "\\x9b"), ("\x7f", "\\x7f"), ("\U000e0041", "\\U000e0041")])
def test_what_cannot_be_seen_is_made_visible(text, shown):
    assert ta.visible(text) == shown


@pytest.mark.parametrize("text, shown", [
    ("<html><head><title>Sign in</title></head><body>203.0.113.7</body></html>", "Sign in"),
    ("<!DOCTYPE html><body><h1>401 No</h1></body>", "401 No"),
    ("a\n\n  b", "a b"), ("x" * 300, "x" * 199 + "…")])
def test_brief_is_one_short_line_without_markup(text, shown):
    assert ta.brief(text) == shown


# ─── HTTP and event streams ──────────────────────────────────────────────────────────────────────

BODY = ("﻿: hello\r\nevent: x\rdata: {\"é\":\ndata: 1}\r\n\r\nid: 4\ndata:no blank\n\n"
        "\n\nerror: {\"a\":2}\n\ndata: last").encode()


def test_a_line_end_cut_in_two_is_one_line_end():
    assert list(ta.lines([b"a\r", b"\n", b"\n", b"b"])) == [b"a", b"", b"b"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(BODY)])
def test_event_streams_are_read_by_their_grammar_wherever_they_are_cut(size):
    pieces = [BODY[i:i + size] for i in range(0, len(BODY), size)]
    assert list(ta.server_events(pieces)) == [
        ("x", '{"é":\n1}'.encode()), ("", b"no blank"), ("error", b'{"a":2}'), ("", b"last")]


def test_long_lines_take_time_in_proportion():
    """The number of joined bytes is what would grow with the square of the length."""
    line = b"x" * 65536
    assert len(next(ta.lines(line for _ in range(200)))) == 200 * 65536


CUTS = {"whole": 10 ** 6, "a byte at a time": 1, "three bytes": 3, "inside characters": 5}


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)
def test_a_stream_may_be_cut_anywhere(serve, size):
    data = sse(delta(role="assistant", content=""), delta(reasoning_content="grübeln "),
               delta(content="日本 "), delta(content="é😀"), call_delta(0, "c1", "note", '{"te'),
               call_delta(0, None, None, 'xt":"ü"}'), delta("tool_calls"),
               {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, "[DONE]")
    message = received(serve({"chunks": [data[i:i + size] for i in range(0, len(data), size)]}))
    assert (message.content, message.thinking) == ("日本 é😀", "grübeln ")
    assert message.tool_calls == (ToolCall("c1", "note", {"text": "ü"}),)
    assert (message.stop_reason, message.usage) == ("tool_use", ta.Usage(5, 2))


WHOLE = {"choices": [{"message": {"role": "assistant", "content": "whole"},
                      "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
BODIES: dict = {
    "JSON where a stream was asked for": [json.dumps(WHOLE).encode()],
    "blank lines before the JSON": [b"\n\n\r\n ", json.dumps(WHOLE).encode()],
    "a byte order mark before the JSON": [b"\xef\xbb\xbf" + json.dumps(WHOLE).encode()],
    "no end mark after the finish reason": [sse(delta(content="whole"), delta("stop"))],
    "an end mark without a finish reason": [sse(delta(content="whole"), "[DONE]")],
    "CR alone ends lines": [sse(delta(content="whole"), delta("stop")).replace(b"\n", b"\r")],
    "no blank line at the end": [sse(delta(content="whole", finish="stop")).rstrip()
                                 + b"\n\n" + sse(delta("stop")).rstrip()],
    "events without data": [b"data:\n\nevent: ping\ndata: \n\n", sse(delta(content="whole"),
                                                                     delta("stop"))],
    "control characters in the JSON": [b'data: {"choices":[{"delta":{"content":"who\x01le"}}]}\n\n'
                                       .replace(b"\x01", b""), sse(delta("stop"))],
    "comments in between": [b": hi\n\n", sse(delta(content="whole")), b":\n", sse(delta("stop"))]}


@pytest.mark.parametrize("chunks", BODIES.values(), ids=BODIES)
def test_replies_that_are_whole(serve, chunks):
    assert received(serve({"chunks": chunks})).content == "whole"


def test_a_squeezed_reply_is_inflated(serve):
    data = gzip.compress(sse(delta(content="zip"), delta("stop")))
    server = serve({"chunks": [data[:9], data[9:]], "headers": {"Content-Encoding": "gzip"}})
    assert received(server).content == "zip"


def test_a_connection_left_open_after_the_finish_reason_does_not_hold(serve, monkeypatch):
    monkeypatch.setitem(ta.PATIENCE, "end", 0.1)
    assert received(serve(stream_of(delta(content="x"), delta("stop"), end="stall"))).content == "x"


CUT_SHORT = {
    "cut in the middle": stream_of(delta(content="Ha"), end="cut"),
    "a clean end without an end mark": stream_of(delta(content="Ha")),
    "nothing at all": {"chunks": []},
    "not JSON, not a stream": {"chunks": [b"oops"]},
    "a login page": {"chunks": [b"<html><title>Sign in</title></html>"]}}


@pytest.mark.parametrize("reply", CUT_SHORT.values(), ids=CUT_SHORT)
def test_what_ends_early_is_a_network_error(serve, reply):
    assert refused(serve(reply)).kind == "network"


@pytest.mark.parametrize("limit", ["byte", "event"])
def test_waiting_has_limits(serve, monkeypatch, limit):
    monkeypatch.setitem(ta.PATIENCE, limit, 0.2)
    events, end = ask(host(serve(stream_of(delta(content="Half"), end="stall"))))
    assert (end.error.kind, end.error.attempts, end.message.content) == ("network", 5, "Half")


STAGES = {"before the first byte": {"end": "stall", "chunks": [], "headers": {}},
          "in the middle": stream_of(delta(content="x"), end="stall")}


@pytest.mark.parametrize("reply", STAGES.values(), ids=STAGES)
def test_an_abort_from_another_thread_ends_the_wait_at_once(serve, reply):
    abort = ta.Abort()
    threading.Timer(0.2, abort.set).start()
    _, end = ask(host(serve(reply)), abort=abort)           # the server would stall for 30 s
    assert (end.error.kind, end.message.stop_reason) == ("aborted", "aborted")


def test_an_abort_before_the_request_sends_nothing(serve):
    server, abort = serve(says()), ta.Abort()
    abort.set()
    assert ask(host(server), abort=abort)[1].error.kind == "aborted"
    assert server.requests == []


def test_a_redirect_is_not_followed(serve):
    other = serve(says())
    error = refused(serve({"status": 302, "headers": {"Location": f"{other.url}/x"}}))
    assert (error.kind, other.requests) == ("invalid_request", [])
    assert other.url in error.hint


def test_this_machine_is_never_reached_through_a_proxy(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert received(serve(says())).content == "fine"


def test_other_hosts_are_reached_through_the_proxy(serve, monkeypatch):
    proxy = serve(says("by proxy"))
    monkeypatch.setenv("http_proxy", proxy.root.replace("//", "//me:secret@"))
    monkeypatch.delenv("no_proxy", raising=False)
    _, end = ask(Provider("custom", "http://model.invalid/v1", "m"))
    path, headers, _ = proxy.requests[0]
    assert (end.message.content, path) == ("by proxy", "http://model.invalid/v1/chat/completions")
    assert headers["Proxy-Authorization"] == "Basic bWU6c2VjcmV0"
    assert headers["Host"] == "model.invalid"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def test_a_server_that_is_not_there(monkeypatch):
    _, end = ask(Provider("ollama", f"http://127.0.0.1:{free_port()}/v1", "m"))
    assert (end.error.kind, end.error.attempts) == ("network", 1)
    assert "ollama serve" in end.error.hint


def test_a_name_that_does_not_resolve():
    _, end = ask(Provider("custom", "http://no-such-host.invalid/v1", "m"))
    assert (end.error.kind, end.error.attempts) == ("network", 3)


@pytest.mark.parametrize("text, seconds", [
    ("34s", 34), ("1m2.5s", 62.5), ("260ms", 0.26), ("2m59.56s", 179.56), ("1h", 3600), ("7", 7),
    ("soon", None), ("", None), ("1.2.3s", None)])
def test_durations(text, seconds):
    assert ta.seconds_of(text) == seconds


# name: (status, body, headers) -> (kind, attempts, delay), and words of message or hint
REFUSALS = {
    "wrong key": (401, {"error": {"message": "Bad key"}}, {}, "auth", 1, None, "Bad key"),
    "wrong key, as a page": (401, b"<html><h1>Stop</h1></html>", {}, "auth", 1, None, "Stop"),
    "User-Agent blocked": (403, b"error code: 1010", {}, "auth", 1, None, "User-Agent"),
    "no credit": (402, {"error": {"message": "Pay", "code": 402}}, {}, "auth", 1, None, "credit"),
    "quota is not waited for": (429, {"error": {"message": "x", "code": "insufficient_quota"}},
                                {"Retry-After": "5"}, "auth", 1, 5, "credit"),
    "Gemini's quota text is a rate limit": (
        429, [{"error": {"code": 429, "message": "You exceeded your current quota",
                         "details": [{"retryDelay": "34s"}]}}], {}, "rate_limit", 5, 34, "quota"),
    "rate, seconds": (429, {}, {"Retry-After": "2.5"}, "rate_limit", 5, 2.5, ""),
    "rate, milliseconds first": (429, {}, {"retry-after-ms": "700", "Retry-After": "9"},
                                 "rate_limit", 5, 0.7, ""),
    "rate, in the text": (429, {"error": {"message": "Please try again in 1m2s."}}, {},
                          "rate_limit", 5, 62, "try again"),
    "rate, nonsense": (429, {}, {"Retry-After": "-3"}, "rate_limit", 5, None, ""),
    "rate, of the one that is used up": (
        429, {}, {"x-ratelimit-remaining-tokens": "3", "x-ratelimit-reset-tokens": "1s",
                  "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "9s"},
        "rate_limit", 5, 9, ""),
    "a day's quota": (429, {"error": {"message": "free-models-per-day"}}, {}, "rate_limit", 1,
                      None, "quota"),
    "too large for a minute": (429, {"error": {"message": "Request too large: Limit 30, "
                                                          "Requested 90"}}, {}, "overflow", 1, None,
                               "large"),
    "413": (413, {"error": "entity too large"}, {}, "overflow", 1, None, ""),
    "no body": (400, b"", {}, "overflow", 1, None, ""),
    "upstream overflow": (400, {"error": {"message": "Provider returned error", "metadata": {
        "raw": json.dumps({"error": {"message": "maximum context length is 8192 tokens"}})}}}, {},
                          "overflow", 1, None, "8192"),
    "an echo is not the fault": (400, {"message": "bad text: 'error 429 rate limit'"}, {},
                                 "invalid_request", 1, None, ""),
    "model missing": (404, {"error": {"message": "model 'x' not found"}}, {}, "invalid_request", 1,
                      None, "-m"),
    "no tools": (400, {"error": "x does not support tools"}, {}, "invalid_request", 1, None,
                 "use tools"),
    "wrong address": (404, b"", {}, "invalid_request", 1, None, "base URL"),
    "server": (500, {"error": {"message": "boom"}}, {}, "server", 5, None, "boom"),
    "overloaded": (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}},
                   {}, "server", 5, None, "Busy"),
    "the server says no retry": (500, {}, {"x-should-retry": "false"}, "server", 1, None, ""),
    "the server says retry": (409, {}, {"x-should-retry": "true"}, "invalid_request", 5, None, ""),
    "loading": (503, {"error": {"message": "Loading model"}}, {}, "server", 5, 15, "Loading"),
    "a fault dressed as 400": (400, {"detail": "DEGRADED function cannot be invoked"}, {},
                               "server", 5, None, "DEGRADED"),
    "tool_use_failed": (400, {"error": {"message": "x", "code": "tool_use_failed"}}, {},
                        "invalid_request", 3, 0, ""),
    "FastAPI": (422, {"detail": [{"msg": "field required"}]}, {}, "invalid_request", 1, None,
                "field required"),
    "a message that is an object": (422, {"object": "error", "message": {"detail": "odd"}}, {},
                                    "invalid_request", 1, None, "odd"),
    "a page of many kB": (524, b"<!DOCTYPE html><title>524: timeout</title>" + b"<p>1.2.3.4" * 2000,
                          {}, "server", 5, None, "524"),
    "not an object": (400, b"[]", {}, "invalid_request", 1, None, ""),
    "an unknown shape is not an empty body": (400, {"error": ["a", "b"]}, {}, "invalid_request", 1,
                                              None, '["a", "b"]'),
    "Anthropic's credit": (400, {"error": {"message": "Your credit balance is too low"}}, {}, "auth",
                           1, None, "credit"),
    "a wait hidden upstream": (429, {"error": {"message": "x", "metadata": {
        "raw": json.dumps({"details": [{"retryDelay": "7s"}]})}}}, {}, "rate_limit", 5, 7, ""),
    "retry after in words": (429, {"message": "Please retry after 26 seconds."}, {}, "rate_limit", 5,
                             26, ""),
    "a page after a comment": (502, b"\xef\xbb\xbf<!-- x --><html><title>Bad</title>1.2.3.4", {},
                               "server", 5, None, "Bad"),
    "a password in an address": (500, {"error": "via http://me:pw@proxy.example/"}, {}, "server", 5,
                                 None, "via http://proxy.example/")}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(serve, case):
    status, body, headers, kind, attempts, delay, words = case
    error = refused(serve(error_reply(status, body, **headers)))
    assert (error.kind, error.attempts, error.delay) == (kind, attempts, delay)
    assert words in error.message + error.hint
    assert len(error.message) <= 200 and not {"<", "1.2.3.4"} & {*error.message, error.message[-7:]}


def test_an_http_date_is_relative_to_the_reply(serve):
    def date(seconds):
        moment = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)
        return (moment + datetime.timedelta(seconds=seconds)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    error = ta.refusal(429, "{}", {"Date": date(0), "Retry-After": date(30)}, name="x")
    assert error.delay == 30


OVERFLOWS = {
    "prompt is too long: 205351 tokens > 200000 maximum": 200000,
    "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease": 200000,
    "Your input exceeds the context window of this model": None,
    "This model's maximum context length is 128000 tokens. However": 128000,
    "Please reduce the length of the messages or completion": None,
    "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)":
        1048576,
    "This model's maximum prompt length is 131072 but the request contains 537812": 131072,
    "the request exceeds the available context size (8192 tokens)": 8192,
    "Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)": 7424,
    "Trying to keep the first 9 tokens when context the overflows": None,
    "the prompt is longer than the context length currently available": None,
    "Prompt contains 9 tokens, too large for model with 32768 maximum context length": 32768,
    "max_tokens must be at least 1, got -186.": None,
    "exceeded model token limit: 8192": 8192,
    "You passed 5001 input tokens. However, the model's context length is only 4096 tokens": 4096,
    "context window exceeds limit": None,
    "prompt token count of 9 exceeds the limit of 64000": 64000,
    "Input is too long for requested model.": None}


@pytest.mark.parametrize("message, window", OVERFLOWS.items(), ids=[m[:40] for m in OVERFLOWS])
def test_overflow_is_recognised_and_its_window_read(message, window):
    error = ta.refusal(400, {"error": {"message": message}}, name="x")
    assert (error.kind, error.window) == ("overflow", window)


IN_STREAM = {
    "an object": ({"error": {"message": "boom", "type": "server_error"}}, "server"),
    "a text": ({"error": "boom"}, "server"),
    "flat": ({"object": "error", "message": "boom", "code": 400}, "invalid_request"),
    "a number in it": ({"error": {"message": "slow", "code": 429}}, "rate_limit"),
    "beside choices": ({"error": {"message": "b"}, **delta("error", content="")}, "server"),
    "x_groq": ({"x_groq": {"error": "over capacity"}, **delta("stop")}, "server"),
    "a finish reason": (delta("error"), "server"),
    "the filter": (delta("content_filter"), "invalid_request"),
    "out of resources": (delta("insufficient_system_resource"), "server"),
    "window exceeded": (delta("model_context_window_exceeded"), "overflow"),
    "Anthropic's": ({"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}},
                    "server"),
    "no quota": ({"error": {"message": "x", "code": "insufficient_quota"}}, "auth"),
    "a key": ({"error": {"message": "x", "code": "invalid_api_key"}}, "auth"),
    "too large": ({"error": {"message": "x", "type": "request_too_large"}}, "overflow"),
    "Google's word": ({"error": {"message": "x", "status": "RESOURCE_EXHAUSTED"}}, "rate_limit"),
    "broken off": (delta("abort"), "server"), "capital letters": (delta("ERROR"), "server")}


@pytest.mark.parametrize("body, kind", [
    ({"status": 429, "title": "Too Many"}, "rate_limit"), ({"detail": "Not Found"}, "server"),
    ({"code": 1211, "msg": "no such model"}, "server")])
def test_a_whole_body_that_is_no_reply_is_an_error(serve, body, kind):
    error = refused(serve({"chunks": [json.dumps(body).encode()]}))
    assert error.kind == kind and str(list(body.values())[-1]) in error.message


@pytest.mark.parametrize("after", ["first", "in the middle"])
@pytest.mark.parametrize("event, kind", IN_STREAM.values(), ids=IN_STREAM)
def test_errors_inside_an_answer_with_status_200(serve, event, kind, after):
    before = [delta(content="Half")] if after == "in the middle" else []
    _, end = ask(host(serve(stream_of(*before, event, "[DONE]"))))
    assert (end.error.kind, end.message.stop_reason) == (kind, "error")
    assert end.message.content == ("Half" if before else "")


@pytest.mark.parametrize("data", [
    b"event: error\ndata: {\"message\":\"bad\",\"status_code\":400}\n\n",
    b"error: {\"message\":\"bad\",\"code\":400}\n\n"], ids=["event: error", "a field error"])
def test_errors_marked_by_the_stream(serve, data):
    assert refused(serve({"chunks": [data]})).kind == "invalid_request"


SENSELESS = {"choices of numbers": {"choices": [1]}, "a delta that is text": {"choices": [
    {"index": 0, "delta": "x"}]}, "calls that are text": delta(tool_calls="x"),
    "usage that is text": {"usage": "much", "choices": [{"delta": {"tool_calls": [3]}}]}}


@pytest.mark.parametrize("event", SENSELESS.values(), ids=SENSELESS)
def test_events_that_make_no_sense_are_network_errors(serve, event):
    assert refused(serve(stream_of(event, "[DONE]"))).kind == "network"


def test_no_key_is_in_an_error(serve, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = serve(error_reply(401, {"error": f"Incorrect key {KEY}"}))
    _, end = ask(Provider("custom", server.url, "m", "TEST_KEY"))
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(end) and "[key]" in end.error.message
    assert "TEST_KEY" in end.error.hint


@pytest.mark.parametrize("key", ["sk-é", "sk-a\nb", "sk-\x00c"])
def test_what_cannot_be_a_key_is_not_sent(monkeypatch, key):
    with contextlib.suppress(ValueError):       # the system may refuse it before we do
        monkeypatch.setenv("TEST_KEY", key)
        _, end = ask(Provider("custom", "http://127.0.0.1:9/v1", "m", "TEST_KEY"))
        assert (end.error.kind, end.error.attempts) == ("auth", 1)


# ─── Providers ───────────────────────────────────────────────────────────────────────────────────

A, B = '{"path": "a"}', '{"path": "b"}'
# name: (pieces, (id or None for any, name, arguments) of each call)
ASSEMBLY = {
    "pieces of two calls, mixed": (
        [call_delta(0, "c1", "read_file", ""), call_delta(1, "c2", "note", ""),
         call_delta(0, None, None, '{"path":'), call_delta(1, None, None, "{}"),
         call_delta(0, None, None, ' "a"}')], [("c1", "read_file", {"path": "a"}), ("c2", "note", {})]),
    "index 0 for all": ([call_delta(0, "c1", "read_file", A), call_delta(0, "c2", "read_file", B)],
                        [("c1", "read_file", {"path": "a"}), ("c2", "read_file", {"path": "b"})]),
    "no index, by id": ([call_delta(None, "c1", "read_file", '{"path"'),
                         call_delta(None, "c2", "note", "{}"),
                         call_delta(None, "c1", None, ': "a"}')],
                        [("c1", "read_file", {"path": "a"}), ("c2", "note", {})]),
    "no index, no id: the last": ([call_delta(None, "c1", "read_file", '{"pa'),
                                   call_delta(None, None, None, 'th": "a"}')],
                                  [("c1", "read_file", {"path": "a"})]),
    "no index, no id, two whole calls": ([call_delta(None, None, "read_file", A),
                                          call_delta(None, None, "read_file", B)],
                                         [(None, "read_file", {"path": "a"}),
                                          (None, "read_file", {"path": "b"})]),
    "the same id twice": ([call_delta(0, "c", "note", "{}"), call_delta(1, "c", "note", "{}")],
                          [("c", "note", {}), (None, "note", {})]),
    "no index, no id, another name": ([call_delta(None, None, "note", {}),
                                       call_delta(None, None, "read_file", {"path": "a"})],
                                      [(None, "note", {}), (None, "read_file", {"path": "a"})]),
    "no index, the same id, each whole": ([call_delta(None, "c", "read_file", A),
                                           call_delta(None, "c", "read_file", B)],
                                          [("c", "read_file", {"path": "a"}),
                                           (None, "read_file", {"path": "b"})]),
    "one body, index 0 for all": (
        [{"choices": [{"message": {"tool_calls": [
            {"index": 0, "function": {"name": "note", "arguments": "{}"}}] * 2}}]}],
        [(None, "note", {}), (None, "note", {})]),
    "a name in three pieces": ([call_delta(0, "c", "re"), call_delta(0, None, "ad_"),
                                call_delta(0, None, "file", A)], [("c", "read_file", {"path": "a"})]),
    "a numbered name": ([call_delta(0, "c", "functions.note:0", "{}")], [("c", "note", {})]),
    "an id that is a number": ([call_delta(0, 7, "note", "{}")], [("7", "note", {})]),
    "an id that comes late": ([call_delta(0, None, "note", ""), call_delta(0, "c9", None, "{}")],
                              [(None, "note", {})]),
    "name in pieces": ([call_delta(0, "c", "read_", ""), call_delta(0, None, "file", A)],
                       [("c", "read_file", {"path": "a"})]),
    "name repeated": ([call_delta(0, "c", "note", "{"), call_delta(0, "c", "note", "}")],
                      [("c", "note", {})]),
    "leaked tokens": ([call_delta(0, "c", "functions.note<|channel|>x", "{}")], [("c", "note", {})]),
    "another letter case": ([call_delta(0, "c", " Note ", "{}")], [("c", "note", {})]),
    "no name at all": ([call_delta(0, "c", "", "{}"), call_delta(1, "d", "note", "{}")],
                       [("d", "note", {})]),
    "an unknown name stays": ([call_delta(0, "c", "fly", "{}")], [("c", "fly", {})]),
    "arguments as an object": ([call_delta(0, "c", "note", {"text": "x"})],
                               [("c", "note", {"text": "x"})]),
    "arguments null": ([call_delta(0, "c", "note", None)], [("c", "note", {})]),
    "arguments the text null": ([call_delta(0, "c", "note", "null")], [("c", "note", {})]),
    "arguments encoded twice": ([call_delta(0, "c", "read_file", json.dumps(A))],
                                [("c", "read_file", {"path": "a"})]),
    "arguments glued": ([call_delta(0, "c", "read_file", A + B)], [("c", "read_file", None)]),
    "arguments broken": ([call_delta(0, "c", "read_file", '{"path": "a')], [("c", "read_file", None)]),
    "arguments a list": ([call_delta(0, "c", "read_file", '["a"]')], [("c", "read_file", None)]),
    "arguments beyond numbers": ([call_delta(0, "c", "note", '{"text": 1e999}')],
                                 [("c", "note", None)]),
    "the old function_call": ([delta(function_call={"name": "note", "arguments": "{}"})],
                              [(None, "note", {})])}


@pytest.mark.parametrize("pieces, calls", ASSEMBLY.values(), ids=ASSEMBLY)
def test_tool_calls_are_put_together(serve, pieces, calls):
    message = received(serve(stream_of(*pieces, delta("stop"), "[DONE]")))
    assert [(c.name, c.arguments) for c in message.tool_calls] == [call[1:] for call in calls]
    assert all(want in (None, call.id) for (want, _, _), call in zip(calls, message.tool_calls))
    assert len({call.id for call in message.tool_calls}) == len(calls)
    assert message.stop_reason == "tool_use"
    assert all((call.arguments is None) == bool(call.raw_arguments) for call in message.tool_calls)


def test_ids_are_unique_over_the_conversation(serve):
    before = [UserMessage("x"), AssistantMessage("", (ToolCall("call_0", "note", {}),)),
              ToolResultMessage("call_0", "note", "ok")]
    server = serve(stream_of(call_delta(0, "call_0", "note", "{}"), delta("tool_calls")))
    _, end = ask(host(server), before)
    assert re.fullmatch("[a-z0-9]{9}", end.message.tool_calls[0].id)


def test_the_events_of_a_call_agree_and_end(serve):
    server = serve(stream_of(call_delta(0, "c", "functions.note", '{"text": '),
                             call_delta(0, None, None, '"x"}'), delta("tool_calls")))
    events, end = ask(host(server))
    assert [type(e).__name__ for e in events] == [
        "ToolcallStart", "ToolcallDelta", "ToolcallDelta", "ToolcallEnd"]
    assert {getattr(e, "name", "note") for e in events} == {"note"}
    assert "".join(e.delta for e in of(ta.ToolcallDelta, events)) == '{"text": "x"}'
    assert events[-1].tool_call == end.message.tool_calls[0]


def test_a_call_that_breaks_off_is_ended_too(serve):
    events, end = ask(host(serve(stream_of(call_delta(0, "c", "note", '{"te'), end="cut"))))
    assert isinstance(end, Failed) and isinstance(events[-1], ta.ToolcallEnd)


NOTE = '{"name": "note", "arguments": {"text": "x"}}'
# name: (text, finish reason, the text that stays, names of the calls)
WRITTEN = {
    "tagged": (f"So:\n<tool_call>{NOTE}</tool_call>", "stop", "So:", ["note"]),
    "tagged twice": (f"<tool_call>{NOTE}</tool_call>\n<tool_call>{NOTE}</tool_call>", "stop", "",
                     ["note", "note"]),
    "parameters for arguments": ('<tool_call>{"name":"note","parameters":{"text":"x"}}</tool_call>',
                                 "stop", "", ["note"]),
    "fenced": (f"```json\n{NOTE}\n```", "stop", "", ["note"]),
    "bare": (NOTE, "stop", "", ["note"]),
    "function tags": ("<function=note><parameter=text>\nx\n</parameter></function>", "stop", "",
                      ["note"]),
    "function in tool_call": ("<tool_call>\n<function=note>\n<parameter=text>x</parameter>\n"
                              "</function>\n</tool_call>", "stop", "", ["note"]),
    "function with JSON": ('<function=note>{"text": "x"}</function>', "stop", "", ["note"]),
    "harmony, the channel last": (
        '<|start|>assistant to=functions.note<|channel|>commentary json<|message|>{"text": "x"}',
        "stop", "", ["note"]),
    "harmony, no channel": ('to=functions.note <|constrain|>json<|message|>{"text": "x"}<|call|>',
                            "stop", "", ["note"]),
    "harmony": ('<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "x"}',
                "stop", "", ["note"]),
    "a quote before a real one": (f"Like `<tool_call>` here:\n<tool_call>{NOTE}</tool_call>", "stop",
                                  "Like `<tool_call>` here:", ["note"]),
    "text after it": (f"<tool_call>{NOTE}</tool_call> is how.", "stop",
                      f"<tool_call>{NOTE}</tool_call> is how.", []),
    "in backquotes": (f"Write `<tool_call>{NOTE}</tool_call>`", "stop",
                      f"Write `<tool_call>{NOTE}</tool_call>`", []),
    "an unknown tool": ('{"name": "fly", "arguments": {}}', "stop",
                        '{"name": "fly", "arguments": {}}', []),
    "other JSON": ('{"a": 1}', "stop", '{"a": 1}', []),
    "cut by length": (f"<tool_call>{NOTE}</tool_call>", "length",
                      f"<tool_call>{NOTE}</tool_call>", [])}


@pytest.mark.parametrize("text, finish, stays, names", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("size", [3, 10 ** 6])
def test_calls_written_as_text(serve, text, finish, stays, names, size):
    pieces = [delta(content=text[i:i + size]) for i in range(0, len(text), size)]
    events, end = ask(host(serve(stream_of(*pieces, delta(finish)))))
    assert [call.name for call in end.message.tool_calls] == names
    assert all(call.arguments == {"text": "x"} for call in end.message.tool_calls)
    assert end.message.content == stays
    assert "".join(e.delta for e in of(ta.TextDelta, events)).strip() == stays


def test_without_tools_nothing_written_is_a_call(serve):
    server = serve(says(NOTE))
    _, end = ask(host(server), tools=[])
    assert (end.message.content, end.message.tool_calls) == (NOTE, ())
    assert "tools" not in server.body()


THOUGHTS = {
    "reasoning_content": ([delta(reasoning_content="hm"), delta(content="a")], "hm", "a"),
    "reasoning": ([delta(reasoning="hm"), delta(content="a")], "hm", "a"),
    "both with the same text": ([delta(reasoning="hm", reasoning_content="hm"), delta(content="a")],
                                "hm", "a"),
    "an object": ([delta(reasoning_content={"text": "hm"}), delta(content="a")], "hm", "a"),
    "parts": ([delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                              {"type": "text", "text": "a"}])], "hm", "a"),
    "tags": ([delta(content="<think>hm</think>\n\na")], "hm", "a"),
    "tags, split": ([delta(content=c) for c in "<think>\nhm</think>\n\na"], "hm", "a"),
    "opening tag in the prompt": ([delta(content="hm\n</think>\n\na")], "hm", "a"),
    "a quoted end tag after a thought": (
        [delta(reasoning="hm"), delta(content="a\n</think>\nb")], "hm", "a\n</think>\nb"),
    "quoted tags": ([delta(content="a `<think>` b `</think>` c")], "", "a `<think>` b `</think>` c"),
    "less-than signs": ([delta(content="a <"), delta(content=" b <t"), delta(content="able>")], "",
                        "a < b <table>"),
    "a call in a thought": ([delta(content=f"<think><tool_call>{NOTE}</tool_call></think>a")],
                            f"<tool_call>{NOTE}</tool_call>", "a")}


@pytest.mark.parametrize("pieces, thinking, content", THOUGHTS.values(), ids=THOUGHTS)
def test_thinking_is_kept_apart(serve, pieces, thinking, content):
    message = received(serve(stream_of(*pieces, delta("stop"))))
    assert (message.thinking, message.content, message.tool_calls) == (thinking, content, ())


def test_an_answer_after_a_lost_opening_tag_is_told_whole(serve):
    events, end = ask(host(serve(stream_of(delta(content="I think long.\n"), delta("stop",
                      content="</think>\n\nThe answer is 42.")))))
    told = "".join(e.delta for e in of(ta.TextDelta, events))
    assert end.message.content == "The answer is 42." and told.endswith("The answer is 42.")


USAGES = {
    "OpenAI": ({"prompt_tokens": 9, "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4}}, ta.Usage(9, 2, 4)),
    "DeepSeek": ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4}, ta.Usage(9, 0, 4)),
    "Moonshot": ({"prompt_tokens": 9, "cached_tokens": 4}, ta.Usage(9, 0, 4)),
    "OpenRouter": ({"prompt_tokens": 9, "completion_tokens": 2, "cost": 0.25},
                   ta.Usage(9, 2, 0, 0.25)),
    "Anthropic": ({"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4,
                   "cache_creation_input_tokens": 1}, ta.Usage(10, 2, 4)),
    "both styles at once": ({"prompt_tokens": 9, "input_tokens": 9, "cache_read_input_tokens": 4},
                            ta.Usage(9, 0, 4)),
    "nonsense": ({"prompt_tokens": "many", "completion_tokens": None}, ta.Usage()),
    "nothing": ({}, None)}


@pytest.mark.parametrize("counts, usage", USAGES.values(), ids=USAGES)
def test_usage_of_every_known_shape(counts, usage):
    assert ta.usage_of(counts) == usage


WINDOWS = {
    "a list": ({"data": [{"id": "x"}, {"id": "m", "context_window": 131072}]}, 131072),
    "the smaller one": ({"data": [{"id": "m", "context_length": 200, "top_provider": {
        "context_length": 100}}]}, 100),
    "vLLM": ({"data": [{"id": "m", "max_model_len": 32768}]}, 32768),
    "LM Studio": ({"data": [{"id": "m", "max_context_length": 9, "loaded_context_length": 8}]}, 8),
    "a list alone": ([{"id": "m", "context_length": 7}], 7),
    "Ollama, loaded": ({"models": [{"name": "m", "model": "m", "context_length": 4096}]}, 4096),
    "Ollama, set": ({"model_info": {"a.context_length": 99999}, "parameters": "num_ctx   16384"},
                    16384),
    "Ollama, not set": ({"model_info": {"a.context_length": 99999}}, 4096),
    "not in it": ({"data": [{"id": "other", "context_length": 7}]}, None)}


@pytest.mark.parametrize("body, window", WINDOWS.values(), ids=WINDOWS)
def test_context_windows(body, window):
    assert ta.window_in(body, "m") == window


def call_and_result(**more):
    return [UserMessage("x"), AssistantMessage("", (ToolCall("call_long_id", "note", {"text": "x"}),),
                                               "hm", "tool_use", **more),
            ToolResultMessage("call_long_id", "note", ""), UserMessage("next")]


def test_a_request_has_what_every_host_accepts(serve):
    server = serve(says())
    ask(host(server), call_and_result())
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["User-Agent"].startswith("tiny_agent/")
    assert "Authorization" not in headers
    assert set(body) == {"model", "messages", "stream", "stream_options", "tools"}
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert body["messages"][2] == {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_long_id", "type": "function",
         "function": {"name": "note", "arguments": '{"text": "x"}'}}]}
    assert body["messages"][3]["content"] == "(no output)"


def test_half_characters_do_not_break_a_request(serve):
    server = serve(says())
    ask(host(server), [UserMessage("a\ud83d")])
    assert server.body()["messages"][1]["content"] == "a?"


OWN = [  # what a host sent, what goes back to it in the next request
    ("reasoning_content", [delta(reasoning_content="plan")], {"reasoning_content": "plan"}),
    ("reasoning", [delta(reasoning="plan")], {"reasoning": "plan"}),
    ("details", [delta(reasoning_details=[{"type": "t", "text": "p", "index": 0}]),
                 delta(reasoning_details=[{"type": "t", "text": "q", "signature": "S", "index": 0}]),
                 delta(reasoning_details=[{"type": "e", "data": "E", "index": 1}])],
     {"reasoning_details": [{"type": "t", "text": "pq", "signature": "S", "index": 0},
                            {"type": "e", "data": "E", "index": 1}]})]


@pytest.mark.parametrize("name, pieces, back", OWN, ids=[o[0] for o in OWN])
def test_what_must_go_back_goes_back_to_its_own_host_alone(serve, name, pieces, back):
    reply = stream_of(*pieces, call_delta(0, "c", "note", "{}", extra_content={"g": "SIG"}),
                      delta("tool_calls"))
    server = serve(reply, says())
    provider = host(server)
    message = ask(provider)[1].message
    later = [UserMessage("x"), message, ToolResultMessage("c", "note", "ok")]
    for other, own in ((provider, True), (provider.using(model="n"), False),
                       (host(server, name="groq"), False)):
        ask(other, later)
        sent = server.body()["messages"][2]
        extra = {k: v for k, v in sent.items() if k not in ("role", "content", "tool_calls")}
        assert extra == (back if own else {})
        assert ("extra_content" in sent["tool_calls"][0]) is own


def test_short_ids_are_the_same_on_call_and_result(serve):
    server = serve(says())
    ask(host(server, short_ids=True), call_and_result())
    _, _, call, result, _ = server.body()["messages"]
    assert re.fullmatch("[A-Za-z0-9]{9}", result["tool_call_id"])
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]


REPAIRS = {     # a refusal, the habits of the host, is the request as wished?
    "a refused field": ("Unsupported parameter: 'stream_options'", {},
                        lambda body: "stream_options" not in body),
    "Azure's wording": ("Unrecognized request argument supplied: stream_options", {},
                        lambda body: "stream_options" not in body),
    "pydantic's wording": ("stream_options: Extra inputs are not permitted", {},
                           lambda body: "stream_options" not in body),
    "a renamed field": (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead.", {"extra": {"max_tokens": 9}},
        lambda body: body.get("max_completion_tokens") == 9 and "max_tokens" not in body),
    "a place in a list": ([{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "no"}],
                          {"extra": {"seed": 1}}, lambda body: "seed" not in body),
    "reasoning is missing": (
        "thinking is enabled but reasoning_content is missing in assistant tool call message", {},
        lambda body: body["messages"][2].get("reasoning_content") == ""),
    "reasoning is not wanted": (
        "for 'role:assistant' the following must be satisfied[('messages.2' : property "
        "'reasoning_content' is unsupported)]", {"needs_reasoning": True},
        lambda body: "reasoning_content" not in body["messages"][2]),
    "foreign ids": (
        "Tool call id was call_long_id but must be a-z, A-Z, 0-9, with a length of 9.", {},
        lambda body: len(body["messages"][3]["tool_call_id"]) == 9)}


@pytest.mark.parametrize("message, habits, wished", REPAIRS.values(), ids=REPAIRS)
def test_a_refused_request_is_repaired_once_and_remembered(serve, message, habits, wished):
    server = serve(error_reply(400, {"detail" if isinstance(message, list) else "message": message}))
    provider = host(server, **habits)
    _, end = ask(provider, call_and_result())
    assert (end.error.attempts, end.error.delay, wished(server.body())) == (5, 0, False)
    _, end = ask(provider, call_and_result())
    assert (end.error.attempts, wished(server.body())) == (1, True)


@pytest.mark.parametrize("message", [
    "Unsupported parameter: 'messages'", "'tool_calls' is not allowed here", "nothing known",
    "Unsupported parameter: 'temperature'"])
def test_a_refusal_that_no_change_would_cure_is_final(serve, message):
    error = refused(serve(error_reply(400, {"error": {"message": message}})))
    assert (error.kind, error.attempts) == ("invalid_request", 1)


ODD_HISTORIES = {     # habits, messages, what the third and fourth message sent must be like
    "ids longer than 40": ({}, ("c" * 50, "note"), lambda call, result: len(
        call["tool_calls"][0]["id"]) == 9 and call["tool_calls"][0]["id"] == result["tool_call_id"]),
    "names that nobody takes": ({}, ("c", "read file now!"), lambda call, result:
                                call["tool_calls"][0]["function"]["name"] == "read_file_now_")}


@pytest.mark.parametrize("habits, call, right", ODD_HISTORIES.values(), ids=ODD_HISTORIES)
def test_odd_histories_are_made_fit(serve, habits, call, right):
    server = serve(says())
    ask(host(server, **habits), [UserMessage("x"), AssistantMessage("", (ToolCall(*call, {}),)),
                                 ToolResultMessage(call[0], call[1], "ok")])
    assert right(*server.body()["messages"][2:4])


def test_where_a_person_may_not_speak_after_a_tool(serve):
    server = serve(says())
    ask(host(server, answers_tools=True), call_and_result())
    assert [m["role"] for m in server.body()["messages"]][-3:] == ["tool", "assistant", "user"]


def anthropic(server) -> Provider:
    return ta.Anthropic("anthropic", server.url, "claude")


def blocks(*events) -> dict:
    named = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
    return {"chunks": named}


CLAUDE = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1,
                                                    "cache_read_input_tokens": 4}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking",
                                                                  "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta",
                                                          "thinking": "Hm."}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta",
                                                          "signature": "SIG"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Reading."}},
    {"type": "content_block_start", "index": 2, "content_block": {
        "type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta",
                                                          "partial_json": ""}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta",
                                                          "partial_json": '{"path": "a"}'}},
    {"type": "content_block_start", "index": 3, "content_block": {
        "type": "tool_use", "id": "toolu_2", "name": "note", "input": {}}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"}]


def test_anthropic_messages_there_and_back(serve, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = serve(blocks(*CLAUDE))
    provider = ta.Anthropic("anthropic", server.url, "claude", "TEST_KEY")
    _, end = ask(provider)
    message = end.message
    assert (message.content, message.thinking, message.stop_reason) == ("Reading.", "Hm.", "tool_use")
    assert message.tool_calls == (ToolCall("toolu_1", "read_file", {"path": "a"}),
                                  ToolCall("toolu_2", "note", {}))
    assert message.usage == ta.Usage(9, 7, 4)
    ask(provider, [UserMessage("x"), message, ToolResultMessage("toolu_1", "read_file", "1", False),
                   ToolResultMessage("toolu_2", "note", "bad", True), UserMessage("go on")])
    path, headers, body = server.requests[-1]
    assert path == "/v1/messages" and headers["x-api-key"] == KEY and headers["anthropic-version"]
    assert body["max_tokens"] > 0 and body["system"][0]["cache_control"] == {"type": "ephemeral"}
    assert body["tools"][0]["input_schema"]["type"] == "object"
    user, assistant, answer = body["messages"]
    assert [b["type"] for b in assistant["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert assistant["content"][0]["signature"] == "SIG"
    assert [b["type"] for b in answer["content"]] == ["tool_result", "tool_result", "text"]
    assert answer["content"][1]["is_error"] is True
    assert "cache_control" in answer["content"][-1] and "cache_control" not in user["content"][0]


def test_anthropic_is_whole_only_at_message_stop(serve):
    _, end = ask(anthropic(serve(blocks(*CLAUDE[:-1]))))
    assert end.error.kind == "network"


def test_an_anthropic_message_as_one_body(serve):
    body = {"type": "message", "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn",
            "usage": {"input_tokens": 1, "output_tokens": 2}}
    _, end = ask(anthropic(serve({"chunks": [json.dumps(body).encode()]})))
    assert (end.message.content, end.message.usage) == ("hi", ta.Usage(1, 2))


@pytest.mark.parametrize("stop, outcome", [
    ("end_turn", "stop"), ("max_tokens", "length"), ("stop_sequence", "stop"),
    ("refusal", "invalid_request"), ("model_context_window_exceeded", "overflow")])
def test_anthropic_stop_reasons(serve, stop, outcome):
    _, end = ask(anthropic(serve(blocks(
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": stop}}, {"type": "message_stop"}))))
    assert outcome == (end.error.kind if isinstance(end, Failed) else end.message.stop_reason)


def test_a_switch_of_provider_gives_a_history_that_the_new_one_accepts(serve):
    claude = ask(anthropic(serve(blocks(*CLAUDE))))[1].message
    history = [UserMessage("x"), claude, ToolResultMessage("toolu_1", "read_file", "1"),
               ToolResultMessage("toolu_2", "note", "2")]
    server = serve(says())
    ask(host(server, needs_reasoning=True), history)
    sent = server.body()["messages"][2]
    assert "SIG" not in json.dumps(sent) and sent["reasoning_content"] == ""
    odd = [UserMessage("x"), AssistantMessage("", (ToolCall("functions.note:0", "note", {}),)),
           ToolResultMessage("functions.note:0", "note", "ok")]
    server = serve(blocks(*CLAUDE))
    ask(anthropic(server), odd)
    call, result = (m["content"][0] for m in server.body()["messages"][1:])
    assert re.fullmatch(r"[\w-]+", call["id"]) and result["tool_use_id"] == call["id"]


SCRIPTS = {
    "a text": ("hello  world\n", AssistantMessage("hello  world\n")),
    "calls": ([("note", {"text": "x"})], None),
    "a message": (AssistantMessage("x", thinking="t"), AssistantMessage("x", thinking="t")),
    "a function": (lambda messages, tools: f"{len(messages)} {len(tools)}", AssistantMessage("1 7"))}


@pytest.mark.parametrize("reply, message", SCRIPTS.values(), ids=SCRIPTS)
def test_a_scripted_provider_streams_like_any(reply, message):
    events, end = ask(ScriptedProvider([reply]))
    assert isinstance(end, ta.Done) and end.message.provider == "scripted"
    assert "".join(e.delta for e in of(ta.TextDelta, events)) == end.message.content
    assert [e.tool_call for e in of(ta.ToolcallEnd, events)] == list(end.message.tool_calls)
    if message:
        assert end.message.content == message.content


def test_a_script_that_is_over_says_so():
    _, end = ask(ScriptedProvider([]))
    assert isinstance(end, Failed) and "ScriptedProvider" in end.error.hint


DEMOS = {
    "create fib.py that prints the first 10 Fibonacci numbers, then run it": "34",
    "make sub/f.py which prints 3 Fibonacci numbers": "sub/f.py",
    "read story.txt": "Once",
    "read the file story.txt and say what it holds": "Once",
    "what is in story.txt?": "Once",
    "count the lines of story.txt": "has 3 lines",
    "how many lines are in story.txt?": "has 3 lines",
    "find where greet is defined": "code.py, line 2",
    "where is the function greet defined?": "code.py, line 2",
    "run echo hello": "hello",
    "run the command `echo a b`": "a b",
    "read nothing.txt": "did not work",
    "find where nothing_like_it is defined": "no definition",
    "sing a song": "create fib.py"}


@pytest.mark.parametrize("task, words", DEMOS.items(), ids=DEMOS)
def test_the_demo_model_can_do_what_it_says(tmp_path, task, words):
    (tmp_path / "story.txt").write_text("Once\nupon\na time\n")
    (tmp_path / "code.py").write_text("import os\ndef greet(name):\n    return name\n")
    for again in range(2):           # it decides from the request, so it can do everything twice
        events, agent = run_agent(ta.PROVIDERS["demo"].using(), tmp_path, task)
        assert words in events[-1].answer and events[-1].reason == "stop"


# ─── Tool schemas ────────────────────────────────────────────────────────────────────────────────

@ta.tool
def sample(text: str, count: int = 1, share: float = 0.5, loud: bool = False,
           names: list[str] = [], more: dict = {}, kind: typing.Literal["a", "b"] = "a",
           maybe: typing.Optional[int] = None, other: str | None = None) -> str:
    """Does a thing.

    It really does.
    text: what to say,
      in one line
    count: how often
    """
    return repr((text, count, share, loud, names, more, kind, maybe, other))


def test_a_schema_comes_from_signature_and_docstring():
    schema = ta.tool_schema(sample)
    assert (schema["name"], schema["description"]) == ("sample", "Does a thing.\n\nIt really does.")
    properties = schema["parameters"]["properties"]
    assert properties["text"] == {"type": "string", "description": "what to say, in one line"}
    assert properties["names"] == {"type": "array", "items": {"type": "string"}}
    assert properties["kind"] == {"type": "string", "enum": ["a", "b"]}
    assert [properties[n]["type"] for n in ("count", "share", "loud", "more", "maybe", "other")] == [
        "integer", "number", "boolean", "object", "integer", "string"]
    assert schema["parameters"]["required"] == ["text"]


def no_form(when: datetime.date):
    """Bad."""


def no_type(when):
    """Bad."""


def many(*when: str):
    """Bad."""


@pytest.mark.parametrize("function, words", [(no_form, "when of no_form.*date"),
                                             (no_type, "when of no_type.*without a type"),
                                             (many, r"many cannot have \*when")])
def test_what_has_no_json_form_is_refused_by_name(function, words):
    with pytest.raises(TypeError, match=words):
        ta.tool_schema(function)


def test_annotations_that_are_text_and_no_docstring_are_fine():
    def late(text: "str", maybe: "int | None"):
        return text, maybe
    schema = ta.tool_schema(late)
    assert schema["parameters"]["properties"] == {"text": {"type": "string"},
                                                  "maybe": {"type": "integer"}}
    assert schema["parameters"]["required"] == ["text"] and schema["description"] == ""
    assert ta.check_arguments(late, {"text": "x"}) == {"text": "x", "maybe": None}


def test_items_may_be_optional_and_literals_are_of_one_kind():
    assert ta.fit([1, None, "2"], list[typing.Optional[int]]) == [1, None, 2]
    for kind in (typing.Literal[None, "a"], typing.Literal[1, "a"]):
        with pytest.raises(TypeError):
            ta.type_schema(kind)


def test_a_literal_is_taken_as_its_own_kind():
    assert ta.fit("2", typing.Literal[1, 2]) == 2 and type(ta.fit(2, typing.Literal[1, 2])) is int
    for value in (2.0, True, "3"):
        with pytest.raises(ValueError):
            ta.fit(value, typing.Literal[1, 2])


@pytest.mark.parametrize("name, given, taken", [
    ("count", "5", 5), ("count", 5.0, 5), ("count", "2.0", 2), ("share", "0.25", 0.25),
    ("share", 1, 1.0), ("loud", "true", True), ("loud", "False", False), ("names", '["a"]', ["a"]),
    ("more", '{"a": 1}', {"a": 1}), ("kind", "b", "b"), ("maybe", "7", 7), ("count", 10 ** 20,
                                                                           10 ** 20),
    ("count", "9007199254740993", 9007199254740993)])
def test_arguments_that_can_only_mean_one_thing_are_taken(name, given, taken):
    assert ta.check_arguments(sample, {"text": "x", name: given}) == {"text": "x", name: taken}


@pytest.mark.parametrize("name", ["count", "share", "maybe", "other", "kind", "names"])
def test_null_leaves_an_optional_argument_out(name):
    assert ta.check_arguments(sample, {"text": "x", name: None, "junk": None}) == {"text": "x"}


@pytest.mark.parametrize("arguments, words", [
    ({}, "'text' is missing"), ({"text": None}, "'text' is missing"), ({"text": 5}, "a text"),
    ({"text": "x", "count": "many"}, "a whole number"), ({"text": "x", "count": True}, "whole"),
    ({"text": "x", "count": 1.5}, "whole"), ({"text": "x", "count": []}, "whole"),
    ({"text": "x", "count": float("inf")}, "whole"), ({"text": "x", "share": "nan"}, "a number"),
    ({"text": "x", "loud": "maybe"}, "true or false"), ({"text": "x", "names": "a"}, "a list"),
    ({"text": "x", "names": [1]}, "a text"), ({"text": "x", "kind": "c"}, "'a', 'b'"),
    ({"text": "x", "share": "Infinity"}, "a number"),
    ({"text": "x", "share": 10 ** 400}, "a number"), ({"text": "a\ud800"}, "whole characters"),
    ({"text": "x", "more": []}, "an object"), ({"words": "x"}, "'words'")])
def test_other_arguments_are_answered_with_the_right_form(arguments, words):
    with pytest.raises(ToolError) as error:
        ta.check_arguments(sample, arguments)
    assert words in str(error.value) and "sample(text: str, count: int = 1" in str(error.value)


# ─── Workspace and tools ─────────────────────────────────────────────────────────────────────────

def use(folder, name, /, limit=16000, **arguments) -> str:
    """The content that a tool gives; a ToolError is raised."""
    workspace = Workspace(folder, limit=limit, outputs=folder.parent / "outputs")
    outcome = workspace.tools()[name](**arguments)
    if not isinstance(outcome, (str, ta.Outcome)):
        try:
            while True:
                next(outcome)
        except StopIteration as end:
            outcome = end.value
    return outcome if isinstance(outcome, str) else outcome.content


@pytest.fixture
def ws(tmp_path):
    folder = tmp_path / "ws"
    folder.mkdir()
    return folder


def test_read_file_numbers_its_lines_and_says_how_to_go_on(ws):
    (ws / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 1001)))
    text = use(ws, "read_file", path="a.txt")
    assert text.startswith("     1\tline 1\n") and "   400\tline 400\n" in text
    assert text.endswith("[lines 1-400 of 1000, 600 more: read on with offset=401]")
    assert use(ws, "read_file", path="a.txt", offset=999) == \
        "   999\tline 999\n  1000\tline 1000\n[lines 999-1000 of 1000]"
    short = Workspace(ws, limit=1000).read_file("a.txt")
    assert len(short) <= 1000 and re.search(r"lines 1-\d+ of 1000, \d+ more: read on with offset=\d+]$", short)


READINGS = {
    "empty": (b"", "is empty"), "no final newline": (b"a\nb", "     2\tb"),
    "CRLF": (b"a\r\nb\r\n", "     1\ta\n     2\tb\n"), "BOM": (b"\xef\xbb\xbfa\n", "     1\ta\n"),
    "odd bytes": (b"caf\xe9\n", "caf\ufffd"), "form feeds": (b"a\x0cb\xe2\x80\xa8c\n", "     1\ta"),
    "one long line": (b"x" * 50000, "(this line has 50,000 characters)")}


@pytest.mark.parametrize("data, words", READINGS.values(), ids=READINGS)
def test_what_read_file_makes_of_files(ws, data, words):
    (ws / "f").write_bytes(data)
    text = use(ws, "read_file", path="f")
    assert words in text and len(text) <= 16100


def test_files_that_are_not_text_are_named_not_dumped(ws):
    (ws / "b.bin").write_bytes(b"a\0b")
    (ws / "d").mkdir()
    with open(ws / "big", "wb") as file:
        file.truncate(ta.MAX_FILE + 1)
    for path, words in (("b.bin", "binary file of 3 bytes"), ("d", "is a folder"),
                        ("big", "too large"), (".", "is a folder")):
        with pytest.raises(ToolError, match=words):
            use(ws, "read_file", path=path)


@posix
def test_pipes_do_not_block(ws):
    os.mkfifo(ws / "p")
    (ws / "a").write_text("x")
    for name, arguments in (("read_file", {}), ("write_file", {"content": "x"}),
                            ("replace_in_file", {"old": "a", "new": "b"})):
        with pytest.raises(ToolError, match="regular"):
            use(ws, name, path="p", **arguments)
    assert use(ws, "grep", pattern="x") == "a:1: x"


OUTSIDE = ["../x", "/etc/passwd", "link/x", "dangling", "loop/x", "", "a\0b", "../ws-evil/k"]


@posix
@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_outside_are_refused(ws, path):
    (ws.parent / "ws-evil").mkdir()
    (ws.parent / "ws-evil" / "k").write_text("secret")
    (ws / "link").symlink_to(ws.parent / "ws-evil")
    (ws / "dangling").symlink_to(ws.parent / "ws-evil" / "new")
    (ws / "loop").symlink_to("loop")
    before = sorted(ws.parent.rglob("*"))
    for name, more in (("read_file", {}), ("write_file", {"content": "x"}),
                       ("replace_in_file", {"old": "secret", "new": "y"})):
        with pytest.raises((ToolError, OSError)):
            use(ws, name, path=path, **more)
    assert sorted(ws.parent.rglob("*")) == before


def test_a_path_may_be_written_in_many_ways(ws):
    (ws / "d").mkdir()
    (ws / "d/a.txt").write_text("here")
    for path in ("d/a.txt", "./d//a.txt", "d/../d/a.txt", str(ws / "d/a.txt")):
        assert "here" in use(ws, "read_file", path=path)


@posix
def test_writing_keeps_mode_links_newlines_and_mark(ws):
    (ws / "run.sh").write_text("echo a\n")
    (ws / "run.sh").chmod(0o750)
    (ws / "alias").symlink_to("run.sh")
    (ws / "dos.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    use(ws, "write_file", path="alias", content="echo b\n")
    use(ws, "write_file", path="dos.txt", content="c\nd\n")
    use(ws, "write_file", path="new/deep/f.txt", content="no newline")
    assert (ws / "run.sh").read_text() == "echo b\n" and (ws / "alias").is_symlink()
    assert (ws / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (ws / "dos.txt").read_bytes() == b"\xef\xbb\xbfc\r\nd\r\n"
    assert (ws / "new/deep/f.txt").read_bytes() == b"no newline"
    assert not [p for p in ws.rglob("*") if ".tmp" in p.name]


REPLACEMENTS = {     # (before, old, new, after)
    "one word": (b"a b c\n", "b", "B", b"a B c\n"),
    "over lines": (b"one\ntwo\nthree\n", "one\ntwo", "1\n2", b"1\n2\nthree\n"),
    "CRLF file": (b"one\r\ntwo\r\n", "one\ntwo", "1\nextra\n2", b"1\r\nextra\r\n2\r\n"),
    "mixed newlines stay": (b"a\r\nb\nc\r\n", "b", "B", b"a\r\nB\nc\r\n"),
    "mixed, over lines": (b"a\r\nb\nc\n", "a\nb", "A\nb", b"A\r\nb\nc\n"),
    "no final newline": (b"a\nb", "b", "c", b"a\nc"),
    "odd bytes stay": (b"caf\xe9 x\n", "x", "y", b"caf\xe9 y\n"),
    "mark stays": (b"\xef\xbb\xbfa\n", "a", "b", b"\xef\xbb\xbfb\n"),
    "deleting": (b"a b\n", " b", "", b"a\n"),
    "regex signs are text": (b"f(x)+\\1\n", "(x)+\\1", "\\g<0>", b"f\\g<0>\n")}


@pytest.mark.parametrize("before, old, new, after", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_replacing_touches_nothing_else(ws, before, old, new, after):
    (ws / "f").write_bytes(before)
    use(ws, "replace_in_file", path="f", old=old, new=new)
    assert (ws / "f").read_bytes() == after


@pytest.mark.parametrize("old, new, words", [
    ("x", "y", "found it 3 times, at line 1, 2, 3"), ("absent", "y", "read the file first"),
    ("value = 12", "y", "nearest is line 4: value = 1"), ("", "y", "old is empty"),
    ("x", "x", "same text"), ("aa", "b", "2 times, at line 5, 5")])
def test_a_replacement_must_match_once(ws, old, new, words):
    (ws / "f").write_text("x1\nx2\nx3\nvalue = 1\naaa\n")
    with pytest.raises(ToolError, match=re.escape(words)):
        use(ws, "replace_in_file", path="f", old=old, new=new)
    assert (ws / "f").read_text() == "x1\nx2\nx3\nvalue = 1\naaa\n"


def test_odd_bytes_are_not_overwritten_by_their_stand_in(ws):
    (ws / "f").write_bytes(b"caf\xe9\n")
    with pytest.raises(ToolError, match="replace_in_file"):
        use(ws, "write_file", path="f", content=use(ws, "read_file", path="f")[7:])
    assert (ws / "f").read_bytes() == b"caf\xe9\n"


DIFFS = {     # before, after, lines of the diff that must be there, its most lines
    "one line": ("a\nb\nc\nd\ne\n", "a\nb\nX\nd\ne\n", ["@@ -1,5 +1,5 @@", "-c", "+X"], 9),
    "at the end of a long file": ("x\n" * 9000 + "y", "x\n" * 9000 + "z",
                                  ["@@ -8999,3 +8999,3 @@", "-y", "+z"], 9),
    "in the middle of a long file": ("x\n" * 9000 + "y\n" + "z\n" * 9000,
                                     "x\n" * 9000 + "w\n" + "z\n" * 9000,
                                     ["@@ -8999,5 +8999,5 @@", "-y", "+w"], 9),
    "a line twice": ("a\nb\n", "a\na\nb\n", ["+a"], 6),
    "only ends of lines": ("a\r\nb\r\n", "a\nb\n", ["f: changes this file, only the ends of lines"], 1),
    "only the last newline": ("a\nb\n", "a\nb", ["f: changes this file, only the ends of lines"], 1),
    "nothing": ("a\n", "a\n", ["f: changes this file, to what it is"], 1),
    "too different": ("a\n" * 9000, "b\n" * 9000,
                      ["f: changes this file, 9,000 lines by 9,000; the new ones:", "+b"], 9001)}


def test_previews_say_what_will_fail(ws):
    (ws / "b").write_bytes(b"a\0b")
    (ws / "t").write_text("x\n")
    workspace = Workspace(ws)
    for name, arguments, words in (
            ("write_file", {"path": "b", "content": "x"}, "binary"),
            ("write_file", {"path": "../out", "content": "x"}, "outside"),
            ("replace_in_file", {"path": "t", "old": "absent", "new": "x"}, "not in t")):
        assert "it will fail" in workspace.preview(name, arguments)
        assert words in workspace.preview(name, arguments)
    assert workspace.preview("write_file", {"path": "n", "content": "a\n"}).splitlines() == [
        "n: new file, 1 line", "@@ -0,0 +1 @@", "+a"]


@pytest.mark.parametrize("before, after, lines, most", DIFFS.values(), ids=DIFFS)
def test_diffs(ws, before, after, lines, most):
    (ws / "f").write_bytes(before.encode())
    found = Workspace(ws).diff("f", after).split("\n")
    assert set(lines) <= set(found) and len(found) <= most


def test_a_failed_write_leaves_the_old_file(ws, monkeypatch):
    (ws / "f").write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        use(ws, "write_file", path="f", content="new")
    assert (ws / "f").read_text() == "old" and os.listdir(ws) == ["f"]


@pytest.fixture
def tree(ws):
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/b.txt", ".git/config",
                 "node_modules/x.py", "env/pyvenv.cfg", "env/lib.py", "src/.hidden.py"):
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text("needle\n")
    (ws / "bin.py").write_bytes(b"needle\0")
    return ws


@pytest.mark.parametrize("pattern, names", [
    ("*.txt", ["src/b.txt"]), ("a.py", ["a.py"]), ("**/c.py", ["src/deep/c.py"]),
    ("src/*.py", ["src/.hidden.py", "src/b.py", "src/deep/c.py"]),
    ("**/a.py", ["a.py"]), ("./src/b.*", ["src/b.py", "src/b.txt"])])
def test_find_files(tree, pattern, names):
    assert use(tree, "find_files", pattern=pattern).splitlines() == names


def test_grep_gives_places_and_leaves_out_what_is_not_the_persons(tree):
    found = use(tree, "grep", pattern="need.e").splitlines()
    assert found == [f"{n}:1: needle" for n in ("a.py", "src/.hidden.py", "src/b.py", "src/b.txt",
                                                "src/deep/c.py")]
    assert use(tree, "grep", pattern="needle", path="src/b.py") == "src/b.py:1: needle"
    assert "nothing matches" in use(tree, "grep", pattern="haystack")
    for pattern, path in (("(", "."), ("x", "nowhere"), ("x", "..")):
        with pytest.raises(ToolError):
            use(tree, "grep", pattern=pattern, path=path)


@posix
def test_a_link_that_leads_to_itself_hides_nothing_else(tree):
    (tree / "loop").symlink_to("loop")
    assert "a.py:1: needle" in use(tree, "grep", pattern="needle")
    assert use(tree, "find_files", pattern="a.py") == "a.py"


@posix
def test_ctrl_c_ends_a_costly_pattern(ws):
    (ws / "r.txt").write_text("a" * 40 + "!")
    workspace = Workspace(ws)
    before = signal.signal(signal.SIGINT, lambda *_: workspace.abort.set())
    try:
        # from another process: a match lets no thread of this one run
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            workspace.grep("(a+)+$")
    finally:
        signal.signal(signal.SIGINT, before)


@posix
def test_a_costly_pattern_has_a_limit_in_time(ws, monkeypatch):
    monkeypatch.setattr(ta, "GREP_SECONDS", 0.3)
    (ws / "r.txt").write_text("a" * 40 + "!")
    assert "takes too long" in use(ws, "grep", pattern="(a+)+$")


def test_names_that_look_alike_are_pointed_out(ws):
    (ws / "re\u0301sume\u0301.txt").write_text("x")
    with pytest.raises(ToolError, match=re.escape("re\\u0301sume\\u0301.txt")):
        use(ws, "read_file", path="r\xe9sum\xe9.txt")
    with pytest.raises(ToolError, match="there is no file nothing$"):
        use(ws, "read_file", path="nothing")


@posix
@pytest.mark.parametrize("name", ["read_file", "write_file", "replace_in_file"])
def test_a_link_put_in_between_is_not_followed(ws, monkeypatch, name):
    """The folder is exchanged after its path was checked and before it is opened."""
    outside = ws.parent / "outside"
    for folder in (ws / "d", outside):
        folder.mkdir()
        (folder / "f").write_text("old text")
    real_resolve = Workspace.resolve

    def resolve(self, path, reading=False):
        found = real_resolve(self, path, reading)
        if not (ws / "d").is_symlink() and Workspace.swap:
            (ws / "d").rename(ws / "was")
            (ws / "d").symlink_to(outside)
        return found
    monkeypatch.setattr(Workspace, "swap", True, raising=False)
    monkeypatch.setattr(Workspace, "resolve", resolve)
    more = {"write_file": {"content": "new"}, "replace_in_file": {"old": "old", "new": "new"}}.get(name, {})
    with pytest.raises((ToolError, OSError)):
        use(ws, name, path="d/f", **more)
    assert (outside / "f").read_text() == "old text" and sorted(os.listdir(outside)) == ["f"]


def test_a_key_cut_in_two_by_the_pipe_is_masked():
    ta.SECRETS.add(KEY)
    output = ta.Output(1000, None)
    pieces = [output.add(b"x " + KEY[:7].encode()), output.add(KEY[7:].encode() + b" sk-te"),
              output.add(b"", final=True)]
    assert "".join(pieces) == output.text() == "x [key] sk-te"


bwrap = pytest.mark.skipif(not ta.bubblewrap(), reason="needs bubblewrap, and a system that lets it run")
SANDBOXED = {     # command -> (what its result says, what it must not say)
    "echo x > made; cat made": ("exit status 0", "denied"),
    "touch /etc/x ~/../x 2>&1; echo y > /usr/x": ("Read-only file system", "exit status 0"),
    "f=.e; cat ${f}nv sub/${f}nv": ("ermission denied", "SECRET"),
    "ls -A ~ $AGENT_HOME_X": ("exit status", "canary"),
    "cat /proc/[0-9]*/environ | tr '\\0' '\\n'": ("exit status", "canary"),
    "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", PORT), 2)'": ("Error", "connected"),
    "git init -q . && git status --short && python3 -c 'print(6*7)'": ("42", "fatal"),
    "echo t > /tmp/only_inside_7351; ls /tmp": ("only_inside", "denied"),
    "sleep 60 & echo started": ("started", "time limit")}


@bwrap
@pytest.mark.parametrize("command, said", SANDBOXED.items(), ids=SANDBOXED)
def test_the_sandbox(ws, monkeypatch, command, said):
    home = ws.parent / "me"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id").write_text("canary")
    (ws / "sub").mkdir()
    for name in (".env", "sub/.env"):
        (ws / name).write_text("SECRET")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GROQ_API_KEY", "canary-key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = command.replace("PORT", str(server.getsockname()[1]))
        events, agent = run_agent([[("shell", {"command": command})], "ok"], ws, sandbox="on",
                                  home=ws.parent / "agent")
    [result] = results(agent)
    assert said[0] in result and said[1] not in result, result
    assert not Path("/tmp/only_inside_7351").exists()


@bwrap
def test_plan_mode_holds_commands_read_only(ws):
    rules = [Rule("allow", "shell", "touch *"), *ta.RULES]
    _, agent = run_agent([[("shell", {"command": "touch a"})], "ok"], ws, mode="plan", rules=rules,
                         sandbox="on")
    assert "Read-only" in results(agent)[0] and not (ws / "a").exists()


@bwrap
def test_the_network_is_there_if_asked_for(ws):
    workspace = Workspace(ws)
    workspace.sandboxed = workspace.network = True
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = (f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", "
                   f"{server.getsockname()[1]}), 2); print(\"connected\")'")
        run = workspace.shell(command)
        assert "connected" in "".join(run)


def test_hits_and_names_have_a_limit(ws):
    (ws / "many.txt").write_text("hit\n" * 300 + "y" * 500 + "hit" + "z" * 500)
    for number in range(250):
        (ws / f"f{number}.md").touch()
    hits = use(ws, "grep", pattern="hit").splitlines()
    assert len(hits) == 101 and "narrower" in hits[-1]
    long = use(ws, "grep", pattern="yhit").splitlines()[0]
    assert len(long) < 180 and "yhit" in long
    names = use(ws, "find_files", pattern="*.md").splitlines()
    assert len(names) == 201 and "50 more" in names[-1]


def test_notes_are_lines_of_their_own(ws):
    (ws / "AGENTS.md").write_text("# Notes")
    use(ws, "note", text="tests run\nwith make")
    use(ws, "note", text="second")
    assert (ws / "AGENTS.md").read_text() == "# Notes\n- tests run with make\n- second\n"


SHELLS = {
    "both streams and the status": ("echo out; echo err >&2; exit 3", r"exit status 3 .*out\nerr"),
    "nothing to say": ("true", r"exit status 0"), "a signal": ("kill -9 $$", r"signal 9"),
    "no input": ("cat; read x; echo got:$x", r"got:$"), "odd bytes": ("printf 'ok\\377'", "ok\ufffd"),
    "a cut environment": ("echo ${SECRET_TOKEN:-none} $HOME", "none /"),
    "no such program": ("no_such_program_q", "127")}


@posix
@pytest.mark.parametrize("command, pattern", SHELLS.values(), ids=SHELLS)
def test_shell(ws, monkeypatch, command, pattern):
    monkeypatch.setenv("SECRET_TOKEN", "leaked")
    assert re.search(pattern, use(ws, "shell", command=command), re.S)


def ends(pid) -> bool:
    """Does a process end within two seconds?"""
    for _ in range(100):
        with contextlib.suppress(OSError):
            if Path("/proc/self/stat").exists():
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.02)
                    continue
                return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@posix
def test_a_command_ends_at_its_time_limit_with_all_its_children(ws):
    text = use(ws, "shell", timeout=1,
               command="trap '' TERM; echo before; (trap '' TERM; sleep 60) & echo $! > p; sleep 60")
    assert "before" in text and "time limit of 1 s" in text
    assert ends(int((ws / "p").read_text()))


@posix
def test_a_background_child_does_not_hold_the_call(ws):
    assert "started" in use(ws, "shell", command="sleep 60 & echo started", timeout=30)


@posix
@pytest.mark.parametrize("broken", ["no folder", "full disk"])
def test_output_that_cannot_be_kept_is_clipped_all_the_same(ws, monkeypatch, broken):
    if broken == "no folder":
        (ws.parent / "outputs").write_text("a file")
    else:
        monkeypatch.setattr(ta, "MAX_RESULT", ta.MAX_RESULT)
        real_open = os.fdopen
        monkeypatch.setattr(os, "fdopen", lambda handle, mode="r", **more: real_open(
            os.open("/dev/full", os.O_WRONLY), mode, **more) if "w" in mode and more else
            real_open(handle, mode, **more))
    text = use(ws, "shell", limit=2000, command="seq 1 200000", timeout=20)
    assert text.startswith("exit status 0") and text.endswith("200000")
    assert "could not be kept" in text
    (ws / "many.txt").write_text("hit it\n" * 300)
    assert "characters left out" in Workspace(ws, limit=1000, outputs=ws.parent / "outputs").clip(
        "x" * 5000, "grep")


@posix
def test_long_output_is_clipped_and_kept(ws):
    text = use(ws, "shell", limit=2000, command="echo HEAD; seq 1 20000; echo TAIL")
    assert len(text) <= 2000 and "HEAD" in text and text.endswith("TAIL")
    path = re.search(r"the whole of it is in (\S+),", text)[1]
    whole = Path(path).read_text()
    assert whole.startswith("HEAD\n1\n2\n") and whole.endswith("20000\nTAIL\n")
    assert os.stat(path).st_mode & 0o777 == 0o600
    workspace = Workspace(ws, outputs=Path(path).parent)
    assert "HEAD" in workspace.read_file(path) and ":20001: 20000" in workspace.grep("^20000$", path)


def test_results_of_any_tool_are_clipped(tmp_path):
    @ta.tool
    def flood(text: str = "x") -> str:
        """Says a lot."""
        return text * 60_000

    agent = ta.Agent(ScriptedProvider([[("flood", {})], "ok"]), Workspace(tmp_path, limit=3000),
                     mode="auto")
    agent.tools["flood"] = flood
    list(agent.run("go"))
    assert "flood" in [schema["name"] for schema in agent.provider.requests[0]["tools"]]
    assert 3000 <= len(results(agent)[0]) < 3300 and "57,000 characters left out" in results(agent)[0]


def test_tools_of_a_class_of_ones_own(tmp_path):
    class Mine(Workspace):
        """A workspace with one tool more."""

        @ta.tool
        def shout(self, text: str) -> str:
            """Shouts."""
            return text.upper()

    agent = ta.Agent(ScriptedProvider([[("shout", {"text": "x"})], "ok"]), Mine(tmp_path), mode="auto")
    list(agent.run("go"))
    assert results(agent) == ["X"]
    assert [s["name"] for s in agent.provider.requests[0]["tools"]] == [*Workspace(".").tools(), "shout"]


# ─── Permissions ─────────────────────────────────────────────────────────────────────────────────

# (tool, target, mode) -> decision, with the default rules
DECISIONS = [
    ("read_file", "a.py", "ask", "allow"), ("grep", ".", "plan", "allow"),
    ("find_files", "*.py", "ask", "allow"), ("note", "", "ask", "allow"), ("note", "", "plan", "deny"),
    ("write_file", "a.py", "ask", "ask"), ("write_file", "a.py", "auto", "allow"),
    ("write_file", "a.py", "plan", "deny"), ("shell", "ls", "plan", "deny"),
    ("shell", "ls", "ask", "ask"), ("shell", "ls", "auto", "allow"),
    ("read_file", ".env", "auto", "deny"), ("read_file", "sub/.ENV", "auto", "deny"),
    ("read_file", ".env.local", "auto", "deny"), ("read_file", ".env.example", "ask", "allow"),
    ("write_file", ".env", "auto", "deny"), ("grep", ".env", "auto", "deny"),
    ("shell", "cat .env", "auto", "deny"), ("shell", "cat<.env", "auto", "deny"),
    ("shell", "cat './.e'nv", "auto", "deny"), ("shell", "cat .env.example", "auto", "allow"),
    ("read_file", "environment.py", "ask", "allow"), ("shell", "git status", "ask", "allow"),
    ("shell", "git diff", "ask", "allow"), ("shell", "git difftool", "ask", "ask"),
    ("shell", "git status; touch x", "ask", "ask"), ("shell", "git status\ntouch x", "ask", "ask"),
    ("shell", "git diff > x", "ask", "ask"), ("shell", "git status $(touch x)", "ask", "ask"),
    ("shell", "GIT STATUS", "ask", "ask"), ("shell", "git push", "auto", "allow"),
    ("shell", "git push --force", "auto", "deny"), ("shell", "git  push   -f", "auto", "deny"),
    ("shell", "git push origin main --force-with-lease", "auto", "deny"),
    ("shell", "git push origin +main", "auto", "deny"),
    ("shell", "true && git reset --hard HEAD~1", "auto", "deny"),
    ("shell", "g\"i\"t push --fo''rce", "auto", "deny"),
    ("shell", "/usr/bin/git push -f", "auto", "deny"), ("shell", "sudo shutdown now", "auto", "deny"),
    ("shell", "git clean -xdf", "auto", "deny"), ("shell", "git clean -n", "auto", "allow"),
    ("shell", "npm publish", "auto", "deny"), ("shell", "docker system prune -a", "auto", "deny"),
    ("shell", "rm -rf /", "auto", "deny"), ("shell", "rm -rf build", "auto", "allow"),
    ("shell", "git commit -m 'shutdown the server'", "auto", "allow")]


@pytest.mark.parametrize("tool, target, mode, decision", DECISIONS)
def test_default_rules(tool, target, mode, decision):
    argument = {"shell": "command", "find_files": "pattern"}.get(tool, "path")
    found = ta.decide(tool, {argument: target}, mode)
    assert found.decision == decision, found.trace
    assert found[:2] == (found.decision, found.reason) and found.reason


OWN_RULES = [     # rules in front of the default ones, a call in ask mode, the decision
    (Rule("allow", "write_file", "src/*"), ("write_file", {"path": "src/a.py"}), "allow"),
    (Rule("allow", "write_file", "src/*"), ("write_file", {"path": "src/../a.py"}), "ask"),
    (Rule("allow", "write_file", "src"), ("write_file", {"path": "src/a.py"}), "ask"),
    (Rule("deny", "*", "secrets/*"), ("read_file", {"path": "secrets/k"}), "deny"),
    (Rule("deny", "*", "secrets"), ("read_file", {"path": "a/Secrets/k"}), "deny"),
    (Rule("deny", "*", "app/[id]/*"), ("read_file", {"path": "app/[id]/k"}), "deny"),
    (Rule("ask", "read_file", "src/*"), ("read_file", {"path": "src/a.py"}), "ask"),
    (Rule("allow", "shell", "make *"), ("shell", {"command": "make test"}), "allow"),
    (Rule("allow", "shell", "make *"), ("shell", {"command": "make"}), "allow"),
    (Rule("allow", "shell", "make *"), ("shell", {"command": "makefile"}), "ask"),
    (Rule("allow", "shell", "echo *"), ("shell", {"command": "echo a | sh"}), "ask"),
    (Rule("deny", "shell", "cargo publish *"), ("shell", {"command": "Cargo Publish"}), "deny")]


@pytest.mark.parametrize("rule, call, decision", OWN_RULES, ids=[f"{r[0]}, {r[1][1]}" for r in OWN_RULES])
def test_rules_of_ones_own(tmp_path, rule, call, decision):
    found = ta.decide(*call, "ask", rules=[rule, *ta.RULES], workspace=Workspace(tmp_path))
    assert found.decision == decision, found.trace


@posix
def test_rules_see_where_links_lead(ws):
    (ws / ".env").write_text("x")
    (ws / "notes.txt").symlink_to(".env")
    assert ta.decide("read_file", {"path": "notes.txt"}, workspace=Workspace(ws)).decision == "deny"


@pytest.mark.parametrize("sandbox, mode, decision", [
    ("off", "auto", "allow"), ("none", "auto", "ask"), ("require", "auto", "deny"),
    ("none", "ask", "ask")])
def test_commands_without_a_sandbox(sandbox, mode, decision):
    assert ta.decide("shell", {"command": "ls"}, mode, sandbox=sandbox).decision == decision


def test_what_may_not_be_read_is_not_found_either(ws):
    (ws / ".env").write_text("TOKEN=needle\n")
    (ws / "a.txt").write_text("needle\n")
    events, agent = run_agent([[("grep", {"pattern": "needle"}), ("find_files", {"pattern": "*"})],
                               "ok"], ws)
    assert results(agent) == ["a.txt:1: needle", "a.txt"]


# A command line -> its parts, each as rules compare it.
LINES = {
    "a b;c&&d||e|f|&g&h": ["a b", "c", "d", "e", "f", "g", "h"],
    "a\nb\\\n c": ["a", "b c", "", "a", "b c"],        # in both ways
    "a 'b;c' \"d|e\" f\\ g": ["a b;c d|e f g"],
    "/usr/bin/a b": ["a b"],
    "a # b; c\nd": ["a", "d"],
    "a#b": ["a#b"],
    "a >x 2>&1 <y b": ["a b > x > y"],
    "a &>x; b >|y": ["a > x", "b > y"],
    "x=1 y=2 a": ["a"],
    "a $(b) `c` <(d) \"$(e)\"": ["b", "c", "d", "e", "a    "],
    "a $(b $(c))": ["c", "b ", "a "],
    "a ${x:-$(b)} $y": ["b", "a  $y"],
    "(a; b) && { c; }": ["", "a", "b", "c", "}"],
    "if a; then b; else c; fi": ["a", "b", "c", "fi"],
    "while a; do b; done": ["a", "b", "done"],
    "f() { a; }; function g { b; }": ["f", "", "a", "}", "b", "}"],
    "cat <<E\n$(a)\nE\nb": ["cat", "a", "", "b"],
    "cat <<'E'\n$(a)\nE\nb": ["cat", "b"],
    "cat <<-E; a\n\tx\n\tE\nb": ["cat", "a", "b"],
    "cat <<E | a\nit's \"x\nE": ["cat", "a"],
    "cat <<< \"$(a)\"": ["a", "cat"],
    "sudo -u me a b": ["sudo -u me a b", "a b"],
    "sudo --user me a": ["sudo --user me a", "me a", "a"],
    "env -i X=1 a": ["env -i X=1 a", "a"],
    "timeout -k 1 9 a": ["timeout -k 1 9 a", "a"],
    "nice -n 5 nohup a": ["nice -n 5 nohup a", "nohup a", "a"],
    "find x | xargs -n 1 a": ["find x", "xargs -n 1 a", "a"],
    "sh -c 'a; b'": ["sh -c a; b", "a", "b"],
    "bash -lc \"sh -c 'a'\"": ["bash -lc sh -c 'a'", "sh -c a", "a"],
    "eval a 'b;c'": ["eval a b;c", "a b", "c"],
    "find . -exec a {} \\; -ok b": ["find . -exec a {} ; -ok b", "a {}", "b"],
    "git -C x -c a=b --no-pager push": ["git push"],
    "$'\\x61' b": ["a b"],
    "a {b,c}{d,e} {}": ["a bd be cd ce {}"]}


@pytest.mark.parametrize("line, parts", LINES.items(), ids=[repr(line) for line in LINES])
def test_command_lines_are_split_as_a_shell_would(line, parts):
    assert [str(part) for part in ta.CommandLine(line).read()] == parts


ODD_LINES = {   # that must neither break nor hold up the decision
    "nothing": "", "an empty word": "''", "a backslash": "\\", "a backquote": "`", "brackets": "(" * 3000,
    "substitutions": "$(" * 3000, "quoted ones": '"$(' * 3000, "defaults": "${x:-" * 3000,
    "wrappers": "sudo " * 3000 + "a", "evals": "eval " * 3000, "finds": "find -exec " * 2000 + "a",
    "a long word": "a" * 10 ** 6, "many commands": "a;" * 20000, "many words": "a " * 50000,
    "many dollars": "cat <<E\n" + "$5 x\n" * 20000 + "E", "many backquotes": "`a` " * 5000}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_no_line_breaks_or_holds_up_the_decision(ws, line):
    found = ta.decide("shell", {"command": line}, "auto", workspace=Workspace(ws))
    assert found.decision in ("allow", "deny") and found.reason


BROKEN_LINES = ["a 'b", 'a "b', "a $(b", "a `b", "(a", "a)", "cat <<E", "cat <<E\nx", "a ${b", "a \\"]


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_what_is_not_understood_is_never_allowed_by_a_rule(line):
    rules = [Rule("allow", "shell"), Rule("allow", "shell", "a *"), Rule("allow", "shell", "cat *")]
    decision = ta.decide("shell", {"command": line + " && a"}, rules=rules)
    assert decision.decision == "ask" or line.endswith("\\"), decision


@posix
@pytest.mark.parametrize("line", [line for line in LINES if "\n" not in line and "function" not in line])
def test_the_lines_of_the_table_are_ones_that_a_shell_reads(line):
    done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PUSH = "git push -f"
HIDING = ["{}", "a; {}", "a && {}", "a | {}", "a & {}", "a\n{}", "({})", "{{ {}; }}", "x=$({})", "a `{}`",
          "diff <({}) b", "sudo {}", "sudo -u root {}", "env A=1 {}", "timeout 5 {}", "nohup {} &",
          "xargs {}", "sh -c '{}'", "bash -c \"cd x; {}\"", "find . -exec {} \\;", "eval '{}'", "ssh h {}",
          "if a; then {}; fi", "for x in a; do {}; done", "while a; do {}; done", "! {}", "A=1 {}",
          "a ${{x:-$({})}}", "a \"$(b \"$({})\")\"", "cat <<E\n$({})\nE", "cat <<E; {}\nx\nE",
          "f() {{ {}; }}", "case x in y) {};; esac", "time -p {}", ">x {}", "{} > x", "a # b\n{}",
          "\\\n{}", "env -S '{}'", "env --split-string='{}'", "echo \"5$\"; {}", "echo \"$'\"; {}; echo \"'\"",
          "echo $((1<<2))\n{}", "(( x = 1 << 2 ))\n{}", "echo $[1<<2]\n{}", "echo ${{x:-'}}'}}; {}",
          "echo ${{x:-\"}}\"}}; {}", "echo ${{x:-<({})}}", "echo \"$(case a in a) {};; esac)\"",
          "bash -cx '{}'", "bash -c -- '{}'", "bash -co pipefail '{}'", "bash <<E\n{}\nE", "bash <<'E'\n{}\nE",
          "bash <<< '{}'", "cat <<E | bash\n{}\nE", "echo '{}' | bash", "echo {} | sh -s", "coproc X {{ {}; }}",
          "cat <<E\nx\\\nE\n'\nE\n{}", "cat <<${{E}}\nx\n${{E}}\n{}", "cat <<E\n\\\"$({})\nE",
          "a $(cat <<E\nx\nE); {}", "echo \"`sh -c \\\"{}\\\"`\"", "env -iu X {}", "timeout -vk 1 5 {}",
          "timeout --kill-after 1 --signal KILL 5 {}", "xargs -0n 1 {}", "exec -cla foo {}", "flock f -c '{}'",
          "script -qc '{}'", "trap '{}' EXIT", "unshare -r {}", "taskset 1 {}", "alias g='{}'",
          "find . -exec sudo {} \\; -exec true +", "watch -n 1 {}", "a " + "b; " * 3000 + "{}"]
SPELLINGS = ["git push --force", "git  push\t-f", "git 'push' -f", "g\"i\"t push --fo''rce", "\\git push -f",
             "/usr/bin/git push -f", "./git push -f", "git -C . push -f", "git -c a.b=c push -f",
             "git --no-pager push -f", "git push -uf origin main", "git push origin main -f",
             "git push --force-with-lease", "git push --forc", "GIT PUSH --FORCE", "git push origin +main",
             "git push --mirror", "$'git' push -f", "{git,push,-f}", "git push -{f,u}", "git {push,-f}",
             "git push --fo", "git --attr-source x push -f", "{fd}>x git push -f", "{fd}<<E cat\nx\nE\ngit push -f", "git 2> \\\n x push -f",
             "a[b[0]]=1 git push -f", "$'git' push $'-f\\0zz'"]


@pytest.mark.parametrize("line", [*(place.format(PUSH) for place in HIDING), *SPELLINGS],
                         ids=lambda line: repr(line[:40]))
def test_a_forced_push_is_denied_wherever_and_however_it_is_written(line):
    assert ta.decide("shell", {"command": line}, "auto").decision == "deny"


ORDINARY = ["git push", "git push -u origin feature-f", "git push origin follow-force", "git clean -n",
            "git reset a.txt", "git commit -m 'git push -f'", "echo git push -f", "grep -rn halt src",
            "grep -r 'rm -rf /' .", "rm -rf build/", "rm -rf ./node_modules", "npm test", "npm run publish-docs",
            "docker ps", "docker build -t x .", "python3 -m pytest -q", "make -j4", "ls -la *.py",
            "cat a.txt | head -5", "for f in *.py; do wc -l $f; done", "cd src && make", "dd if=a of=b",
            "echo $(date) > log.txt", "cat .env.example", "find . -name '*.py' -exec wc -l {} +",
            "git log --oneline | head", "python3 - <<'E'\nprint('rm -rf /')\nE", "cp environment.py x",
            "sed -i s/a/b/ f", "git stash", "shellcheck x.sh", "npm install --force", "rm -r x"]


@pytest.mark.parametrize("line", ORDINARY, ids=repr)
def test_ordinary_commands_of_a_working_day_pass_in_auto_mode(line):
    assert ta.decide("shell", {"command": line}, "auto").decision == "allow"


DESTRUCTIVE = ["git reset --hard", "git reset HEAD~1 --hard", "git clean -xdf", "git clean -d --force",
               "npm --silent publish", "cargo publish", "docker -D system prune -a", "shutdown -h now",
               "reboot", "sudo poweroff", "mkfs.ext4 /dev/sda1", "dd if=x of=/dev/sda", "cat x > /dev/sda",
               "rm -rf /", "rm -fr /*", "rm -r -f ~", "rm -rf ~/", "rm -rf $HOME", "rm -R /",
               "rm --recursive --force /", "rm -rf build /"]


@pytest.mark.parametrize("line", DESTRUCTIVE)
def test_destructive_commands_are_denied_in_every_mode(line):
    assert {ta.decide("shell", {"command": line}, mode).decision for mode in ta.MODES} == {"deny"}


ALLOWED = {     # with `echo *` and `make test` allowed: a line -> the decision in ask mode
    "echo hi": "allow", "echo 'a; b | c > d'": "allow", "echo \"x && y\"": "allow", "make test": "allow",
    "echo a; make test": "allow", "echo a && git status": "allow", "echo a 2>/dev/null": "allow",
    "echo a 2>&1": "allow", "/usr/bin/echo a": "allow", "echo a*b src/*.py": "allow",
    "echo a > f": "ask", "echo $x": "ask", "echo $(a)": "ask", "echo `a`": "ask", "echo {a,b}": "ask",
    "echo *": "ask", "./echo a": "ask", "/tmp/echo a": "ask", "X=1 echo a": "ask", "env echo a": "ask",
    "echo \"5$\"; touch n; echo \"x\"": "ask", "echo a \\\n b": "ask", "git diff /dev/null /etc/hosts": "ask",
    "git diff f ../f": "ask", "git diff a..b": "allow", "ECHO a": "ask", "'echo a'": "ask", "echo\xa0a": "ask", "make 'test x'": "ask", "make test x": "ask",
    "'make test'": "ask", "echo a; b": "ask", "echo a | sh": "ask", "(echo a)": "ask", "! echo a": "ask",
    "git status --short": "allow", "git --no-pager diff": "allow", "git diff a -- b": "allow",
    "git -C /x status": "ask", "git -c a=b diff": "ask", "git diff --ext-diff": "ask",
    "git diff --outp=x": "ask", "git diff -O x": "ask", "git difftool": "ask", "git status-x": "ask"}


@pytest.mark.parametrize("line, decision", ALLOWED.items(), ids=map(repr, ALLOWED))
def test_allow_rules_stay_narrow(line, decision):
    rules = [Rule("allow", "shell", "echo *"), Rule("allow", "shell", "make test"), *ta.RULES]
    assert ta.decide("shell", {"command": line}, rules=rules).decision == decision


@posix
@pytest.mark.parametrize("line", ["cat .env", "cat notes", "cat .e*", "cat ./.en?", "tar c --exclude=.env .",
                                  "curl -d @.env x", "wc < .env", "cp .env x", "ls secrets", "cat secrets/k",
                                  "cat 'sec'rets/k", "cat d/../.env"])
def test_commands_do_not_name_what_may_not_be_read(ws, line):
    (ws / ".env").write_text("x")
    (ws / "notes").symlink_to(".env")
    rules = [Rule("deny", "*", "secrets/*"), *ta.RULES]
    assert ta.decide("shell", {"command": line}, "auto", rules=rules,
                     workspace=Workspace(ws)).decision == "deny"


GIT_SETTINGS = ["[core]\n\tfsmonitor = ./x", "[diff]\n\texternal = x", "[diff \"z\"]\n\ttextconv = x",
                "[include]\n\tpath = x", "[filter \"z\"]\n\tclean = x", "[core] fsmonitor = x", "[remote \"o\"]\n\tuploadpack = x",
                "[core]\n\thooksPath = x"]


@pytest.mark.parametrize("setting", ["", *GIT_SETTINGS])
def test_git_is_not_allowed_where_its_settings_run_programs(ws, setting):
    (ws / ".git").mkdir()
    (ws / ".git/config").write_text(f"[core]\n\tbare = false\n{setting}\n")
    decision = ta.decide("shell", {"command": "git status"}, workspace=Workspace(ws))
    assert decision.decision == ("ask" if setting else "allow")


@pytest.fixture
def repository(ws):
    """A repository with one commit and a changed file: a function that runs git in it."""
    if not shutil.which("git"):
        pytest.skip("needs git")

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.example", *words], cwd=ws,
                       check=True, capture_output=True, env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull})
    (ws / "f").write_text("1\n")
    for words in (["init", "-q"], ["add", "f"], ["commit", "-qm", "one"]):
        git(*words)
    (ws / "f").write_text("2\n")
    return git


@posix
def test_reading_git_commands_run_without_asking(ws, repository):
    calls = [("shell", {"command": "git diff"}), ("shell", {"command": "git status --short"}),
             ("shell", {"command": "git commit -am two"})]
    _, agent = run_agent([calls, "ok"], ws, mode="ask")
    diff, status, commit = results(agent)
    assert "+2" in diff and " M f" in status and commit.startswith("denied: ")


@posix
@pytest.mark.parametrize("setting", ["diff.external", "core.fsmonitor", "diff.zz.textconv"])
def test_no_setting_of_a_repository_makes_them_run_a_program(ws, repository, setting):
    (ws / "x.sh").write_text("#!/bin/sh\ntouch pwned\n")
    (ws / "x.sh").chmod(0o755)
    (ws / ".gitattributes").write_text("f diff=zz\n")
    repository("config", setting, "./x.sh")
    calls = [("shell", {"command": "git diff"}), ("shell", {"command": "git status"})]
    _, agent = run_agent([calls, "ok"], ws, mode="ask")
    assert not (ws / "pwned").exists() and all(r.startswith("denied: ") for r in results(agent))


def test_the_derivation_names_every_part():
    decision = ta.decide("shell", {"command": "git status; rm -rf / > x"}, "auto")
    assert [(p["text"], p["decision"], p["rule"]) for p in decision.parts] == [
        ("git status", "allow", "allow shell git status *"), ("rm -rf / > x", "deny", "deny shell rm -r /")]
    assert str(decision.rule) == "deny shell rm -r /" and "rm -r /" in decision.reason


# ─── Hooks ───────────────────────────────────────────────────────────────────────────────────────

def hooked(folder, moment, function, replies=([("write_file", {"path": "a", "content": "x"})], "ok")):
    agent = ta.Agent(ScriptedProvider(replies), Workspace(folder), mode="auto")
    agent.hooks.on(moment)(function)
    return list(agent.run("go")), agent


def test_a_hook_can_veto(tmp_path):
    events, agent = hooked(tmp_path, "before_tool", lambda name, args: f"not {name} {args['path']}")
    assert results(agent) == ["denied: not write_file a"] and not (tmp_path / "a").exists()
    assert of(ta.ToolStart, events)[0].decision == "deny"


@pytest.mark.parametrize("moment, arguments", ta.MOMENTS.items())
def test_every_moment_calls_its_hooks(tmp_path, moment, arguments):
    seen = []
    hooked(tmp_path, moment, lambda *values: seen.append(values))
    assert len(seen) == 1 and len(seen[0]) == len(arguments.split(", "))


@pytest.mark.parametrize("moment", ta.MOMENTS)
def test_a_hook_that_fails_vetoes_before_a_tool_and_is_reported_elsewhere(tmp_path, moment):
    def broken(*arguments):
        raise RuntimeError("oops")
    events, agent = hooked(tmp_path, moment, broken)
    assert events[-1].reason == "stop"
    if moment == "before_tool":
        assert results(agent)[0].startswith("denied: ") and not (tmp_path / "a").exists()
    else:
        assert "oops" in of(ta.Warned, events)[0].message and (tmp_path / "a").exists()


def test_a_hook_without_a_name_may_fail_too(tmp_path):
    import functools
    events, agent = hooked(tmp_path, "run_end", functools.partial(int, "x"))
    assert "failed" in of(ta.Warned, events)[0].message


def test_a_hook_cannot_change_what_was_shown(tmp_path):
    hooked(tmp_path, "before_tool", lambda name, args: args.update(content="changed"))
    assert (tmp_path / "a").read_text() == "x"


def test_an_unknown_moment_is_refused():
    with pytest.raises(ValueError, match="before_tool"):
        ta.Hooks().on("never")


# ─── Session ─────────────────────────────────────────────────────────────────────────────────────

def new_session(folder) -> Session:
    return Session.new(folder / "home", folder)


def talk(session, *texts):
    """Adds user and assistant messages in turn; gives the entries."""
    return [session.append(UserMessage(t) if n % 2 == 0 else AssistantMessage(t))
            for n, t in enumerate(texts)]


def said(session) -> list[str]:
    return [entry.message.content for entry in session.active_path() if entry.message]


def test_the_file_is_made_with_the_first_answer(tmp_path):
    session = new_session(tmp_path)
    session.append(UserMessage("one"))
    session.append(AssistantMessage("half", stop_reason="error", error_message="cut"))
    assert session.file is None and not list(tmp_path.rglob("*.jsonl"))
    session.append(AssistantMessage("two"))
    entries = [json.loads(line) for line in Path(session.file).read_bytes().splitlines()]
    assert [e["type"] for e in entries] == ["header", "message", "message", "message"]
    assert [e["parent_id"] for e in entries] == [None, *(e["id"] for e in entries[:-1])]
    assert entries[0]["version"] == 1 and entries[0]["cwd"] == str(tmp_path)
    assert all(re.fullmatch(r"[0-9a-f]{8,}", e["id"]) for e in entries)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", e["timestamp"]) for e in entries)


@posix
def test_files_and_folders_are_private(tmp_path):
    before = os.umask(0)
    try:
        session = new_session(tmp_path)
        talk(session, "a", "b")
    finally:
        os.umask(before)
    for path in [tmp_path / "home", *(tmp_path / "home").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_a_tree_is_walked_and_survives_loading(tmp_path):
    session = new_session(tmp_path)
    u1, a1, u2, a2 = talk(session, "u1", "a1", "u2", "a2")
    session.set_leaf(a1.id)
    talk(session, "u3", "a3")
    assert said(session) == ["u1", "a1", "u3", "a3"]
    assert [c.message.content for c in session.children(a1.id) if c.message] == ["u2", "u3"]
    session.set_leaf(a1.id)
    session.close()
    again = Session.load(session.path)
    assert said(again) == ["u1", "a1"] and again.entries == session.entries
    assert [c.id for c in again.children(u1.id)] == [a1.id]
    with pytest.raises(KeyError):
        again.set_leaf("nowhere")


def test_odd_characters_and_unknown_types_survive(tmp_path):
    session = new_session(tmp_path)
    talk(session, "a\u2028b\ud83d\x00 日本", "b")
    session.append("something_new", value=1)
    session.close()
    data = session.path.read_bytes()
    assert data.isascii() and data.count(b"\n") == 4
    again = Session.load(session.path)
    assert said(again) == ["a\u2028b\ud83d\x00 日本", "b"] and again.entries[-1].data == {"value": 1}


def test_a_file_cut_at_any_byte_loads_and_goes_on(tmp_path):
    session = new_session(tmp_path)
    talk(session, "u1", "a1", "u2", "a2")
    session.close()
    data = session.path.read_bytes()
    first = data.index(b"\n")
    for end in range(first, len(data) + 1):
        session.path.write_bytes(data[:end])
        again = Session.load(session.path)
        whole = data[:end].count(b"\n") + (data[end:end + 1] == b"\n") - 1
        assert said(again) == ["u1", "a1", "u2", "a2"][:whole]
        talk(again, "new")
        again.close()
        after = session.path.read_bytes()
        assert after.startswith(data[:end])
        last = Session.load(session.path)
        assert said(last)[-1] == "new" and len(said(last)) == whole + 1
        last.close()


DAMAGES = {"half a line": b'{"type":"mess', "NUL bytes": b"\0" * 99, "a number": b"42",
           "not UTF-8": b'{"type":"message","x":"\xff"}', "no message": b'{"type":"message","id":"00",'
           b'"parent_id":null,"timestamp":"","message":{"role":"x"}}', "nested": b"[" * 100_000,
           "a parent that is a list": b'{"type":"x","id":"00","parent_id":[],"timestamp":""}',
           "a compaction without a summary": b'{"type":"compaction","id":"00","parent_id":null,'
           b'"timestamp":""}',
           "a second header": b'{"type":"header","id":"00","parent_id":null,"timestamp":"","version":1}'}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_named_and_the_rest_is_kept(tmp_path, damage):
    session = new_session(tmp_path)
    talk(session, "u1", "a1", "u2", "a2")
    session.close()
    lines = session.path.read_bytes().split(b"\n")
    lines[2] = damage
    session.path.write_bytes(b"\n".join(lines))
    again = Session.load(session.path)
    assert said(again) == ["u1", "u2", "a2"] and "could not be read are skipped: 3" in again.notes[0]


@pytest.mark.parametrize("data", [b"", b"hello\n", b'{"type":"message"}\n', b"\0\0\0", b"[1]\n",
                                  b'\n{"type":"header","id":"1","parent_id":null,"timestamp":"",'
                                  b'"version":1}\n'])
def test_what_is_no_session_is_refused_and_not_touched(tmp_path, data):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(ta.SessionError):
        Session.load(path)
    assert path.read_bytes() == data


HEADERS = {"a parent": {"parent_id": "zz"}, "itself as parent": {"parent_id": "h"},
           "tools that are none": {"tools": 5}, "tools that are odd": {"tools": [1, {}]}, "a prompt that is none": {"system": [1]},
           "a folder that is none": {"cwd": 7}}


@pytest.mark.parametrize("odd", HEADERS.values(), ids=HEADERS)
def test_odd_headers_do_no_harm(tmp_path, odd):
    header = {"type": "header", "id": "h", "parent_id": None, "timestamp": "", "version": 1, **odd}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(header) + "\n")
    events, agent = run_agent(["fine"], tmp_path, session=Session.load(path))
    assert events[-1].answer == "fine" and len(agent.session.active_path()) == 3
    assert isinstance(agent.provider.requests[0]["system"], str)
    agent.session.close()


@pytest.mark.parametrize("version", ['"1"', "null", "[]"])
def test_a_version_that_is_no_number_is_no_session(tmp_path, version):
    path = tmp_path / "x.jsonl"
    path.write_text('{"type":"header","id":"h","parent_id":null,"timestamp":"","version":%s}\n' % version)
    with pytest.raises(ta.SessionError):
        Session.load(path)


@posix
def test_a_full_disk_leaves_no_empty_session_behind(tmp_path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: 0)
    session = new_session(tmp_path)
    talk(session, "u1", "a1")
    monkeypatch.setattr(os, "write", real_write)
    assert "cannot be written" in session.problem and not list(tmp_path.rglob("*.jsonl"))
    assert said(session) == ["u1", "a1"]


def line(kind, id, parent, **data) -> str:
    return json.dumps({"type": kind, "id": id, "parent_id": parent, "timestamp": "", **data})


def message_line(id, parent, text, role="user") -> str:
    return line("message", id, parent, message={"role": role, "content": text})


ODD_LINES = {     # lines after a header h and a message u; what is said then, what the notes tell
    "a type that nobody knows": ([line("dream", "x", "u"), message_line("v", "u", "more")],
                                 ["u", "more"], "unknown types are kept and ignored: dream"),
    "a parent that is missing": ([message_line("v", "gone", "more")], ["u", "more"],
                                 "parent is not there follow the one before: 3"),
    "its own parent": ([message_line("v", "v", "more")], ["u", "more"], "follow the one before: 3"),
    "parents in a ring": ([message_line("v", "w", "more"), message_line("w", "v", "most")],
                          ["u", "more", "most"], "follow the one before: 3"),
    "an id twice": ([message_line("u", "h", "twin"), message_line("v", "u", "more")], ["u", "more"],
                    "could not be read are skipped: 3"),
    "no id": ([json.dumps({"type": "message", "parent_id": "u", "timestamp": "",
                           "message": {"role": "user", "content": "x"}}),
               message_line("v", "u", "more")], ["u", "more"], "are skipped: 3"),
    "NUL bytes before a line": (["\0" * 40 + message_line("v", "u", "more")], ["u", "more"], ""),
    "NUL bytes at the end": ([message_line("v", "u", "more"), "\0" * 40], ["u", "more"], "skipped: 4"),
    "a leaf that is nowhere": ([line("leaf", "x", "gone"), message_line("v", "u", "more")],
                               ["u", "more"], "follow the one before: 3"),
    "files of a rewind that are none": ([line("leaf", "x", "u", files=[1, {"path": 2}], from_id=7),
                                         message_line("v", "u", "more")], ["u", "more"], ""),
    "a label that is none": ([line("label", "x", "u", label=[1])], ["u"], "")}


@pytest.mark.parametrize("lines, expected, note", ODD_LINES.values(), ids=ODD_LINES)
def test_what_is_sound_is_loaded_and_the_rest_is_told(tmp_path, lines, expected, note):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([line("header", "h", None, version=1), message_line("u", "h", "u"), *lines]))
    session = Session.load(path)
    assert said(session) == expected and note in " ".join(session.notes)
    assert bool(session.notes) is bool(note)
    for entry in list(session.entries):       # nothing that a file holds breaks walking it
        session.changes(session.moment(entry).position)
    ta.draw_tree(session)
    session.append(UserMessage("new"))
    session.close()
    again = Session.load(path)
    assert said(again) == [*expected, "new"]
    again.close()


def test_a_file_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(line("header", "h", None, version=2) + "\n" + message_line("u", "h", "u") + "\n")
    session = Session.load(path)
    assert said(session) == ["u"] and "newer version" in session.notes[0]
    session.close()


def test_a_line_of_50_megabytes_is_a_line(tmp_path):
    session = new_session(tmp_path)
    talk(session, "x" * 50_000_000, "a")
    session.close()
    again = Session.load(session.path)
    assert [len(text) for text in said(again)] == [50_000_000, 1] and not again.notes
    again.close()


@pytest.mark.parametrize("length", [10, 2000])
def test_an_entry_is_one_write_whatever_the_length(tmp_path, monkeypatch, length):
    session, writes, real_write = new_session(tmp_path), [], os.write
    talk(session, *["x"] * length)
    monkeypatch.setattr(os, "write", lambda handle, data: writes.append(data) or real_write(handle, data))
    session.append(UserMessage("y" * 100_000))
    session.set_leaf(session.entries[1].id)
    assert [data.count(b"\n") for data in writes] == [1, 1]
    assert len(writes[0]) < 101_000 and len(writes[1]) < 500


def test_a_rewind_leads_before_a_message_of_the_person_and_on_anything_else():
    session = Session(cwd="/x")
    u1, a1, u2, a2 = talk(session, "u1", "a1", "u2", "a2")
    mark = session.append("label", label="here")
    assert session.moment(u1)[0::2] == (session.entries[0].id, "u1")
    assert session.moment(u2)[0::2] == (a1.id, "u2")
    assert session.moment(a1)[0::2] == (a1.id, "")
    assert session.moment(mark)[0::2] == (a2.id, "")
    back = session.set_leaf(a1.id)
    assert session.moment(back)[0::2] == (a2.id, "")           # undoing it


def test_entries_are_found_by_label_id_and_the_start_of_one():
    session = Session(cwd="/x")
    u1, a1, *_ = talk(session, "u1", "a1", "u2")
    session.set_leaf(a1.id)
    session.append("label", label="a name")
    assert session.find("a name") is session.find(a1.id) is a1
    assert session.find(u1.id[:7]) in (u1,)
    for text in ("", "nothing", "zz"):
        with pytest.raises(ta.SessionError, match="entries"):
            session.find(text)


def test_a_fork_is_the_branch_in_a_file_of_its_own(tmp_path):
    session = new_session(tmp_path)
    session.describe(system="the prompt", tools=[1], mode="ask")
    u1, a1, u2, a2 = talk(session, "u1", "a1", "u2", "a2")
    session.append("label", label="lost")
    session.set_leaf(a1.id)
    session.append("label", label="kept")
    talk(session, "u3", "a3")
    before = session.path.read_bytes()
    fork = session.fork(tmp_path / "home")
    assert said(fork) == said(session) == ["u1", "a1", "u3", "a3"] and fork.labels() == {"kept": a1.id}
    talk(fork, "u4", "a4")
    fork.close()
    session.close()
    assert session.path.read_bytes() == before and b"u2" not in fork.path.read_bytes()
    again = Session.load(fork.path)
    header = again.entries[0].data
    assert (header["parent_session"], header["system"]) == (session.path.stem, "the prompt")
    assert said(again)[-1] == "a4" and not again.notes
    again.close()


def test_a_fork_of_what_has_no_answer_yet_leaves_no_file(tmp_path):
    session = new_session(tmp_path)
    talk(session, "u1")
    fork = session.fork(tmp_path / "home")
    assert fork.file is None and not list(tmp_path.rglob("*.jsonl"))
    fork.append(AssistantMessage("a1"))
    assert said(fork) == ["u1", "a1"] and Path(fork.file).exists()


def test_a_fork_can_be_forked(tmp_path):
    session = new_session(tmp_path)
    talk(session, "u1", "a1")
    forks = [session]
    for _ in range(3):
        forks.append(forks[-1].fork(tmp_path / "home"))
    assert [said(fork) for fork in forks] == [["u1", "a1"]] * 4
    assert [fork.entries[0].data["parent_session"] for fork in forks[1:]] == [
        fork.path.stem for fork in forks[:-1]]
    for fork in forks:
        fork.close()


@pytest.mark.parametrize("one, other", [("a-b", "a/b"), ("日本", "中国"), ("x" * 120 + "/y" * 60, "z" * 120 + "/y" * 60)],
                         ids=["a stroke and a dash", "other scripts", "long paths"])
def test_folders_whose_names_are_alike_do_not_share_sessions(tmp_path, one, other):
    home = tmp_path / "home"
    sessions = [Session.new(home, tmp_path / name) for name in (one, other)]
    assert sessions[0].path.parent == sessions[1].path.parent
    for session, name in zip(sessions, (one, other)):
        talk(session, name, "a")
        session.close()
        assert [listed.path for listed in ta.list_sessions(home, tmp_path / name)] == [session.path]
    assert ta.newest_session(home, tmp_path / one) == sessions[0].path


@posix
def test_what_is_no_session_among_the_sessions_holds_nothing_up(tmp_path):
    session = new_session(tmp_path)
    talk(session, "a task", "a")
    session.close()
    os.mkfifo(session.path.parent / "pipe_1.jsonl")
    (session.path.parent / "folder_1.jsonl").mkdir()
    (session.path.parent / "odd_1.jsonl").write_text(
        '{"type":"message","type":"label","id":"a","parent_id":null,"timestamp":""}\n')
    assert "a task" in [one.first for one in ta.list_sessions(tmp_path / "home", tmp_path)]


@posix
def test_a_file_that_cannot_be_opened_for_writing_stays(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"")
    real_open = os.open

    def refuse(name, flags, *more, **named):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real_open(name, flags, *more, **named)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ta.SessionError):
        Session.load(path)
    assert path.exists()


def test_sessions_are_listed_the_last_one_first(tmp_path):
    sessions = [new_session(tmp_path) for _ in range(2)]
    for number, session in enumerate(sessions):
        talk(session, f"task {number}\nmore", "a", "again"[number:])
        session.close()
        os.utime(session.path, (1000 + number, 1000 + number))
    (sessions[0].path.parent / "junk.jsonl").write_bytes(b"\xff\n[]\n")
    listed = ta.list_sessions(tmp_path / "home", tmp_path)
    assert [(one.path, one.messages, one.first) for one in listed] == [
        (sessions[1].path, 3, "task 1 more"), (sessions[0].path, 3, "task 0 more")]
    assert all(ta.find_session(tmp_path / "home", ta.session_id(one.path)) == one.path for one in listed)


BUSY = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_agent import *
calls = [[("write_file", {"path": f"f{n % 3}.txt", "content": f"{n}\\n" * 500})] for n in range(40)]
home, folder = Path(sys.argv[2]) / "home", Path(sys.argv[2])
agent = Agent(ScriptedProvider([*calls, "done"]), Workspace(folder), mode="auto", home=home,
              session=Session.new(home, folder), max_steps=50, budget=10**6)
for event in agent.run("go"):
    if isinstance(event, MessageEnd):
        print(json.dumps(to_json(event.message)), flush=True)
"""


@posix
@pytest.mark.parametrize("moment", [2, 3, 5, 8, 13, 20, 21, 34, 55, 79])
def test_a_run_that_is_killed_loses_nothing_that_was_told(tmp_path, moment):
    """kill -9 at many moments: what was told is in the file, and the run can go on from there."""
    run = subprocess.Popen([sys.executable, "-c", BUSY, str(HERE), str(tmp_path)],
                           stdout=subprocess.PIPE, text=True)
    told = [json.loads(run.stdout.readline()) for _ in range(moment)]
    time.sleep((moment % 4) * 0.001)
    run.kill()
    run.wait()
    told += [json.loads(rest) for rest in run.stdout.read().splitlines() if rest.endswith("}")]
    run.stdout.close()
    path = ta.newest_session(tmp_path / "home", tmp_path)
    session = Session.load(path)
    assert [ta.to_json(e.message) for e in session.active_path() if e.message][:len(told)] == told
    agent = ta.Agent(ScriptedProvider(["fine"]), Workspace(tmp_path), session=session, budget=10**6)
    assert list(agent.run("go on"))[-1].answer == "fine"
    sent = agent.provider.requests[0]["messages"]
    calls = [call.id for m in sent if isinstance(m, AssistantMessage) for call in m.tool_calls]
    assert calls == [m.tool_call_id for m in sent if isinstance(m, ToolResultMessage)]
    session.close()


@posix
def test_twenty_runs_at_once_write_twenty_whole_sessions(tmp_path):
    runs = [subprocess.Popen([sys.executable, str(PROGRAM), "-w", str(tmp_path), "--mode", "auto",
                              "--sandbox", "off", "-p", "demo", "--json", f"run echo task {number}"],
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, cwd=tmp_path,
                             env={"PATH": os.environ["PATH"], "AGENT_HOME": str(tmp_path / "home")})
            for number in range(20)]
    ends = [json.loads(run.communicate(timeout=60)[0].splitlines()[-1]) for run in runs]
    assert [run.returncode for run in runs] == [0] * 20
    assert len({end["session"] for end in ends}) == 20
    for number, end in enumerate(ends):
        session = Session.load(Path(end["session"]))
        assert not session.notes and said(session)[0] == f"run echo task {number}"
        assert f"task {number}" in said(session)[-1] and len(said(session)) == 4
        session.close()
    assert len((tmp_path / "home/audit.jsonl").read_text().splitlines()) == 20


@posix
def test_a_second_writer_is_refused(tmp_path):
    session = new_session(tmp_path)
    talk(session, "a", "b")
    with pytest.raises(ta.SessionError, match="in use"):
        Session.load(session.path)
    session.close()
    Session.load(session.path).close()


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "home").write_text("a file, not a folder")
    events, agent = run_agent(["fine"], tmp_path, session=new_session(tmp_path))
    assert (events[-1].reason, events[-1].session) == ("stop", None)
    assert len(of(ta.Warned, events)) == 1 and "cannot be written" in of(ta.Warned, events)[0].message


def test_keys_never_reach_the_file(tmp_path):
    ta.SECRETS.add(KEY)
    session = new_session(tmp_path)
    talk(session, f"my key is {KEY}", "b")
    assert KEY not in session.path.read_text()


def test_sessions_are_found_by_id_start_and_path(tmp_path):
    one, two = new_session(tmp_path), new_session(tmp_path)
    for session in (one, two):
        talk(session, "a", "b")
        session.close()
    os.utime(one.path, (1, 1))
    home = tmp_path / "home"
    short = one.path.stem.rpartition("_")[2]
    for text in (one.path.stem, short, short[:6], str(one.path)):
        assert ta.find_session(home, text) == one.path
    assert ta.newest_session(home, tmp_path) == two.path
    for text in ("", "zzz", "../x", "2"):
        with pytest.raises(ta.SessionError):
            ta.find_session(home, text)
    with pytest.raises(ta.SessionError):
        ta.newest_session(home, tmp_path / "other")


# ─── Context ─────────────────────────────────────────────────────────────────────────────────────

def U(text):
    return UserMessage(text)


def A_(text="", *calls, stop=None):
    made = tuple(ToolCall(c, "note", {}) for c in calls)
    return AssistantMessage(text, made, stop_reason=stop or ("tool_use" if calls else "stop"))


def R(call, text="ok"):
    return ToolResultMessage(call, "note", text)


PROJECTIONS = {      # the messages of a branch, what a model sees as "role text"
    "as it was": ([U("q"), A_("", "1", "2"), R("1", "x"), R("2", "y"), A_("a")],
                  ["user q", "assistant ", "1 x", "2 y", "assistant a"]),
    "failed replies are left out": ([U("q"), A_("half", stop="error"), A_("h", stop="aborted"),
                                     A_("a")], ["user q", "assistant a"]),
    "with their calls and results": ([U("q"), A_("", "1", stop="aborted"), R("1"), U("r")],
                                     ["user q", "user r"]),
    "empty replies are left out": ([U("q"), A_(" \n"), U("r")], ["user q", "user r"]),
    "a missing result": ([U("q"), A_("", "1", "2"), R("1", "x"), U("r")],
                         ["user q", "assistant ", "1 x", "2 " + ta.NO_RESULT,
                          "user r"]),
    "a result without a call": ([U("q"), R("9"), A_("a")], ["user q", "assistant a"]),
    "a result twice": ([U("q"), A_("", "1"), R("1", "x"), R("1", "y"), U("r")],
                       ["user q", "assistant ", "1 x", "user r"]),
    "results in another order": ([U("q"), A_("", "1", "2"), R("2", "y"), R("1", "x")],
                                 ["user q", "assistant ", "1 x", "2 y"]),
    "words between call and result": ([U("q"), A_("", "1"), U("hurry"), R("1", "x")],
                                      ["user q", "assistant ", "1 x", "user hurry"]),
    "a beginning that is lost": ([A_("", "1"), R("1", "x")], ["user " + ta.NO_BEGINNING, "assistant ", "1 x"]),
    "an id used again": ([U("q"), A_("", "1"), R("1", "x"), A_("", "1"), R("1", "y")],
                         ["user q", "assistant ", "1 x", "assistant ", "1 y"])}


def seen(session) -> list[str]:
    return [f"{getattr(m, 'tool_call_id', m.role)} {m.content}" for m in
            ta.project(session.active_path())]


@pytest.mark.parametrize("messages, expected", PROJECTIONS.values(), ids=PROJECTIONS)
def test_projection(messages, expected):
    session = Session(cwd="/x")
    for message in messages:
        session.append(message)
    before = list(session.entries)
    assert seen(session) == expected == seen(session) and session.entries == before


def test_the_last_summary_stands_in_front_of_what_is_kept():
    session = Session(cwd="/x")
    talk(session, "u1", "a1")
    u2, _ = talk(session, "u2", "a2")
    session.append("compaction", summary="S1", first_kept_entry_id=u2.id)
    u3, _ = talk(session, "u3", "a3")
    session.append("compaction", summary="S2", first_kept_entry_id=u3.id)
    talk(session, "u4")
    assert seen(session) == [f"user {ta.SUMMARY_HEAD}S2", "user u3", "assistant a3", "user u4"]
    session.set_leaf(u2.id)
    assert seen(session) == ["user u1", "assistant a1", "user u2"]


# What stands on a branch, in short: "u text", "a text", "a text|1,2" with calls, "r 1 text",
# "clear 3 50" (clears up to the entry 3, clips later outputs to 50), "cut 3" (keeps from entry 3).

def branch(*lines) -> Session:
    session = Session(cwd="/x")
    made = []
    for text in lines:
        kind, _, rest = text.partition(" ")
        if kind == "u":
            made.append(session.append(U(rest)))
        elif kind == "a":
            words, _, calls = rest.partition("|")
            made.append(session.append(A_(words, *filter(None, calls.split(",")))))
        elif kind == "r":
            made.append(session.append(R(*rest.split(" ", 1))))
        elif kind == "clear":
            last, clip = (rest + " ").split(" ")[:2]
            made.append(session.append("clear_outputs", clip=int(clip) if clip else None,
                                       last_cleared_entry_id=made[int(last)].id if last else None))
        elif kind == "cut":
            made.append(session.append("compaction", summary="S", first_kept_entry_id=made[int(rest)].id))
        elif kind == "back":
            session.set_leaf(made[int(rest)].id)
    return session


BIG = "x" * 1000
SUM = f"user {ta.SUMMARY_HEAD}S"
GONE = "[cleared to save room: 1,000 characters; call the tool again if you need them]"
PASTS = {
    "outputs are cleared up to an entry": (
        ["u q", "a |1", f"r 1 {BIG}", "a |2", f"r 2 {BIG}", "clear 2"],
        ["user q", "assistant ", f"1 {GONE}", "assistant ", f"2 {BIG}"]),
    "short outputs stay": (["u q", "a |1", "r 1 ok", "clear 2"], ["user q", "assistant ", "1 ok"]),
    "what comes after is not cleared": (
        ["u q", "a |1", f"r 1 {BIG}", "clear 2", "a |2", f"r 2 {BIG}"],
        ["user q", "assistant ", f"1 {GONE}", "assistant ", f"2 {BIG}"]),
    "recent outputs are clipped": (
        ["u q", "a |1", f"r 1 {BIG}", "clear  300", "a |2", f"r 2 {BIG}"],
        ["user q", "assistant ", f"1 {'x' * 100}\n[clipped to save room: 700 characters more]\n{'x' * 200}",
         "assistant ", f"2 {BIG}"]),
    "cleared twice": (
        ["u q", "a |1", f"r 1 {BIG}", "a |2", f"r 2 {BIG}", "clear 2 500", "a b", "clear 4"],
        ["user q", "assistant ", f"1 {GONE}", "assistant ", f"2 {GONE}", "assistant b"]),
    "an entry that is not there clears nothing": (
        ["u q", "a |1", f"r 1 {BIG}", "clear 2", "back 2", "a b"],
        ["user q", "assistant ", f"1 {BIG}", "assistant b"]),
    "a summary in front of what is kept": (["u 1", "a 1", "u 2", "a 2", "cut 2", "u 3"],
                                           [SUM, "user 2", "assistant 2", "user 3"]),
    "inside a task": (["u 1", "a |1", "r 1 x", "a |2", "r 2 y", "cut 3", "a b"],
                      [SUM, "assistant ", "2 y", "assistant b"]),
    "the last of several": (["u 1", "a 1", "u 2", "cut 2", "a 2", "u 3", "a 3", "cut 5"],
                            [SUM, "user 3", "assistant 3"]),
    "a branch that leaves before it": (["u 1", "a 1", "u 2", "a 2", "cut 2", "back 1", "u 3"],
                                       ["user 1", "assistant 1", "user 3"]),
    "a branch that leaves among what is kept": (["u 1", "a 1", "u 2", "a 2", "cut 2", "back 4", "u 3"],
                                                [SUM, "user 2", "assistant 2", "user 3"]),
    "a rewind into the middle of a turn": (["u 1", "a |1,2", "r 1 x", "r 2 y", "a b", "back 2", "u 2"],
                                           ["user 1", "assistant ", "1 x", "2 " + ta.NO_RESULT, "user 2"]),
    "outputs that were cleared before a summary": (
        ["u q", "a |1", f"r 1 {BIG}", "clear 2", "u 2", "a 2", "cut 1"],
        [SUM, "assistant ", f"1 {GONE}", "user 2", "assistant 2"])}


@pytest.mark.parametrize("lines, expected", PASTS.values(), ids=PASTS)
def test_the_past_is_shown_as_the_ledger_says(lines, expected):
    session = branch(*lines)
    assert seen(session) == expected == seen(session)


ODD_VALUES = [None, 1, -1, [], {}, "x", True, 1.5, [1], {"a": 1}, "\ud800"]


def places_in(value, path=()):
    """Every place in a JSON value, as a path of keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places_in(value[key], (*path, key))


def hostile_lines() -> list:
    call = {"id": "1", "name": "write_file", "arguments": {"path": "a"}}
    change = {"path": "a", "before": "t", "after": "00"}
    message = {"role": "assistant", "content": "", "tool_calls": [call], "stop_reason": "tool_use",
               "usage": {"input_tokens": 5, "output_tokens": 1}, "provider": "p", "model": "m",
               "provider_data": {"p": {"reasoning": "r"}}}
    result = {"role": "tool_result", "tool_call_id": "1", "tool_name": "write_file", "content": "ok",
              "details": change}
    return [json.loads(text) for text in (
        line("header", "h", None, version=1, cwd="/x", system="s", tools=[], mode="ask", date="x"),
        line("message", "u", "h", message={"role": "user", "content": "hi"}, told={"mode": "x"}, typed=1),
        line("message", "a", "u", message=message), line("message", "r", "a", message=result),
        line("clear_outputs", "c", "r", last_cleared_entry_id="r", clip=300),
        line("label", "l", "c", label="L"), line("leaf", "f", "r", from_id="c", files=[change]),
        line("message", "b", "r", message={**message, "tool_calls": [], "stop_reason": "stop", "content": "x"}),
        line("compaction", "k", "b", summary="S", first_kept_entry_id="u"))]


@pytest.mark.parametrize("with_summary", [False, True])
def test_no_value_in_a_file_breaks_what_is_done_with_it(tmp_path, with_summary):
    """Each value of a session file is replaced by values of all types: it is refused, or all works."""
    path = tmp_path / "x.jsonl"
    for place in places_in(hostile_lines()):
        for value in ODD_VALUES:
            lines = hostile_lines()
            at = lines
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
            path.write_text("\n".join(map(json.dumps, lines[:len(lines) - (not with_summary)])) + "\n")
            try:
                session = Session.load(path)
            except ta.SessionError:
                continue
            agent = ta.Agent(ScriptedProvider(["fine", "S"]), Workspace(tmp_path), session=session)
            for provider in (Provider("p", "http://x", "m"), ta.Anthropic("p", "http://x", "m")):
                provider.to_wire("s", ta.project(session.active_path()), [], provider)
            ta.context_in_lines(agent), ta.draw_tree(session)
            for entry in list(session.entries):
                agent.files_back(session.moment(entry))
            assert list(agent.run("go"))[-1].reason == "stop", (place, value)
            list(agent.compact())
            session.close()


def test_a_summary_of_what_is_not_there_keeps_what_follows():
    session = branch("u 1", "a 1")
    session.append("compaction", summary="S", first_kept_entry_id="gone")
    talk(session, "2")
    assert seen(session) == [SUM, "user 2"]


def used(text, tokens, output=5):
    return AssistantMessage(text, usage=ta.Usage(input_tokens=tokens, output_tokens=output))


def test_the_estimate_goes_from_what_the_provider_counted_last():
    session = branch("u q")
    assert ta.estimate(session.active_path(), 100) == 100 + ta.size_of(U("q"))
    session.append(used("a", 1000))
    assert ta.estimate(session.active_path(), 100) == 1005
    session.append(U("x" * 400))
    assert ta.estimate(session.active_path(), 100) == 1005 + ta.size_of(U("x" * 400)) < 1120
    session.append(AssistantMessage("half", stop_reason="error", usage=ta.Usage(input_tokens=9)))
    assert ta.estimate(session.active_path(), 100) > 1100                    # a failure counts nothing
    kept = session.append(used("b", 2000))
    for change in ({"what": "compaction", "summary": "S", "first_kept_entry_id": kept.id},
                   {"what": "clear_outputs"}):
        session.append(**change)                                             # the past has changed
        assert ta.estimate(session.active_path(), 100) < 300
        session.append(used("c", 3000))
        assert ta.estimate(session.active_path(), 100) == 3005


CUTS = {     # a branch, what it may keep in tokens, the place where it is cut (the header is 0)
    "between tasks": (["u " + BIG, "a " + BIG, "u " + BIG, "a x"], 300, 3),
    "nothing fits, so the last place": (["u x", "a x", "u " + BIG], 10, 3),
    "inside a task": (["u x", "a |1", f"r 1 {BIG}", "a |2", f"r 2 {BIG}"], 300, 4),
    "never between a call and its result": (["u x", "a |1,2", "r 1 x", f"r 2 {BIG}"], 10, 2),
    "nor at a word between them": (["u x", "a |1", "u y", f"r 1 {BIG}"], 10, 2),
    "a call that never got a result holds nothing up": (["u x", "a |1", "u y", "a z"], 10, 3),
    "nothing but the first message": (["u x"], 10, None), "nothing at all": ([], 10, None),
    "all of it fits": (["u x", "a y", "u z"], 10 ** 6, None),
    "only what came since the last summary": (["u x", "a y", "u z", "a z", "cut 2", "u q", "a r"], 10, 6)}


@pytest.mark.parametrize("lines, keep, place", CUTS.values(), ids=CUTS)
def test_where_a_conversation_is_cut(lines, keep, place):
    assert ta.find_cut(branch(*lines).active_path(), keep) == place


def test_cuts_of_a_long_branch_are_found_in_linear_time():
    session = branch("u x", *(line for n in range(4000) for line in (f"a |{n}", f"r {n} ok")))
    start = time.process_time()
    assert ta.find_cut(session.active_path(), 100) > 7900
    assert time.process_time() - start < 20               # a square of it would take hours


def test_clearing_keeps_the_recent_outputs_and_clips_them_if_they_are_huge():
    lines = ["u q", *(line for n in range(9) for line in (f"a |{n}", f"r {n} {BIG}"))]
    session = branch(*lines)
    plan = ta.plan_clearing(session.active_path(), 600)
    session.append("clear_outputs", **plan)
    results = [text.partition(" ")[2] for text in seen(session) if text[0].isdigit()]
    assert results == [GONE] * 7 + [BIG] * 2 and plan["clip"] is None
    plan = ta.plan_clearing(branch(*lines[:3]).active_path(), 60)
    assert plan["clip"] == 240 and plan["last_cleared_entry_id"]


def test_the_files_of_a_branch_are_listed_by_code():
    session = Session(cwd="/x")
    calls = (ToolCall("1", "read_file", {"path": "a"}), ToolCall("2", "read_file", {"path": "no"}),
             ToolCall("3", "write_file", {"path": "./b"}))
    session.append(AssistantMessage(tool_calls=calls, stop_reason="tool_use"))
    session.append(ToolResultMessage("1", "read_file", "text"))
    session.append(ToolResultMessage("2", "read_file", "there is no file", True))
    session.append(ToolResultMessage("3", "write_file", "wrote", details={"path": "b", "after": "0"}))
    assert ta.files_touched(session.active_path()) == {"read": ["a"], "changed": ["b"]}


def test_the_system_prompt_says_where_and_how_and_holds_the_notes(tmp_path):
    (tmp_path / "AGENTS.md").write_text("- the moon is cheese\n")
    text = ta.system_prompt(Workspace(tmp_path), "plan")
    for words in (str(tmp_path), "mode is now plan", "the moon is cheese", *ta.MODES):
        assert words in text


def test_requests_only_grow_at_their_end(tmp_path):
    """Also when the mode changes and when the session is resumed: the prefix stays."""
    provider = ScriptedProvider([[("note", {"text": "x"})], "one", "two", "three", "four"])
    agent = ta.Agent(provider, Workspace(tmp_path), mode="auto", session=new_session(tmp_path))
    list(agent.run("first"))
    agent.mode = "plan"
    list(agent.run("second"))
    list(agent.run("third"))
    agent.session.close()
    later = ta.Agent(provider, Workspace(tmp_path), mode="auto",
                     session=Session.load(agent.session.path))
    list(later.run("fourth"))
    bodies = [(r["system"], r["tools"]) for r in provider.requests]
    assert all(body == bodies[0] for body in bodies)
    for before, after in zip(provider.requests, provider.requests[1:]):
        assert after["messages"][:len(before["messages"])] == before["messages"]
    tasks = [m.content for m in provider.requests[-1]["messages"] if isinstance(m, UserMessage)]
    assert tasks == ["first", "second" + ta.NOTE.format("the mode is now plan"), "third",
                     "fourth" + ta.NOTE.format("the mode is now auto")]
    session = later.session
    assert session.moment(session.entries[-2]).text == "fourth"          # the note is not typed again


def test_news_are_told_once_with_the_next_message(tmp_path, monkeypatch):
    def told(agent, task):
        list(agent.run(task))
        return [m for m in agent.provider.requests[-1]["messages"]
                if isinstance(m, UserMessage)][-1].content.split("\n\n")[1:]
    provider = ScriptedProvider(["a", [("note", {"text": "x"})], "b", "c", "d", "e", "f", "g"])
    agent = ta.Agent(provider, Workspace(tmp_path), mode="auto")
    assert told(agent, "one") == told(agent, "two") == told(agent, "own notes are known") == []
    (tmp_path / "AGENTS.md").write_text("- from somebody else\n")
    assert told(agent, "three") == ["[note from the program: AGENTS.md has changed since you saw it]"]
    monkeypatch.setattr(time, "strftime", lambda form: "2031-02-03")
    assert told(agent, "four") == ["[note from the program: today is 2031-02-03]"]
    assert told(agent, "five") == []
    agent.session.set_leaf(agent.session.entries[0].id)            # on another branch it is new
    assert len(told(agent, "six")) == 2


# ─── Agent ───────────────────────────────────────────────────────────────────────────────────────

ANSWER = """run_start
message_start user
message_end user
turn_start
message_start assistant
message_end assistant stop
turn_end
run_end stop
run_settled"""


def loop(calls, rest=ANSWER) -> str:
    """The trace of a run whose first reply asks for one call, which went like this."""
    head, _, tail = rest.partition("turn_start\n")
    return f"""{head}turn_start
message_start assistant
toolcall_start
toolcall_end
message_end assistant tool_use
{calls}
message_start tool_result
message_end tool_result
turn_end
turn_start
{tail}"""


WRITE = [("write_file", {"path": "a", "content": "x"})]
RUNS = {
    "an answer": ([["hello"]], {}, ANSWER),
    "a tool": ([[WRITE, "ok"]], {}, loop("tool_start write_file allow\ntool_end write_file ok")),
    "nobody to ask": ([[WRITE, "ok"]], {"mode": "ask"},
                      loop("tool_start write_file deny\ntool_end write_file error")),
    "declined": ([[WRITE, "ok"]], {"mode": "ask", "approve": lambda q: False},
                 loop("tool_start write_file deny\ntool_end write_file error")),
    "approved": ([[WRITE, "ok"]], {"mode": "ask", "approve": lambda q: True},
                 loop("tool_start write_file allow\ntool_end write_file ok")),
    "plan mode": ([[WRITE, "ok"]], {"mode": "plan"},
                  loop("tool_start write_file deny\ntool_end write_file error")),
    "a bad name": ([[[("fly", {})], "ok"]], {}, loop("tool_start fly deny\ntool_end fly error")),
    "bad arguments": ([[[("write_file", {"file": "a"})], "ok"]], {},
                      loop("tool_start write_file deny\ntool_end write_file error")),
    "no arguments": ([[[ToolCall("1", "note", None, "{")], "ok"]], {},
                     loop("tool_start note deny\ntool_end note error")),
    "a failing tool": ([[[("read_file", {"path": "gone"})], "ok"]], {},
                       loop("tool_start read_file allow\ntool_end read_file error")),
    "cut by length": ([[AssistantMessage("half", stop_reason="length")]], {},
                      ANSWER.replace("stop", "length")),
    "an error": ([[ProviderError("auth", "bad key")]], {},
                 ANSWER.replace("assistant stop", "assistant error")
                 .replace("run_end stop", "run_end error auth")),
    "a retry": ([[ProviderError("server", "boom", attempts=5), "ok"]], {},
                ANSWER.replace("turn_start", "turn_start\nretry 1 server")),
    "a half message, then a retry": (
        [[Failed(ProviderError("network", "cut", attempts=5),
                 AssistantMessage("Ha", stop_reason="error", error_message="cut")), "ok"]], {},
        ANSWER.replace("turn_start", "turn_start\nmessage_start assistant\n"
                       "message_end assistant error\nretry 1 network")),
    "the step limit": ([[WRITE] * 9], {"max_steps": 1},
                       loop("tool_start write_file allow\ntool_end write_file ok")
                       .partition("turn_end")[0] + "turn_end\nrun_end max_steps\nrun_settled")}


@pytest.mark.parametrize("replies, options, expected", RUNS.values(), ids=RUNS)
def test_runs(tmp_path, quick, replies, options, expected):
    events, agent = run_agent(*replies, tmp_path, **options)
    assert trace(events) == expected
    assert set(events[-1].totals) == {"turns", "tool_calls", "tool_failures", "retries",
                                      "compactions", "input_tokens", "output_tokens",
                                      "cached_tokens", "cost", "seconds"}


def test_every_retry_is_told_and_five_attempts_are_enough(tmp_path, quick):
    failing = [ProviderError("server", "boom", attempts=5)] * 9
    events, agent = run_agent(failing, tmp_path)
    assert [r.attempt for r in of(ta.Retry, events)] == [1, 2, 3, 4]
    assert len(agent.provider.requests) == 5 and events[-1].totals["retries"] == 4
    assert events[-1].error["kind"] == "server"


def test_failures_of_different_kinds_count_apart(tmp_path, quick):
    """A busy server before an empty reply does not use up the one retry that is due to it."""
    replies = [ProviderError("server", "busy", attempts=5), ProviderError("server", "empty", attempts=2),
               "fine"]
    events, _ = run_agent(replies, tmp_path)
    assert events[-1].answer == "fine"


def test_a_wait_over_the_cap_is_reported_not_waited(tmp_path):
    error = ProviderError("rate_limit", "slow down", attempts=5, delay=3600)
    events, agent = run_agent([error], tmp_path)
    assert not of(ta.Retry, events) and "3,600 s" in events[-1].error["hint"]


def test_own_waits_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(ta.Abort, "sleep", lambda self, seconds: True)
    events, _ = run_agent([ProviderError("server", "boom", attempts=5)] * 9, tmp_path)
    delays = [r.delay for r in of(ta.Retry, events)]
    assert all(0.8 * want < got < 1.2 * want for want, got in zip((1, 2, 4, 8), delays))


def test_what_a_failed_run_said_is_not_sent_again(tmp_path):
    failed = Failed(ProviderError("network", "cut"), AssistantMessage(
        "Ha", (ToolCall("1", "note", {}),), stop_reason="error", error_message="cut"))
    provider = ScriptedProvider([failed, "fine"])
    agent = ta.Agent(provider, Workspace(tmp_path))
    assert list(agent.run("one"))[-1].reason == "error"
    assert list(agent.run("two"))[-1].answer == "fine"
    assert [m.content for m in provider.requests[-1]["messages"]] == ["one", "two"]


def test_an_abort_while_waiting_to_retry(tmp_path):
    def stop(event, agent):
        if isinstance(event, ta.Retry):
            threading.Timer(0.05, agent.stop).start()
    error = ProviderError("rate_limit", "slow", attempts=5, delay=60)
    events, agent = run_agent([error], tmp_path, watch=stop)
    assert events[-1].reason == "aborted" and trace(events).endswith(
        "message_end assistant aborted\nturn_end\nrun_end aborted aborted\nrun_settled")


@posix
def test_an_abort_in_a_command_keeps_its_output_and_runs_no_more(tmp_path):
    def stop(event, agent):
        if isinstance(event, ta.ToolOutput):
            agent.stop()
    calls = [("shell", {"command": "echo early; sleep 60"}), ("shell", {"command": "touch late"})]
    events, agent = run_agent([calls, "never"], tmp_path, watch=stop)
    first, second = results(agent)
    assert "early" in first and "interrupted" in first and "not run" in second
    assert events[-1].reason == "aborted" and not (tmp_path / "late").exists()
    assert len(agent.provider.requests) == 1


@posix
@pytest.mark.parametrize("stage", ["model", "tool"])
def test_ctrl_c_in_a_program_of_ones_own(tmp_path, serve, stage):
    """Without any handler: KeyboardInterrupt ends the run as an abort, with all its events."""
    server = serve(stream_of(delta(content="x"), end="stall")) if stage == "model" else None
    provider = host(server) if server else ScriptedProvider(
        [[("shell", {"command": "echo x; sleep 60"})], "never"])

    def interrupt(event, agent):
        if isinstance(event, (ta.TextDelta, ta.ToolOutput)):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    events, agent = run_agent(provider, tmp_path, watch=interrupt)
    assert events[-1].reason == "aborted"
    assert trace(events).count("_start") == trace(events).count("_end")


EVERY = ["RunStart", "MessageStart", "MessageEnd", "TurnStart", "ToolcallStart", "ToolStart",
         "ToolOutput", "ToolEnd", "TextDelta", "TurnEnd", "RunEnd"]


@posix
@pytest.mark.parametrize("name", EVERY)
def test_a_closed_run_leaves_a_valid_history(tmp_path, name):
    replies = [[("shell", {"command": "echo x; sleep 60" if name == "ToolOutput" else "echo x"}),
                ("note", {"text": "y"})], "done"]
    agent = ta.Agent(ScriptedProvider(replies), Workspace(tmp_path), mode="auto")
    run = agent.run("go")
    for event in run:
        if type(event).__name__ == name:
            break
    run.close()
    messages = [e.message for e in agent.session.active_path() if e.message]
    for message in messages:
        for call in getattr(message, "tool_calls", ()):
            assert [m for m in messages if getattr(m, "tool_call_id", "") == call.id]
    provider = agent.provider = ScriptedProvider(["again"])
    assert list(agent.run("next"))[-1].answer == "again"
    roles = [m.role for m in provider.requests[0]["messages"]]
    assert roles.count("tool_result") in (0, 2)


def test_an_entry_is_on_disk_before_its_event(tmp_path):
    def look(event, agent):
        if isinstance(event, ta.MessageEnd) and agent.session.file:
            last = json.loads(Path(agent.session.file).read_text().splitlines()[-1])
            assert last["message"] == json.loads(json.dumps(ta.to_json(event.message)))
            seen_on_disk.append(event)
    seen_on_disk: list = []
    run_agent([WRITE, "ok"], tmp_path, watch=look, session=new_session(tmp_path))
    assert len(seen_on_disk) == 3


def test_a_tool_that_breaks_does_not_end_the_loop(tmp_path):
    @ta.tool
    def broken() -> str:
        """Breaks."""
        raise ZeroDivisionError("by zero")

    agent = ta.Agent(ScriptedProvider([[("broken", {})], "ok"]), Workspace(tmp_path), mode="auto")
    agent.tools["broken"] = broken
    assert list(agent.run("go"))[-1].answer == "ok"
    assert results(agent) == ["the tool failed: ZeroDivisionError: by zero"]


def failing(*arguments):
    raise RuntimeError("lost")


def test_a_question_that_fails_is_a_no(tmp_path):
    events, agent = run_agent([WRITE, "ok"], tmp_path, mode="ask", approve=failing)
    assert events[-1].answer == "ok" and results(agent) == [
        "denied: the question failed: RuntimeError: lost"]


def test_a_provider_that_fails_ends_the_run_in_order(tmp_path):
    events, _ = run_agent([failing], tmp_path)
    assert events[-1].error == {"kind": "server", "hint": "", "message":
                                "the provider failed: RuntimeError: lost"}
    assert trace(events) == RUNS["an error"][2].replace("auth", "server")


def test_a_tool_cannot_leave_the_program(tmp_path):
    @ta.tool
    def leave() -> str:
        """Leaves."""
        sys.exit(3)

    agent = ta.Agent(ScriptedProvider([[("leave", {})], "still here"]), Workspace(tmp_path), mode="auto")
    agent.tools["leave"] = leave
    assert list(agent.run("go"))[-1].answer == "still here"


def test_a_stop_before_the_first_event_counts(tmp_path):
    agent = ta.Agent(ScriptedProvider([[("note", {"text": "x"})], "no"]), Workspace(tmp_path), mode="auto")
    run = agent.run("go")
    agent.stop()
    assert list(run)[-1].reason == "aborted" and not (tmp_path / "AGENTS.md").exists()


def test_what_a_closed_run_did_is_in_the_ledger(tmp_path):
    agent = ta.Agent(ScriptedProvider([WRITE + [("fly", {})], "no"]), Workspace(tmp_path), mode="auto",
                     home=tmp_path / "home")
    for event in agent.run("go"):
        if isinstance(event, ta.ToolEnd):
            break
    del event
    import gc
    gc.collect()
    assert results(agent)[0].startswith("wrote a") and "run was closed" in results(agent)[1]
    assert len((tmp_path / "home/audit.jsonl").read_text().splitlines()) == 2


def test_a_half_reply_of_a_closed_run_is_kept(tmp_path):
    agent = ta.Agent(ScriptedProvider(["one two three"]), Workspace(tmp_path))
    for event in agent.run("go"):
        if isinstance(event, ta.TextDelta):
            break
    del event
    last = agent.session.active_path()[-1].message
    assert (last.content, last.stop_reason) == ("one", "aborted")


def test_the_answer_of_the_person_reaches_the_model(tmp_path):
    asked = []

    def approve(question):
        asked.append(question)
        return "use b instead"
    events, agent = run_agent([WRITE, "ok"], tmp_path, mode="ask", approve=approve)
    assert results(agent) == ["denied: use b instead"]
    assert asked[0].name == "write_file" and "+x" in asked[0].preview


def test_every_call_is_audited(tmp_path):
    calls = [("write_file", {"path": "a", "content": "x"}), ("shell", {"command": "git push -f"}),
             ("fly", {}), ("read_file", {"path": "a"})]
    run_agent([calls, "ok"], tmp_path, home=tmp_path / "home", mode="ask")
    lines = [json.loads(line) for line in (tmp_path / "home/audit.jsonl").read_text().splitlines()]
    assert [(entry["tool"], entry["decision"]) for entry in lines] == [
        ("write_file", "deny"), ("shell", "deny"), ("fly", "deny"), ("read_file", "allow")]
    assert lines[1]["rule"] == "deny shell git push -f" and lines[3]["rule"] == "allow read_file *"
    assert all(set(entry) == {"at", "tool", "args", "decision", "rule", "result"} for entry in lines)


def test_totals_add_up(tmp_path, serve):
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3, "cost": 0.5,
                                      "prompt_tokens_details": {"cached_tokens": 4}}}
    server = serve(stream_of(call_delta(0, "c", "note", '{"text": "x"}'), delta("tool_calls"), usage),
                   stream_of(delta(content="ok"), delta("stop"), usage))
    events, _ = run_agent(host(server), tmp_path)
    totals = events[-1].totals
    assert [totals[k] for k in ("turns", "tool_calls", "input_tokens", "output_tokens",
                                "cached_tokens", "cost")] == [2, 1, 20, 6, 8, 1.0]


def test_a_window_smaller_than_the_budget_is_told_once(tmp_path, serve):
    window = {"chunks": [json.dumps({"models": [{"name": "m", "context_length": 4096}]}).encode()]}
    server = serve(says("one"), window, says("two"))
    agent = ta.Agent(host(server, name="ollama", windows="/api/ps"), Workspace(tmp_path))
    events = [*agent.run("a"), *agent.run("b")]
    assert len(of(ta.Warned, events)) == 1
    assert "OLLAMA_CONTEXT_LENGTH" in of(ta.Warned, events)[0].message
    assert [path for path, _, _ in server.requests] == ["/v1/chat/completions", "/api/ps",
                                                        "/v1/chat/completions"]


# ── Room in the context

def crowded(folder, replies, rounds=8, size=2000, **more):
    """An agent with some tasks behind it, of two messages each, and these replies to come."""
    agent = ta.Agent(ScriptedProvider(replies), Workspace(folder), mode="auto",
                     session=new_session(folder), **{"budget": 6000, **more})
    for number in range(rounds):
        talk(agent.session, f"task {number} " + "t" * size, f"answer {number} " + "a" * size)
    return agent


def test_a_summary_takes_the_place_of_what_is_old(tmp_path):
    agent = crowded(tmp_path, ["## Goal\nTo test.", "fine"])
    events = list(agent.run("the new task"))
    assert (events[-1].answer, events[-1].totals["compactions"]) == ("fine", 1)
    done = of(ta.Compaction, events)[0]
    assert done.reason == "budget" and done.after < done.before / 2 and done.error is None
    asked, sent = agent.provider.requests
    assert asked["messages"][-1].content.startswith("Do not go on with the task") and asked["tools"]
    assert [m.content[:6] for m in asked["messages"][:2]] == ["task 0", "answer"]      # the same conversation
    assert sent["messages"][0].content.startswith(ta.SUMMARY_HEAD + "## Goal\nTo test.")
    assert sent["messages"][-1].content == "the new task" and "task 7" in sent["messages"][-3].content
    assert agent.session.by_id[done.first_kept_entry_id].message == sent["messages"][1]
    assert said(agent.session)[0].startswith("task 0")                     # nothing left the ledger


def test_a_second_summary_carries_the_first_on(tmp_path):
    agent = crowded(tmp_path, ["FIRST", "fine", "SECOND", "fine"])
    list(agent.run("one"))
    talk(agent.session, *["more " + "m" * 6000] * 6)
    list(agent.run("two"))
    asked, sent = agent.provider.requests[2:]
    assert "FIRST" in asked["messages"][0].content and "SECOND" in sent["messages"][0].content
    assert "FIRST" not in str(sent["messages"])


def test_a_long_task_is_cut_inside_and_keeps_the_persons_words(tmp_path):
    (tmp_path / "long.txt").write_text("l" * 80 + "\n" * 3)
    words = "do exactly this: " + "w" * 3000
    reads = [[("write_file", {"path": f"f{n}.txt", "content": "c" * 4000})] for n in range(6)]
    agent = ta.Agent(ScriptedProvider(lambda messages, tools: "THE SUMMARY" if "Do not go on" in str(
        messages[-1].content) else reads.pop(0) if reads else "fine"),
        Workspace(tmp_path), mode="auto", budget=5500)
    events = list(agent.run(words))
    assert events[-1].answer == "fine" and len(of(ta.Compaction, events)) >= 1
    first = agent.provider.requests[-1]["messages"][0].content
    assert "THE SUMMARY" in first and first.endswith(f"word for word\n{words}")
    assert "## Files changed\n- f0.txt" in first
    for sent in agent.provider.requests:
        ids = [call.id for m in sent["messages"] if isinstance(m, AssistantMessage) for call in m.tool_calls]
        assert ids == [m.tool_call_id for m in sent["messages"] if isinstance(m, ToolResultMessage)]


def test_old_outputs_are_cleared_before_anything_is_summarised(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 70 + "\n" * 1)
    (tmp_path / "b.txt").write_text(("b" * 70 + "\n") * 100)
    reads = [[("read_file", {"path": "b.txt", "offset": n + 1})] for n in range(12)]
    agent = ta.Agent(ScriptedProvider([*reads, "fine"]), Workspace(tmp_path), budget=9000)
    events = list(agent.run("read"))
    cleared = of(ta.Compaction, events)
    assert events[-1].answer == "fine" and 1 <= len(cleared) <= 5           # not again in every turn
    assert all(one.after < one.before and one.first_kept_entry_id is None for one in cleared)
    last = [m.content for m in agent.provider.requests[-1]["messages"] if isinstance(m, ToolResultMessage)]
    assert last[0].startswith("[cleared to save room") and last[-1].startswith("    12\tbbb")
    assert sum("cleared" in text for text in results(agent)) == 0          # the ledger has them all


USELESS = {"a failure": (ProviderError("server", "busy here"), "the summary failed: busy here"),
           "nothing": ("  ", "the summary is empty"),
           "a call": ([("note", {"text": "x"})], "a tool was called"),
           "half of it": (AssistantMessage("half", stop_reason="length"), "was cut off"),
           "more than there was": ("s" * 99_000, "does not make it smaller")}


@pytest.mark.parametrize("reply, problem", USELESS.values(), ids=USELESS)
def test_a_summary_that_is_no_good_is_told_and_not_used(tmp_path, quick, reply, problem):
    agent = crowded(tmp_path, [reply, [("note", {"text": "y"})], "fine", "next"])
    events = list(agent.run("the new task"))
    assert events[-1].answer == "fine" and problem in of(ta.Compaction, events)[0].error
    assert len(of(ta.Compaction, events)) == 1                             # not again in each turn
    assert agent.provider.requests[1]["messages"][0].content.startswith("task 0")
    assert not [e for e in agent.session.entries if e.type == "compaction"]
    assert len(of(ta.Warned, events)) == 1 and "--budget" in of(ta.Warned, events)[0].message
    assert list(agent.run("again"))[-1].answer == "next"                   # nothing has changed


def too_long(**more):
    return ProviderError("overflow", "prompt is too long", **more)


def test_what_is_too_long_for_the_model_is_compacted_and_sent_once_more(tmp_path):
    agent = crowded(tmp_path, [too_long(), "THE SUMMARY", "fine"], budget=100_000)
    events = list(agent.run("the new task"))
    assert (events[-1].answer, [c.reason for c in of(ta.Compaction, events)]) == ("fine", ["overflow"])
    assert not of(ta.Retry, events) and events[-1].totals["turns"] == 1
    asked = agent.provider.requests[1]                                     # the same would be too long again
    assert asked["tools"] == [] and "Person: task 0" in asked["messages"][0].content
    assert "THE SUMMARY" in agent.provider.requests[2]["messages"][0].content


def test_twice_too_long_ends_the_run_and_the_next_one_works(tmp_path):
    agent = crowded(tmp_path, [too_long(), "S", too_long(), "fine"], budget=100_000)
    events = list(agent.run("one"))
    assert events[-1].error["kind"] == "overflow" and len(agent.provider.requests) == 3
    assert list(agent.run("two"))[-1].answer == "fine"


def test_too_long_with_nothing_to_leave_out_is_an_error(tmp_path):
    events, agent = run_agent([too_long()], tmp_path)
    assert events[-1].error["kind"] == "overflow" and len(agent.provider.requests) == 1
    assert "nothing older" in of(ta.Compaction, events)[0].error


def test_a_request_for_a_summary_that_is_too_long_itself_is_cut(tmp_path):
    agent = crowded(tmp_path, [too_long(), too_long(), "S", "fine"], budget=3500, rounds=40)
    events = list(agent.run("the new task"))
    assert events[-1].answer == "fine"
    sizes = [sum(len(m.content) for m in r["messages"]) for r in agent.provider.requests]
    assert sizes[1] < 3500 * 4 + 3000 and sizes[2] < sizes[1] / 2
    assert "characters left out" in agent.provider.requests[2]["messages"][0].content


def test_the_window_that_an_error_names_bounds_the_budget(tmp_path, serve):
    server = serve(error_reply(400, {"error": {"message": "prompt is too long: 9000 tokens > 8192 maximum"}}),
                   says("S"), says("fine"))
    agent = ta.Agent(host(server), Workspace(tmp_path), budget=100_000)
    talk(agent.session, *["x" * 5000] * 8)
    events = list(agent.run("go"))
    assert events[-1].answer == "fine" and agent.provider.window == 8192
    assert agent.room() == 8192 - 2048


def test_what_brought_nothing_once_is_tried_again_when_it_brought_something_since(tmp_path):
    """No request stays over the budget because one that was far over it could not be helped."""
    def reply(messages, tools):
        return "SUMMARY" if "Do not go on" in messages[-1].content else "word " * 1600
    agent = ta.Agent(ScriptedProvider(reply), Workspace(tmp_path), budget=16_000)
    list(agent.run("z " * 60_000))                             # alone too much, and the last message
    for _ in range(25):
        list(agent.run("go"))
    sizes = [sum(map(ta.size_of, request["messages"])) for request in agent.provider.requests]
    assert max(sizes[-15:]) < 18_000


def test_a_rewind_lets_a_compaction_be_tried_again(tmp_path):
    agent = crowded(tmp_path, ["", "fine", "SUMMARY", "fine"])
    assert of(ta.Compaction, list(agent.run("one")))[0].error
    agent.rewind(agent.session.moment(agent.session.entries[-2]), {})
    assert of(ta.Compaction, list(agent.run("two")))[0].error is None


def test_compacting_by_hand(tmp_path):
    agent = crowded(tmp_path, ["S", "fine"], rounds=3)
    events = list(agent.compact("the colour is red"))
    assert [e.type for e in events] == ["compaction"] and events[0].reason == "manual"
    assert "keep in mind: the colour is red" in agent.provider.requests[0]["messages"][-1].content
    assert "nothing older" in list(agent.compact())[-1].error or len(agent.provider.requests) == 2


def test_stopping_while_a_summary_is_written_ends_the_run(tmp_path):
    agent = crowded(tmp_path, [lambda *_: agent.stop() or ProviderError("aborted", "stopped")])
    events = list(agent.run("go"))
    assert trace(events[-2:]) == "run_end aborted aborted\nrun_settled" and not of(ta.Compaction, events)


def test_what_is_said_while_a_summary_is_written_is_heard(tmp_path):
    agent = crowded(tmp_path, [lambda *_: agent.steer("and this") or "SUMMARY", "one", "two"])
    *_, last = agent.run("the task")
    assert last.answer == "two" and last.totals["compactions"] == 1
    assert [m.content for m in agent.provider.requests[-1]["messages"]][-3:] == ["the task", "one", "and this"]


def test_a_budget_that_is_too_small_is_said(tmp_path):
    events, _ = run_agent(["fine"], tmp_path, budget=500)
    assert "budget of 500 tokens is too small" in of(ta.Warned, events)[0].message
    assert events[-1].answer == "fine"


def test_over_http_the_prefix_stays_byte_for_byte(tmp_path, serve):
    """A long task with a small budget, an exit and a resume: requests only grow at their end,
    but for where the ledger says that the past was changed."""
    (tmp_path / "b.txt").write_text(("b" * 70 + "\n") * 60)
    calls = [stream_of(call_delta(0, f"c{n}", "read_file", json.dumps({"path": "b.txt", "offset": n % 50 + 1})),
                       delta("tool_calls")) for n in range(30)]
    server = serve(*calls, says("done"), says("after the resume"))
    session = new_session(tmp_path)
    agent = ta.Agent(host(server), Workspace(tmp_path), mode="auto", budget=14_000, session=session,
                     max_steps=50)
    events = list(agent.run("read it"))
    session.close()
    later = ta.Agent(host(server), Workspace(tmp_path), mode="plan", budget=14_000,
                     session=Session.load(session.path))
    events += list(later.run("and now?"))
    changes, request = {}, 0
    for event in events:
        if isinstance(event, ta.TurnStart):
            request += 1
        elif isinstance(event, ta.Compaction):
            changes[request] = event
    bodies = [body for _, _, body in server.requests]
    assert len(bodies) == request == 32 and 1 <= len(changes) <= 6
    assert len({json.dumps(body["tools"]) for body in bodies}) == 1
    for number, (before, after) in enumerate(zip(bodies, bodies[1:]), 1):
        start = json.dumps(before["messages"])[:-1]
        assert json.dumps(after["messages"]).startswith(start) is (number not in changes), number


# ── Said meanwhile

def persons(agent) -> list[str]:
    return [e.message.content for e in agent.session.active_path() if isinstance(e.message, UserMessage)]


def test_what_is_said_meanwhile_joins_after_the_calls_of_the_turn(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.ToolStart) and event.id == "1":
            threading.Thread(target=lambda: (agent.steer("hurry"), agent.steer("really"))).start()
            time.sleep(0.05)
    calls = AssistantMessage(tool_calls=(ToolCall("1", "note", {"text": "a"}), ToolCall("2", "note", {"text": "b"})),
                             stop_reason="tool_use")
    events, agent = run_agent([calls, "fine"], tmp_path, watch=watch)
    assert [f"{m.role} {m.content}" for m in agent.provider.requests[1]["messages"]][-4:] == [
        "tool_result noted in AGENTS.md", "tool_result noted in AGENTS.md", "user hurry", "user really"]
    assert events[-1].answer == "fine"


def test_the_run_goes_on_with_what_was_said_while_the_answer_came(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.TextDelta) and not persons(agent)[1:]:
            agent.steer("one more thing")
    events, agent = run_agent(["first", "second"], tmp_path, watch=watch)
    assert (events[-1].answer, events[-1].totals["turns"]) == ("second", 2)
    assert persons(agent) == ["go", "one more thing"]


def test_a_follow_up_is_heard_when_the_run_would_stop(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.RunStart):
            agent.follow_up("then this")
            agent.follow_up("and that")
    events, agent = run_agent([[("note", {"text": "a"})], "first", "second", "third"], tmp_path, watch=watch)
    assert events[-1].answer == "third" and persons(agent) == ["go", "then this", "and that"]
    assert [m.content for m in agent.provider.requests[2]["messages"]][-2:] == ["first", "then this"]


def test_what_was_said_too_late_is_heard_by_the_next_run(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.RunEnd):
            agent.steer("too late")
    events, agent = run_agent([ProviderError("auth", "no"), "fine"], tmp_path, watch=watch)
    agent.follow_up("and then")
    agent.provider = ScriptedProvider(["one", "two"])
    assert list(agent.run("again"))[-1].answer == "two"
    assert persons(agent) == ["go", "again", "too late", "and then"]


def test_what_was_said_to_one_session_is_not_heard_by_another(tmp_path):
    _, agent = run_agent(["fine"], tmp_path)
    agent.steer("old"), agent.follow_up("older")
    agent.begin(Session())
    agent.provider = ScriptedProvider(["new"])
    list(agent.run("go"))
    assert persons(agent) == ["go"]


@pytest.mark.parametrize("say", ["steer", "follow_up"])
def test_what_is_said_at_the_last_step_waits_for_the_next_run(tmp_path, say):
    def watch(event, agent):
        if isinstance(event, ta.TextDelta) and not persons(agent)[1:]:
            getattr(agent, say)("one more thing")
    events, agent = run_agent(["first", "second", "third"], tmp_path, watch=watch, max_steps=1)
    assert (events[-1].reason, events[-1].answer, persons(agent)) == ("max_steps", "first", ["go"])
    agent.max_steps = 9
    *_, last = agent.run("go on")
    assert (last.reason, persons(agent)) == ("stop", ["go", "go on", "one more thing"])


def test_a_follow_up_to_a_run_that_is_stopped_waits_for_the_next_run(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.TextDelta):
            agent.follow_up("and then")
            agent.stop()
    events, agent = run_agent(["first", "second", "third"], tmp_path, watch=watch)
    assert (events[-1].reason, persons(agent), list(agent.follow_ups)) == ("aborted", ["go"], ["and then"])
    *_, last = agent.run("again")
    assert (last.answer, persons(agent)) == ("third", ["go", "again", "and then"])


def test_a_run_that_was_steered_shows_it_between_two_turns(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.TextDelta) and not persons(agent)[1:]:
            agent.steer("hurry")
        if isinstance(event, ta.MessageStart) and event.message.role == "user":
            assert agent.session.active_path()[-1].message == event.message      # the ledger first
    events, agent = run_agent(["first", "second"], tmp_path, watch=watch)
    assert trace(events) == """\
run_start
message_start user
message_end user
turn_start
message_start assistant
message_end assistant stop
turn_end
message_start user
message_end user
turn_start
message_start assistant
message_end assistant stop
turn_end
run_end stop
run_settled"""


def test_a_fork_hears_what_was_said_and_not_heard(tmp_path):
    _, agent = run_agent(["fine"], tmp_path)
    agent.steer("this"), agent.follow_up("then that")
    flags = types.SimpleNamespace(no_session=True)
    ta.Chat(agent, None, types.SimpleNamespace(home=tmp_path / "home", flags=flags)).fork()
    agent.provider = ScriptedProvider(["one", "two"])
    list(agent.run("again"))
    assert persons(agent) == ["go", "again", "this", "then that"]


@posix
def test_of_a_flood_the_end_is_shown_too(tmp_path):
    pieces = list(Workspace(tmp_path).shell("seq 60000; echo END"))
    assert "[…]" in "".join(pieces) and pieces[-1].rstrip().endswith("END")
    assert sum(map(len, pieces)) < 3 * ta.MAX_RESULT + 65536


# ── Side by side

def reads(*paths):
    return AssistantMessage(tool_calls=tuple(ToolCall(p, "read_file", {"path": p}) for p in paths),
                            stop_reason="tool_use")


def test_calls_that_only_read_run_side_by_side_and_keep_their_order(tmp_path):
    both = threading.Barrier(3, timeout=20)                   # passes only if all are there at once

    @ta.tool
    def read_file(path: str) -> str:
        """Reads.

        path: the file
        """
        both.wait()
        return f"text of {path}"
    agent = ta.Agent(ScriptedProvider([reads("a", "b", "c"), "fine"]), Workspace(tmp_path))
    agent.tools["read_file"] = read_file
    events = list(agent.run("go"))
    assert results(agent) == ["text of a", "text of b", "text of c"] and events[-1].answer == "fine"
    assert [f"{e.type} {e.id}" for e in events if isinstance(e, ta.ToolStart | ta.ToolEnd)] == [
        "tool_start a", "tool_start b", "tool_start c", "tool_end a", "tool_end b", "tool_end c"]


def own_reader(body):
    """A tool called read_file that does this instead."""
    def read_file(path: str) -> str:
        """Reads.

        path: the file
        """
        return body(path)
    return ta.tool(read_file)


def test_many_of_them_wait_for_a_free_thread(tmp_path):
    names = [f"{number}" for number in range(3 * ta.MOST_AT_ONCE)]
    agent = ta.Agent(ScriptedProvider([reads(*names), "fine"]), Workspace(tmp_path))
    agent.tools["read_file"] = own_reader(lambda path: f"text of {path}")
    list(agent.run("go"))
    assert results(agent) == [f"text of {name}" for name in names]


def test_a_generator_among_them_runs_in_the_main_thread_and_is_seen_at_work(tmp_path):
    def read_file(path: str):
        """Reads.

        path: the file
        """
        yield f"reading {path}"
        return threading.current_thread() is threading.main_thread()
    agent = ta.Agent(ScriptedProvider([reads("a", "b"), "fine"]), Workspace(tmp_path))
    agent.tools["read_file"] = ta.tool(read_file)
    events = list(agent.run("go"))
    assert results(agent) == ["True", "True"]
    assert [e.text for e in of(ta.ToolOutput, events)] == ["reading a", "reading b"]


@posix
@pytest.mark.parametrize("way", ["from another thread", "by Ctrl-C in order", "by Ctrl-C"])
def test_what_is_stuck_among_them_is_left_when_the_run_is_stopped(tmp_path, monkeypatch, way):
    """The first is stuck, the second is done, the third is stuck as well."""
    monkeypatch.setattr(ta, "MOST_AT_ONCE", 2)                 # so the third comes after the second
    over, both = threading.Event(), threading.Barrier(2, timeout=20)

    def body(path):
        if path == "b":
            return "text of b"
        both.wait()
        if path == "a":
            while not agent.abort.callbacks:               # the main thread waits for a result
                time.sleep(0.01)
            agent.stop() if way == "from another thread" else os.kill(os.getpid(), signal.SIGINT)
        over.wait(20)
        return "too late"
    agent = ta.Agent(ScriptedProvider([reads("a", "b", "c"), "again"]), Workspace(tmp_path))
    agent.tools["read_file"] = own_reader(body)
    before = signal.getsignal(signal.SIGINT)
    if way == "by Ctrl-C in order":
        signal.signal(signal.SIGINT, lambda *_: agent.stop())
    try:
        events = list(agent.run("go"))
        assert list(agent.run("again"))[-1].answer == "again"       # while they are still stuck
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)
    assert results(agent) == ["stopped, interrupted by the person", "text of b",
                              "stopped, interrupted by the person"]
    assert trace(events) == """\
run_start
message_start user
message_end user
turn_start
message_start assistant
toolcall_start
toolcall_end
toolcall_start
toolcall_end
toolcall_start
toolcall_end
message_end assistant tool_use
tool_start read_file allow
tool_start read_file allow
tool_start read_file allow
tool_end read_file error
message_start tool_result
message_end tool_result
tool_end read_file ok
message_start tool_result
message_end tool_result
tool_end read_file error
message_start tool_result
message_end tool_result
turn_end
run_end aborted aborted
run_settled"""


def test_what_is_stuck_keeps_nobody_waiting_at_exit(tmp_path):
    (tmp_path / "program.py").write_text(f"""
import sys, threading
sys.path.insert(0, {str(PROGRAM.parent)!r})
from tiny_agent import *

@tool
def read_file(path: str) -> str:
    '''Reads.

    path: the file
    '''
    agent.stop()
    threading.Event().wait()

calls = tuple(ToolCall(name, "read_file", {{"path": name}}) for name in "ab")
agent = Agent(ScriptedProvider([AssistantMessage(tool_calls=calls, stop_reason="tool_use")]), Workspace("."))
agent.tools["read_file"] = read_file
print(list(agent.run("go"))[-1].reason)
""")
    done = subprocess.run([sys.executable, "-B", "program.py"], cwd=tmp_path, text=True, timeout=30,
                          capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == ("aborted\n", "", 0)


@pytest.mark.parametrize("call", [("grep", {"pattern": "x"}), ("find_files", {"pattern": "*"})], ids=["grep", "find"])
def test_a_search_that_is_stopped_says_so(tmp_path, call):
    for name in ("a", "b"):
        (tmp_path / name).write_text("x")
    agent = ta.Agent(ScriptedProvider([[call]]), Workspace(tmp_path))
    may_read = agent.workspace.may_read
    agent.workspace.may_read = lambda path: agent.stop() or may_read(path)       # at the first file
    assert list(agent.run("go"))[-1].reason == "aborted"
    assert results(agent) == ["stopped, interrupted by the person"]


def test_a_refusal_among_them_stands_in_its_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".env").write_text("x")
    events, agent = run_agent([reads("a", ".env", "b", "gone"), "fine"], tmp_path)
    assert [text.strip()[:12] for text in results(agent)] == ["1\ta", "denied: the ", "1\tb", "there is no "]
    assert events[-1].totals["tool_failures"] == 2


def test_what_changes_something_waits_for_its_turn(tmp_path):
    (tmp_path / "a").write_text("old\n")
    calls = (ToolCall("1", "read_file", {"path": "a"}), ToolCall("2", "grep", {"pattern": "old"}),
             ToolCall("3", "write_file", {"path": "a", "content": "new\n"}),
             ToolCall("4", "read_file", {"path": "a"}), ToolCall("5", "find_files", {"pattern": "*"}))
    events, agent = run_agent([AssistantMessage(tool_calls=calls, stop_reason="tool_use"), "fine"], tmp_path)
    assert [re.sub(r"\s+", " ", text)[:9].strip() for text in results(agent)] == [
        "1 old", "a:1: old", "wrote a:", "1 new", "a"]
    order = [f"{e.type} {e.id}" for e in events if isinstance(e, ta.ToolStart | ta.ToolEnd)]
    assert order.index("tool_end 2") < order.index("tool_start 3") < order.index("tool_end 3") < \
        order.index("tool_start 4")


def test_stopping_while_they_are_decided_gives_each_a_result(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.ToolStart):
            agent.stop()
    events, agent = run_agent([reads("a", "b", "c")], tmp_path, watch=watch)
    assert events[-1].reason == "aborted" and len(results(agent)) == 3
    assert all("stopped the run" in text for text in results(agent))


# ── The same again and again

def test_the_same_call_with_the_same_result_is_remarked_upon_and_then_ends_the_run(tmp_path):
    events, agent = run_agent([[("find_files", {"pattern": "*.x"})]] * 9, tmp_path)
    assert ["times in a row" in text for text in results(agent)] == [False, False, True, True, True]
    assert events[-1].reason == "max_steps" and "5 times in a row" in events[-1].error["message"]


def test_who_speaks_up_is_heard_before_a_run_ends_as_a_repetition(tmp_path):
    def watch(event, agent):
        if isinstance(event, ta.TurnEnd) and event.turn == ta.END_AFTER - 1:
            agent.steer("try *.y")
    call = [("find_files", {"pattern": "*.x"})]
    events, agent = run_agent([*[call] * ta.END_AFTER, "I see"], tmp_path, watch=watch)
    assert (events[-1].answer, persons(agent)) == ("I see", ["go", "try *.y"])


@pytest.mark.parametrize("calls", [
    [("shell", {"command": f"echo {n}"}) for n in range(7)],                  # other arguments
    [("shell", {"command": "cat n; echo x >> n"})] * 7,                         # another result
    [("find_files", {"pattern": "*.x"}), ("find_files", {"pattern": "*.y"})] * 4], ids=[
        "other arguments", "another result", "in turns"])
def test_what_differs_is_no_repetition(tmp_path, calls):
    (tmp_path / "n").write_text("")
    events, agent = run_agent([*([call] for call in calls), "fine"], tmp_path)
    assert events[-1].answer == "fine" and not any("in a row" in text for text in results(agent))


@posix
def test_nor_does_the_file_that_a_long_output_lies_in(tmp_path):
    for command in ("seq 100000", "cat long"):
        (tmp_path / "long").write_text("x" * 60_000)
        events, _ = run_agent([[("shell", {"command": command})]] * 9, tmp_path)
        assert (events[-1].reason, events[-1].totals["turns"]) == ("max_steps", 5)


@posix
def test_the_time_that_a_command_takes_makes_no_difference(tmp_path):
    (tmp_path / "n").write_text("")
    events, agent = run_agent([[("shell", {"command": "sleep 0.$(wc -l < n); echo >> n"})]] * 9, tmp_path)
    assert events[-1].reason == "max_steps" and len(results(agent)) == 5


# ── Going back, with files

def edited(folder, *calls, **files):
    """(an agent that has made these calls, a task each, in a folder with these files)"""
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    agent = ta.Agent(ScriptedProvider([reply for call in calls for reply in ([call], "done")]),
                     Workspace(folder), mode="auto", session=new_session(folder))
    for number in range(len(calls)):
        list(agent.run(f"task {number}"))
    return agent


def task(agent, number):
    return [e for e in agent.session.entries if isinstance(e.message, UserMessage)][number]


def go_back(agent, entry, paths=None, **more):
    moment = agent.session.moment(entry)
    files = agent.files_back(moment)
    failed = agent.rewind(moment, files, paths=files if paths is None else paths, **more)
    return files, failed


def texts_in(folder) -> dict:
    return {path.stem: path.read_bytes().decode("utf-8", "replace") for path in sorted(folder.glob("*.txt"))}


WRITES = [("write_file", {"path": "a.txt", "content": "A1\n"}),
          ("write_file", {"path": "new.txt", "content": "N1\n"}),
          ("replace_in_file", {"path": "a.txt", "old": "A1", "new": "A2"}),
          ("write_file", {"path": "new.txt", "content": "N2\n"})]


@pytest.mark.parametrize("number, expected", [(0, {"a": "A0\n"}), (1, {"a": "A1\n"}),
                                              (2, {"a": "A1\n", "new": "N1\n"}),
                                              (3, {"a": "A2\n", "new": "N1\n"})])
def test_files_go_back_with_the_conversation_and_forth_again(tmp_path, number, expected):
    agent = edited(tmp_path, *WRITES, a="A0\n")
    agent.session.close()                     # the ledger is enough
    agent.begin(Session.load(agent.session.path))
    before = said(agent.session)
    files, failed = go_back(agent, task(agent, number))
    assert texts_in(tmp_path) == expected and not failed and not any(f.foreign for f in files.values())
    assert said(agent.session) == before[:4 * number]
    go_back(agent, agent.session.entries[-1])                  # a rewind can be undone
    assert texts_in(tmp_path) == {"a": "A2\n", "new": "N2\n"} and said(agent.session) == before
    go_back(agent, agent.session.entries[-1])                  # and that too
    assert texts_in(tmp_path) == expected


ODD_FILES = {"odd bytes": b"caf\xe9\r\n\xff", "a byte order mark": b"\xef\xbb\xbfx\r\ny",
             "characters of four bytes": "a😀\u2028b".encode(), "nothing in it": b""}


@pytest.mark.parametrize("data", ODD_FILES.values(), ids=ODD_FILES)
def test_a_file_comes_back_byte_for_byte(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    agent = edited(tmp_path, ("write_file", {"path": "a.txt", "content": "other"}))
    agent.session.close()
    agent.begin(Session.load(agent.session.path))
    go_back(agent, task(agent, 0))
    assert (tmp_path / "a.txt").read_bytes() == data


def test_what_others_changed_since_is_named_and_not_touched_without_a_yes(tmp_path):
    agent = edited(tmp_path, *WRITES[:2], a="A0\n")
    (tmp_path / "a.txt").write_text("by hand\n")
    (tmp_path / "new.txt").unlink()
    files, _ = go_back(agent, task(agent, 0), paths=[])
    assert {path: file.foreign for path, file in files.items()} == {"a.txt": True}    # new.txt is gone already
    assert texts_in(tmp_path) == {"a": "by hand\n"}
    files, _ = go_back(agent, task(agent, 0))
    assert texts_in(tmp_path) == {"a": "A0\n"}
    go_back(agent, agent.session.entries[-1])
    assert texts_in(tmp_path) == {"a": "by hand\n"}           # what was overwritten is kept as well


@posix
@pytest.mark.parametrize("text", ["N1\n", "another text\n"])
def test_a_link_that_was_put_in_the_place_of_a_file_is_not_followed(tmp_path, text):
    """Also if what it leads to happens to be equal."""
    agent = edited(tmp_path, *WRITES[:2], a="A0\n")
    (tmp_path / "other.txt").write_text(text)
    (tmp_path / "new.txt").unlink()
    (tmp_path / "new.txt").symlink_to("other.txt")
    moment = agent.session.moment(task(agent, 0))
    files = agent.files_back(moment)
    assert "link to other.txt" in files["new.txt"].problem
    forced = {"new.txt": ta.FileBack(None, "", False)}         # the link came after the question
    assert "stays as it is" in agent.rewind(moment, forced, paths=["new.txt"])[0]
    assert (tmp_path / "other.txt").read_text() == text and (tmp_path / "new.txt").is_symlink()


def test_files_go_back_in_a_fork_as_in_the_session_it_copies(tmp_path):
    agent = edited(tmp_path, ("write_file", {"path": "f.txt", "content": "v1"}))
    go_back(agent, task(agent, 0), paths=[])                   # the conversation alone
    agent.provider = ScriptedProvider([[("write_file", {"path": "f.txt", "content": "v2"})], "done"])
    list(agent.run("another way"))
    fork = agent.session.fork(tmp_path / "home")
    fork.close()
    agent.begin(Session.load(fork.path))
    go_back(agent, agent.session.entries[-1])                  # nothing was done since
    assert texts_in(tmp_path) == {"f": "v2"}
    first = next(e for e in agent.session.entries if e.type == "leaf")
    assert agent.session.changes(agent.session.entries.index(first))["f.txt"]["before"] is None
    go_back(agent, agent.session.entries[0])
    assert texts_in(tmp_path) == {}


UNCOVERED = {"too large": (b"x" * 1_000_001, "larger than 1,000,000 bytes"),
             "a key": (KEY.encode(), "holding a key"),
             "binary further down": (b"x" * 9000 + b"\0", "binary")}


@pytest.mark.parametrize("data, why", UNCOVERED.values(), ids=UNCOVERED)
def test_what_is_not_covered_is_said_at_the_edit_and_at_the_rewind(tmp_path, data, why):
    ta.SECRETS.add(KEY)
    (tmp_path / "a.txt").write_bytes(data)
    agent = edited(tmp_path, ("write_file", {"path": "a.txt", "content": "other"}))
    assert f"not kept ({why})" in results(agent)[0] and KEY not in agent.session.path.read_text()
    files, _ = go_back(agent, task(agent, 0), paths=[])
    assert files["a.txt"].problem == why and texts_in(tmp_path) == {"a": "other"}


def test_the_model_is_told_what_it_cannot_know_of_its_files(tmp_path):
    agent = edited(tmp_path, *WRITES[:2], a="A0\n")
    agent.provider = ScriptedProvider(["x", "y", "z"])
    go_back(agent, task(agent, 1), paths=[])                   # the conversation only
    list(agent.run("go on"))
    assert said(agent.session)[-2].endswith("[note from the program: the person went back; later "
                                            "changes stayed in: new.txt]")
    go_back(agent, task(agent, 0), conversation=False)         # the files only
    list(agent.run("go on"))
    assert "files were brought back: a.txt, new.txt" in said(agent.session)[-2]
    list(agent.run("go on"))
    assert said(agent.session)[-2] == "go on"


def test_a_file_that_cannot_be_brought_back_is_named(tmp_path):
    agent = edited(tmp_path, WRITES[0], a="A0\n")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    moment = agent.session.moment(task(agent, 0))
    files = agent.files_back(moment)
    assert "folder" in files["a.txt"].problem
    files = {"a.txt": ta.FileBack("A0\n", "", False)}
    assert "stays as it is" in agent.rewind(moment, files, paths=["a.txt"])[0]


# ─── Showing events ──────────────────────────────────────────────────────────────────────────────

def test_the_answer_alone_goes_to_stdout(tmp_path):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/story.txt").write_text("Once upon a time\n")
    done = cli(tmp_path, "read story.txt")
    assert done.stdout == "story.txt begins like this:\n\nOnce upon a time\n"
    assert "read_file story.txt" in done.stderr and "scripted model" in done.stderr
    assert "\x1b" not in done.stderr


def test_json_is_one_event_a_line_and_nothing_else(tmp_path):
    done = cli(tmp_path, "--json", "--mode", "auto", "--sandbox", "off",
               "create fib.py that prints the first 10 Fibonacci numbers, then run it")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (events[0]["type"], events[-1]["type"]) == ("run_start", "run_settled")
    assert done.stdout.isascii() and {e["type"] for e in events} <= set(ta.EVENTS)
    assert Path(events[-1]["session"]).exists() and events[-1]["answer"].endswith("34")
    for event in events:
        kind = ta.EVENTS[event["type"]]
        assert set(event) == {"type", *kind.__dataclass_fields__}


def test_long_texts_are_folded_and_say_so():
    folded = ta.fold("a" * 5000 + "\n" + "b\n" * 300 + "touch pwned" + " " * 500 + "end")
    assert "4,001 characters more" in folded or re.search(r"[\d,]+ characters more", folded)
    assert re.search(r"\d+ lines more", folded) and "touch pwned" in folded and len(folded) < 2500


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, folder, *words, env=(), columns=80):
        import pty
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8",
                       "TERM": "dumb", "AGENT_HOME": str(folder / "home"), **dict(env)}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(sys.executable, [sys.executable, str(PROGRAM), *words], environment)
        self.resize(columns)
        self.text, self.mark = "", 0

    def resize(self, columns):
        import fcntl
        import struct
        import termios
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, pattern, seconds=15):
        import select
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text[self.mark:]):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text[self.mark:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        shown, self.mark = self.text[self.mark:], len(self.text)
        assert re.search(pattern, shown), shown
        return shown

    def send(self, text):
        os.write(self.fd, text.encode())

    def exit_status(self):
        try:
            with contextlib.suppress(OSError):
                self.read_until(r"\Z\A.", 5)
        except AssertionError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)      # if it did not end by itself
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


QUESTION = r"allow\? \[y/N[^]]*\] "


@posix
@pytest.mark.parametrize("answer, exists", [("y", True), ("yes", True), ("n", False), ("", False),
                                            ("always", True), ("yes please", False),
                                            ("\x04", False)])
def test_the_person_is_asked_and_sees_what_will_happen(tmp_path, answer, exists):
    terminal = Terminal(tmp_path, "create fib.py that prints the first 10 Fibonacci numbers")
    shown = terminal.read_until(QUESTION)
    assert "fib.py: new file, 6 lines" in shown and "| +a, b = 0, 1" in shown
    terminal.send(answer + ("" if answer == "\x04" else "\n"))
    if exists:
        terminal.read_until(QUESTION)        # for the command
        terminal.send("n\n")
    terminal.read_until("denied")
    assert terminal.exit_status() == 0
    assert (tmp_path / "workspace/fib.py").exists() is exists


@posix
def test_the_answers_at_a_question(tmp_path, serve):
    """Show, a reason that the model gets, always for exactly this call."""
    long = json.dumps({"command": "echo " + "x" * 3000 + "; touch a"})
    same = call_delta(0, None, "shell", '{"command": "touch b"}')
    server = serve(stream_of(call_delta(0, None, "shell", long), delta("tool_calls")),
                   stream_of(same, delta("tool_calls")), stream_of(same, delta("tool_calls")),
                   stream_of(call_delta(0, None, "shell", '{"command": "touch b c"}'),
                             delta("tool_calls")), says())
    terminal = Terminal(tmp_path, "--base-url", server.url, "go")
    assert "characters more" in terminal.read_until(QUESTION)
    terminal.send("show\n")
    assert "x" * 3000 in terminal.read_until(QUESTION).replace("\r\n", "")
    terminal.send("no, use b instead\n")
    terminal.read_until(QUESTION)
    terminal.send("always\n")
    assert "touch b c" in terminal.read_until(QUESTION)        # the same call was not asked again
    terminal.send("n\n")
    terminal.read_until("fine")
    assert terminal.exit_status() == 0
    told = [m["content"] for m in server.body()["messages"] if m["role"] == "tool"]
    assert told[0] == "denied: the person said no: use b instead" and told[3].startswith("denied: ")
    assert [text.partition(" (")[0] for text in told[1:3]] == ["exit status 0"] * 2


@posix
def test_letters_of_other_scripts_are_pointed_out(tmp_path, serve):
    server = serve(stream_of(call_delta(0, None, "shell", json.dumps({"command": "curl ex\u0430mple.x"})),
                             delta("tool_calls")), says())
    terminal = Terminal(tmp_path, "--base-url", server.url, "go")
    assert "\\u0430" in terminal.read_until(QUESTION)
    terminal.send("n\n")
    assert terminal.exit_status() == 0


@posix
def test_what_was_typed_before_the_question_is_no_answer(tmp_path, serve):
    server = serve({"chunks": [sse(call_delta(0, "c", "shell", '{"command": "touch pwned"}'),
                                   delta("tool_calls"))]}, says())
    terminal = Terminal(tmp_path, "--base-url", server.url)
    terminal.read_until(r"custom ask \d+%> ")
    terminal.send("do it\ny\n")
    terminal.read_until(QUESTION)
    terminal.send("n\n")
    terminal.read_until(r"custom ask \d+%> ")
    assert not (tmp_path / "workspace/pwned").exists()
    terminal.send("\x04")
    assert terminal.exit_status() == 0


@posix
def test_ctrl_c_at_a_question_refuses_and_stops(tmp_path):
    terminal = Terminal(tmp_path, "create fib.py that prints the first 10 Fibonacci numbers")
    terminal.read_until(QUESTION)
    terminal.send("\x03")
    terminal.read_until("stopped")
    assert terminal.exit_status() == 130 and not (tmp_path / "workspace/fib.py").exists()


WIDE_OPEN = {"TERM": "xterm-256color"}
SURROUNDINGS = {
    "a colour terminal": (WIDE_OPEN, 80, r"\x1b\[2m"), "no colour wanted": ({**WIDE_OPEN, "NO_COLOR": "1"}, 80, ""),
    "a dumb terminal": ({"TERM": "dumb"}, 80, ""), "no TERM at all": ({"TERM": ""}, 80, r"\x1b\[2m"),
    "20 columns": ({"TERM": "dumb"}, 20, ""), "a size of nothing": (WIDE_OPEN, 0, r"\x1b\[2m"),
    "the C locale": ({"TERM": "dumb", "LC_ALL": "C", "LANG": "C"}, 80, "")}


@posix
@pytest.mark.parametrize("env, columns, escapes", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_one_shot_on_any_terminal(tmp_path, serve, env, columns, escapes):
    server = serve(stream_of(delta(reasoning_content="grübeln"), delta(content="erst\n"),
                             call_delta(0, "c", "shell", '{"command": "echo é日本; sleep 0.5"}'),
                             delta("tool_calls")), says("fertig: é日本"))
    terminal = Terminal(tmp_path, "--base-url", server.url, "--mode", "auto", "--sandbox", "off", "tu es",
                        env=env, columns=columns)
    terminal.read_until(r"- shell echo")
    terminal.resize(30)
    shown = terminal.read_until("fertig: é日本") and terminal.text
    assert terminal.exit_status() == 0 and "| é日本" in shown and "grübeln" in shown
    assert re.search(escapes, shown) if escapes else not re.search(r"\x1b\[\d*m", shown)
    assert env["TERM"] != "dumb" or "\x1b" not in shown and "running" not in shown


def remains(text) -> str:
    """What a terminal shows in the end, if it can erase a line and go up one."""
    rows, row = [""], 0
    for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif piece == "\x1b[A":
            row -= 1
        elif piece == "\x1b[K":
            rows[row] = ""
        elif piece[0] not in "\r\x1b":
            rows[row] += piece
    return "\n".join(rows)


@posix
def test_what_is_waited_for_passes_on_a_terminal(tmp_path, serve):
    ready = threading.Event()
    command = json.dumps({"command": "seq 5; while [ ! -e go ]; do sleep 0.02; done; echo six"})
    server = serve(stream_of(call_delta(0, "c", "shell", command), delta("tool_calls"), {
        "choices": [], "usage": {"prompt_tokens": 3000, "completion_tokens": 400}}, after=ready), says())
    terminal = Terminal(tmp_path, "--base-url", server.url, "--mode", "auto", "--sandbox", "off", "go",
                        env=WIDE_OPEN)
    terminal.read_until(r"waiting \d+ s, about \d+ tokens")
    ready.set()
    passing = terminal.read_until(r"running \d+ s, about 3,400 tokens")
    assert re.search(r"\| 3\r\n  \| 4\r\n  \| 5\r\n  running", passing)
    (tmp_path / "workspace/go").touch()
    terminal.read_until("fine")
    assert terminal.exit_status() == 0
    left = remains(terminal.text)
    assert not re.search(r"waiting|running|\| 3", left)
    assert re.search(r"- shell seq 5.*\n  exit status 0 .*\n  \| 5\n  \| six\nfine\n", left)


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_nothing_passes_during_a_question_or_within_a_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = ta.Screen(Tty(), Tty())

    def drawn() -> str:
        before = len(screen.err.getvalue())
        screen.since = screen.since and screen.since - 60
        screen.draw()
        return screen.err.getvalue()[before:]
    with screen.waiting():
        assert "waiting 60 s" in drawn()
        screen.show(ta.TextDelta("half a li"))
        assert drawn() == ""
        screen.show(ta.ToolcallStart("1", "note"))
        screen.show(ta.ToolcallDelta("1", "note", "x" * 4000))
        assert "about 1,002 tokens" in drawn()
        monkeypatch.setattr(ta, "read_answer", lambda agent: "n")
        ta.ask_at_terminal(None, screen, ta.Question("note", {}, "text", "why", ""))
        assert drawn() == ""
        screen.show(ta.ToolStart("1", "note", {}, "allow", None, ""))
        screen.show(ta.ToolOutput("1", "10%\r90%\r\n日本\n"))
        assert re.search(r"\| 90%\n  \| 日本\n  running 60 s", drawn())


# ─── Commands ────────────────────────────────────────────────────────────────────────────────────

PROMPT = r"[\s\S]*demo \w+ \d+%> "


@posix
def test_a_chat(tmp_path):
    terminal = Terminal(tmp_path, "--mode", "auto", "--sandbox", "off")
    terminal.read_until(r"demo auto \d+%> ")
    for line, shown in (("/help", r"/exit: leave"), ("/mode", r"\* auto"), ("/mode plan", r"\* plan"),
                        ("run echo hi", "plan mode only reads"), ("/mode auto", r"\* auto"),
                        ("run echo hi", "exit status 0"), ("/status", r"session: /\S+\.jsonl"),
                        ("/model", "model: scripted"), ("/provider", r"\* demo"), ("/new", "A new"),
                        ("/status", "not in a file"), ("/why shell git push -f", "deny: the rule"), ("/nope", "no command /nope; /help"),
                        ("/mode fast", "there is no mode 'fast'"), ("/provider groq", "GROQ_API_KEY"),
                        ('"""\nrun echo one\n\n"""', "exit status 0")):
        terminal.send(line + "\n")
        terminal.read_until(shown + PROMPT)
    terminal.send("exit\n")
    assert terminal.exit_status() == 0


@posix
def test_ctrl_c_stops_the_task_and_keeps_the_chat(tmp_path):
    terminal = Terminal(tmp_path, "--mode", "auto", "--sandbox", "off")
    terminal.read_until(r"demo auto \d+%> ")
    terminal.send("run echo $$ > p; sleep 60\n")
    while not (tmp_path / "workspace/p").exists():
        time.sleep(0.02)
    terminal.send("\x03")
    terminal.read_until("stopped[\\s\\S]*nothing stops: ")
    terminal.send("\n")                                    # nothing: it stops
    terminal.read_until(PROMPT)
    terminal.send("run echo $$ > q; sleep 60\n")
    while not (tmp_path / "workspace/q").exists():
        time.sleep(0.02)
    terminal.send("\x03")
    terminal.read_until("nothing stops: ")
    terminal.send("run echo redirected\n")                # a line goes on with it
    terminal.read_until("exit status 0[\\s\\S]*redirected" + PROMPT)
    terminal.send("run sleep 60\n")
    terminal.read_until("- shell sleep")
    terminal.send("\x03")
    terminal.read_until("nothing stops: ")
    interrupt(terminal, PROMPT)                            # a second one stops too
    terminal.send("run echo again\n")
    terminal.read_until("again" + PROMPT)
    terminal.send("\x04")
    assert terminal.exit_status() == 0
    session = Session.load(ta.newest_session(tmp_path / "home", tmp_path / "workspace"))
    assert [e.message.content for e in session.active_path() if isinstance(e.message, UserMessage)] == [
        "run echo $$ > p; sleep 60", "run echo $$ > q; sleep 60", "run echo redirected", "run sleep 60",
        "run echo again"]
    session.close()


@posix
@pytest.mark.parametrize("line, message", [
    ('"""one\ntwo\n"""\n', "one\ntwo"), ("one \\\ntwo\n", "one \ntwo"),
    ("half\x03\x1b[A more\n", "half more")], ids=[
        "a block", "a line that goes on", "Ctrl-C, then arrow up"])
def test_what_is_typed_after_ctrl_c_is_read_and_kept_as_at_the_prompt(tmp_path, serve, line, message):
    server = serve({"end": "stall"}, says("fine"), says("again"))
    terminal = Terminal(tmp_path, "--base-url", server.url, env={"TERM": "xterm"})
    typed(terminal, ("", "%> "))
    terminal.send("work\n")
    while not server.requests:
        time.sleep(0.02)
    terminal.send("\x03")
    terminal.read_until("nothing stops: ")
    first, _, rest = line.partition("\x03")
    terminal.send(first)
    if rest:
        terminal.read_until("half")
        interrupt(terminal, r"arrow up brings back[\s\S]*%> ")
        terminal.send(rest)
    terminal.read_until("fine[\\s\\S]*%> ")
    terminal.send("\x1b[A\x1b[A\x1b[B\n")                  # up, and what was typed last again
    terminal.read_until("again[\\s\\S]*%> ")
    terminal.send("\x04")
    assert terminal.exit_status() == 0
    assert [m["content"] for m in server.body()["messages"] if m["role"] == "user"] == ["work", message, message]


def typed(terminal, *steps):
    """Sends lines and waits for what they show, then for the prompt; gives the last that is shown."""
    for text, shown in steps:
        terminal.send(text + "\n")
        last = terminal.read_until(shown)
    return last


def interrupt(terminal, shown):
    """Presses Ctrl-C until it is seen: Python may miss one that comes just before it reads a key."""
    for _ in range(10):
        terminal.send("\x03")
        with contextlib.suppress(AssertionError):
            return terminal.read_until(shown, 1)


MARKED = "\x1b[200~{}\x1b[201~\n"             # a paste, as most terminals send it
TYPED = {     # what is typed, each piece after the prompt for it; the messages that this makes
    "a marked paste": ([MARKED.format("one\n  two\n/mode auto\n")], ["one\n  two\n/mode auto"]),
    "lines that come at once": (["one\n  two\n"], ["one\n  two"]),
    "an open end of what comes at once": (["one\ntwo", "and more\n"], ["one\ntwoand more"]),
    "lines one after the other": (["one\n", "two\n"], ["one", "two"]),
    "a command before a line": (["/mode auto\none\n"], ["one"]),
    "a command after a line": (["one\n/mode auto\ntwo\n"], ["one", "two"]),
    "a line that goes on": (["one \\\n", "two\\\n", "\\three\n"], ["one two\\three".replace("two", "\ntwo\n", 1)]),
    "Ctrl-D in a line that goes on": (["one\\\n", "\x04", "two\n"], ["one", "two"]),
    "Ctrl-D after a line": (["one\n\x04"], ["one"]),
    "a block": (['"""\n', "one\n", "/mode auto\n", "\n", 'two """\n', '"""\n'], ['one\n/mode auto\n\ntwo """']),
    "a block opened with text": (['"""one\n', "two\n", '"""\n'], ["one\ntwo"]),
    "a block in one line": (['"""one"""\n'], ["one"]),
    "a pasted text that begins like a command": ([MARKED.format("/mode plan\nis a line")], ["/mode plan\nis a line"]),
    "a pasted block": ([MARKED.format('"""\none\n"""')], ["one"]),
    "pasted code that begins with quotes": ([MARKED.format('"""Doc."""\nx = 1')], ['"""Doc."""\nx = 1']),
    "Ctrl-D in a block": (['"""\n', "one\n", "\x04", "two\n"], ["one", "two"]),
    "Ctrl-C, then arrow up": (["half", "\x03", "\x1b[A\n"], ["half"]),
    "Ctrl-C in a block, then arrow up": (['"""one\n', "\x03", '\x1b[A\n"""\n'], ["one"]),
    "no file after @": (["me@x.org, @property (@nobody)\n"], ["me@x.org, @property (@nobody)"]),
    "a Tab at the beginning": (["\tone \ttwo\n"], ["one two"]),
    "other scripts": (["grüße 日本\n"], ["grüße 日本"])}
NO_READLINE = ("a marked paste", "a pasted text that begins like a command", "a pasted block", "pasted code that begins with quotes", "Ctrl-C, then arrow up",
               "Ctrl-C in a block, then arrow up", "a Tab at the beginning", "an open end of what comes at once")


def without_readline(folder) -> dict:
    """The environment of a Python that has no readline."""
    (folder / "lib").mkdir()
    (folder / "lib/readline.py").write_text("raise ImportError\n")
    return {"PYTHONPATH": str(folder / "lib"), "TERM": "xterm"}


@posix
@pytest.mark.parametrize("name, kind", [(name, kind) for name in TYPED for kind in (
    "readline", "the C locale", "no readline") if kind != "no readline" or name not in NO_READLINE])
def test_what_is_typed_becomes_these_messages(tmp_path, serve, name, kind):
    pieces, messages = TYPED[name]
    server = serve(says("fine"))
    env = without_readline(tmp_path) if kind == "no readline" else \
        {"TERM": "xterm", **({"LC_ALL": "C"} if kind == "the C locale" else {})}
    terminal = Terminal(tmp_path, "--base-url", server.url, env=env)
    for piece in pieces:
        if piece == "\x03":
            terminal.read_until(r"half|\.\.\. ")
            interrupt(terminal, "arrow up brings back")
            terminal.mark = 0
        else:
            terminal.read_until(r"(%> |\.\.\. (two)?)\Z")
            terminal.send(piece)
    if pieces[-1][-1] != "\x04":
        terminal.mark = 0
        terminal.read_until(r"(fine[\s\S]*){%d}%%> " % len(messages))
        terminal.send("\x04")
    assert terminal.exit_status() == 0
    sent = [m["content"] for m in server.body()["messages"] if m["role"] == "user"]
    assert [text.partition("\n\n[note from")[0] for text in sent] == messages


@posix
def test_the_terminal_is_asked_to_mark_pastes(tmp_path):
    for term, asked in (("xterm", True), ("dumb", False)):
        terminal = Terminal(tmp_path, "-p", "demo", env={"TERM": term})
        assert ("\x1b[?2004h" in terminal.read_until("%> ")) is asked
        terminal.send("\x04")
        assert terminal.exit_status() == 0


@posix
def test_lines_typed_ahead_are_messages_of_their_own(tmp_path, serve):
    ready = threading.Event()
    server = serve({**says("fine"), "after": ready}, says("fine"))
    terminal = Terminal(tmp_path, "--base-url", server.url)
    typed(terminal, ("", "%> "))
    terminal.send("one\n")
    while not server.requests:
        time.sleep(0.02)
    terminal.send("two\nthree\n")
    ready.set()
    terminal.read_until(r"(fine[\s\S]*){3}%> ")
    assert [m["content"] for m in server.body()["messages"] if m["role"] == "user"] == ["one", "two", "three"]
    terminal.send("\x04")
    assert terminal.exit_status() == 0


@posix
def test_the_history_reaches_into_later_chats_without_keys(tmp_path, serve):
    server = serve(says("fine"))
    words, env = ["--base-url", server.url], {"AGENT_API_KEY": KEY, "TERM": "xterm"}
    terminal = Terminal(tmp_path, *words, env=env)
    terminal.read_until("%> ")
    typed(terminal, (f"my key is {KEY}", "fine[^>]*%> "), ('"""\none\nline é\n"""', "fine[^>]*%> "))
    terminal.send("never sent")
    terminal.read_until("never sent")
    interrupt(terminal, "arrow up brings back")
    typed(terminal, ("/exit", "exit"))
    assert terminal.exit_status() == 0
    path = tmp_path / "home/history"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert KEY not in path.read_text() and "my key is [key]" in path.read_text()
    with path.open("a") as file:
        file.write('{"damaged"\n7\n"a\\u0000b"\n')
    terminal = Terminal(tmp_path, *words, "--no-session", env=env)
    terminal.read_until("%> ")
    terminal.send("\x1b[A\x1b[A\x1b[A\n")       # over /exit and what was never sent
    terminal.read_until("fine[^>]*%> ")
    assert server.body()["messages"][-1]["content"] == "one\nline é"
    before = path.read_text()
    typed(terminal, ("a chat that leaves nothing", "fine[^>]*%> "), ("/exit", "exit"))
    assert terminal.exit_status() == 0 and path.read_text() == before


def test_a_long_history_is_cut_when_a_chat_begins(tmp_path):
    pytest.importorskip("readline")
    (tmp_path / "history").write_text("".join(f'"{number}"\n' for number in range(2001)))
    chat, added = new_chat(tmp_path), []
    chat.set_up(fake_readline(added=added))
    assert added == [str(number) for number in range(1001, 2001)]
    assert len((tmp_path / "history").read_text().splitlines()) == 1000


def fake_readline(doc="GNU", bound=None, added=None):
    """Something with the functions of readline."""
    fake = types.SimpleNamespace(__doc__=doc, parse_and_bind=[].append if bound is None else bound.append,
                                 add_history=[].append if added is None else added.append)
    for name in ("set_completer_delims", "set_completer", "set_auto_history"):
        setattr(fake, name, lambda value: None)
    return fake


@pytest.mark.parametrize("doc, line", [("uses libedit readline", "bind ^I rl_complete"), ("GNU", "tab: complete")])
def test_tab_is_bound_in_the_words_of_the_library(tmp_path, doc, line):
    bound = []
    new_chat(tmp_path).set_up(fake_readline(doc, bound))
    assert bound[0] == line


def new_chat(folder):
    """A chat in a folder, whose home is that folder too."""
    agent = ta.Agent(ScriptedProvider(["fine"]), Workspace(folder))
    settings = types.SimpleNamespace(home=folder, flags=types.SimpleNamespace(no_session=False))
    return ta.Chat(agent, ta.Screen(io.StringIO(), io.StringIO()), settings)


@pytest.mark.parametrize("line, found", [
    ("/mo", ["/mode ", "/model "]), ("/mode p", ["plan "]), ("/provider gr", ["groq "]), ("/why sh", ["shell "]),
    ("/why read_file su", ["sub/"]), ("see @su", ["@sub/"]), ("@sub/", ["@sub/a.py", "@sub/b.py"]),
    ("@sub/../sub/a", ["@sub/../sub/a.py"]), ("!cat sub/b", ["sub/b.py"]), ("@.", ["@.env"]), ("@", ["@sub/"]),
    ("@../", []), ("@/etc/pass", []), ("@sub/a.py/", []), ("/nope", []), ("one /mo", [])])
def test_tab_completes(tmp_path, line, found):
    (tmp_path / "sub").mkdir()
    for name in ("sub/a.py", "sub/b.py", "sub/odd\x1b[2J", "sub/two words", ".env"):
        (tmp_path / name).touch()
    before, blank, word = line.rpartition(" ")
    assert ta.candidates(new_chat(tmp_path), before + blank, word) == found


def test_tab_completes_ids(tmp_path):
    chat = new_chat(tmp_path)
    list(chat.agent.run("one"))
    asked = chat.agent.session.active_path()[1].id
    assert ta.candidates(chat, "/rewind ", asked[:3]) == [asked + " "]
    folder = ta.make_folders(ta.sessions_folder(tmp_path, chat.agent.workspace.root))
    (folder / "20260101T000000Z_12ab34cd.jsonl").write_text(line("header", "h", None, version=1) + "\n")
    assert ta.candidates(chat, "/resume ", "12") == ["12ab34cd "]
    assert set(ta.ARGUMENTS) <= set(ta.COMMANDS)


@posix
def test_tab_at_the_prompt(tmp_path):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/story_é.txt").write_text("Once upon a time\n", "utf-8")
    terminal = Terminal(tmp_path, "-p", "demo")
    terminal.read_until("%> ")
    terminal.send("/mode pl\t\n")
    terminal.read_until(r"\* plan" + PROMPT)
    terminal.send("é @sto\t\n")
    terminal.read_until("with story_é.txt, 17 characters" + PROMPT)
    terminal.send("\x04")
    assert terminal.exit_status() == 0


@posix
def test_a_command_of_the_persons_own(tmp_path, serve):
    server = serve(says())
    terminal = Terminal(tmp_path, "--base-url", server.url, "--mode", "plan", "--deny", "shell:*")
    terminal.read_until("%> ")
    typed(terminal, ("!echo $((6*7)); touch made", "42\r\n  exit status 0[^>]*%> "))
    assert (tmp_path / "workspace/made").exists() and not server.requests
    terminal.send("!echo begun; sleep 60\n")
    terminal.read_until("begun\r\n")
    terminal.send("\x03")
    typed(terminal, ("", "interrupted by the person[^>]*%> "), ("what was that?", "fine[^>]*%> "))
    said = server.body()["messages"][-1]["content"]
    assert said.startswith("what was that?\n\n") and "the person ran `echo $((6*7)); touch made`: exit" in said
    assert re.search(r"ran `echo begun; sleep 60`: stopped, [^\n]*\nbegun\]", said)
    typed(terminal, ("and now?", "fine[^>]*%> "), ("/exit", "exit"))
    assert server.body()["messages"][-1]["content"] == "and now?"
    assert terminal.exit_status() == 0


@pytest.mark.parametrize("text, told, shown", [
    ("see @a.py", "the file a.py, which the person named with @:\nprint(1)\n", "with a.py, 9 characters"),
    ('(@a.py), @"a.py", @./a.py!', "the file a.py", "with a.py"), ('@"two words.txt"', "two words.txt", "with two"),
    ("@long.txt", "x\n[the first 1,000 of 5,000 characters]", "of which the first 1,000"),
    ("@key", "the key is [key]", "with key"), ("@.env", "", ".env is left out: a rule forbids reading it"),
    ("@../outside.txt", "", "outside.txt is left out"), ("@nul.bin", "", "binary"),
    ("@folder a@a.py @nobody @", "", "")])
def test_a_file_that_is_named_goes_with_the_message(tmp_path, text, told, shown):
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    ta.SECRETS.add(KEY)
    for name, content in {"a.py": "print(1)\n", "long.txt": "x" * 5000, "two words.txt": "2", ".env": "A=1", "nul.bin": "\0",
                          "../outside.txt": "out", "key": f"the key is {KEY}"}.items():
        (work / name).write_text(content)
    agent = ta.Agent(ScriptedProvider(["fine"]), Workspace(work, limit=1000))
    screen = ta.Screen(io.StringIO(), io.StringIO())
    ta.add_files(agent, text, screen)
    list(agent.run(text))
    entry = agent.session.active_path()[1]
    assert entry.message.content.startswith(text) and told in entry.message.content[len(text):]
    assert bool(told) == ("the file" in entry.message.content) and shown in screen.err.getvalue()
    assert agent.session.moment(entry).text == text and (shown or not screen.err.getvalue())
    assert entry.message.content.count("print(1)") <= 1


def test_a_file_that_is_named_goes_with_a_one_shot_task_but_not_for_piped_text(tmp_path, serve):
    server = serve(says())
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/a.py").write_text("print(1)\n")
    assert cli(tmp_path, "--base-url", server.url, "explain @a.py").stdout == "fine\n"
    cli(tmp_path, "--base-url", server.url, stdin="explain @a.py")
    assert ["print(1)" in server.body(n)["messages"][-1]["content"] for n in (0, 1)] == [True, False]


@posix
def test_the_tree_is_walked_in_a_chat(tmp_path):
    words = ["--mode", "auto", "--sandbox", "off", "-p", "demo"]
    terminal = Terminal(tmp_path, *words)
    terminal.read_until("demo auto")
    typed(terminal, ("create fib.py that prints the first 10 Fibonacci numbers", "I wrote fib.py" + PROMPT),
          ("/label it is there", "is called it is there" + PROMPT), ("/label", "needs a name" + PROMPT),
          ("run echo two", "exit status 0[^>]*" + PROMPT))
    tree = typed(terminal, ("/tree", r"you are here" + PROMPT))
    assert re.search(r"\* [0-9a-f]{8}  you: create fib.py", tree) and "[it is there]" in tree
    typed(terminal, ("/rewind nowhere", "no entries" + PROMPT), ("/rewind", "number, or nothing[^:]*: "),
          ("", PROMPT), ("/rewind", "number, or nothing[^:]*: "), ("7", "no number '7'" + PROMPT),
          ("/rewind", r"1  create fib.py[\s\S]*number, or nothing[^:]*: "))
    shown = typed(terminal, ("1", r"\[c/f/b/N\] "))
    assert "fib.py" in shown and "shell commands changed since is not covered" in shown
    assert (tmp_path / "workspace/fib.py").exists()
    undo = re.search(r"(/rewind [0-9a-f]{8}) undoes", typed(terminal, ("b", r"\| create fib.py[\s\S]*> ")))[1]
    assert not (tmp_path / "workspace/fib.py").exists()
    terminal.send("\x15")                     # the text that is offered is not wanted
    typed(terminal, ("run echo three", "exit status 0[^>]*" + PROMPT), (undo, r"\[c/f/b/N\] "),
          ("", "Nothing was changed" + PROMPT), (undo, r"\[c/f/b/N\] "), ("b", "undoes" + PROMPT))
    assert (tmp_path / "workspace/fib.py").exists()
    typed(terminal, ("/rewind it is there", "undoes" + PROMPT), ("/exit", "exit"))
    assert terminal.exit_status() == 0
    terminal = Terminal(tmp_path, *words, "-c")                # the leaf survives an exit
    terminal.read_until("demo auto")
    tree = typed(terminal, ("/tree", "you are here" + PROMPT))
    assert re.search(r"\[it is there\]  <- you are here", tree) and "three" in tree
    assert "I ran `echo two`" in tree
    typed(terminal, ("/fork", r"you work in \S+\.json" + PROMPT))
    typed(terminal, ("/resume", r"1  [0-9a-f]{8}[\s\S]*: "), ("1", r"On with the session" + PROMPT))
    shown = typed(terminal, ("/status", "session: " + PROMPT))
    current = re.search(r"_([0-9a-f]{8})\.jsonl", shown)[1]
    typed(terminal, (f"/resume {current}", "in that session already" + PROMPT),
          ("/resume zzzz", "0 sessions" + PROMPT), ("/exit", "exit"))
    assert terminal.exit_status() == 0
    listed = cli(tmp_path, "--sessions").stdout.splitlines()
    assert len(listed) == 2 and all("create fib.py" in one for one in listed)
    listed = [json.loads(one) for one in cli(tmp_path, "--sessions", "--json").stdout.splitlines()]
    assert [len(one["id"]) for one in listed] == [8, 8] and Path(listed[0]["file"]).exists()


@posix
def test_a_chat_is_compacted_and_its_context_is_shown(tmp_path):
    session = new_session(tmp_path)
    talk(session, *[f"{n} " + "w" * 3000 for n in range(8)])
    session.close()
    terminal = Terminal(tmp_path, "-p", "demo", "-r", str(session.path), "-w", str(tmp_path))
    terminal.read_until("demo ask")
    shown = typed(terminal, ("/context", r"a compaction now would put[\s\S]*" + PROMPT))
    assert re.search(r"your messages +3,\d\d\d  #+", shown) and re.search(r"tools +\d+  #", shown)
    shown = typed(terminal, ("/compact be brief", r"compacted: about [\d,]+ tokens became" + PROMPT))
    shown = typed(terminal, ("/context", r"of 16,000 tokens" + PROMPT))
    assert re.search(r"summary +\d+  #", shown)
    assert re.search(r"context: \d+% of 16,000", typed(terminal, ("/status", "last run" + PROMPT)))
    terminal.send("\x04")
    assert terminal.exit_status() == 0


def test_what_is_resumed_where_nothing_is_kept_is_not_written(tmp_path):
    session = new_session(tmp_path)
    talk(session, "u1", "a1")
    session.close()
    before = session.path.read_bytes()
    _, agent = run_agent(["fine"], tmp_path)
    settings = ta.Settings(["--no-session", "-p", "demo"])
    settings.home = tmp_path / "home"
    ta.Chat(agent, ta.Screen(io.StringIO(), io.StringIO()), settings).resume(session.path)
    *_, last = agent.run("sing")
    assert last.session is None and said(agent.session)[:2] == ["u1", "a1"]
    assert session.path.read_bytes() == before


# ─── RPC ─────────────────────────────────────────────────────────────────────────────────────────

class Peer:
    """The other end of --rpc. `code` runs in the program before it starts."""

    def __init__(self, folder, *words, code="", env=()):
        script = folder / "program.py"
        script.write_text(f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\nimport tiny_agent as ta\n"
                          f"{code}\nsys.exit(ta.main(sys.argv[1:]))\n", "utf-8")
        environment = {**os.environ, "HOME": str(folder), "AGENT_HOME": str(folder / "home"), **dict(env)}
        self.process = subprocess.Popen([sys.executable, "-B", str(script), "--rpc", *words], cwd=folder,
                                        stdin=-1, stdout=-1, stderr=-1, env=environment)
        self.clock = threading.Timer(60, self.process.kill)
        self.clock.start()
        self.lines, self.sent = [], 0

    def write(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, type, **fields):
        self.sent += 1
        self.write(json.dumps({"type": type, "id": self.sent, **fields}).encode() + b"\n")
        return self.sent

    def until(self, **wanted):
        """The next line with these members; each line must be an object of one line of ASCII."""
        for line in self.process.stdout:
            self.lines.append(json.loads(line.decode("ascii")))
            if all(self.lines[-1].get(name) == value for name, value in wanted.items()):
                return self.lines[-1]
        pytest.fail(f"no {wanted}: {self.process.stderr.read().decode()}")

    def ask(self, type, **fields):
        """The response to a request."""
        return self.until(id=self.send(type, **fields), type="response")

    def get(self, type, **fields):
        """The data of a response that must be a success."""
        answer = self.ask(type, **fields)
        assert answer["success"] and answer["request_type"] == type, answer
        return answer["data"]

    def error(self, type, **fields):
        """The error of a response that must be none."""
        answer = self.ask(type, **fields)
        assert not answer["success"] and "data" not in answer, answer
        return answer["error"]

    def run(self, message):
        """The events of a run."""
        self.get("prompt", message=message)
        start = len(self.lines)
        self.until(type="run_settled")
        return self.lines[start:]

    def question(self, message):
        """Sends a prompt; the question that comes of it."""
        self.get("prompt", message=message)
        return self.until(type="extension_ui_request")

    def exit_status(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.lines += [json.loads(line) for line in self.process.stdout]
        self.errors = self.process.stderr.read().decode()
        assert "Traceback" not in self.errors
        self.clock.cancel()
        return self.process.wait(20)


DEMO = ["-p", "demo", "--sandbox", "off"]
AUTO = [*DEMO, "--mode", "auto"]
WAITING = "run echo begun; sleep 60"


def test_a_prompt_is_acknowledged_then_its_events_come(tmp_path):
    peer = Peer(tmp_path, *AUTO)
    for _ in range(20):                      # the next prompt may come as soon as the run is settled
        events = peer.run("run echo hello")
    assert [event["type"] for event in events if "delta" not in event["type"]] == """run_start
        message_start message_end turn_start message_start toolcall_start toolcall_end message_end tool_start
        tool_output tool_end message_start message_end turn_end turn_start message_start message_end turn_end
        run_end run_settled""".split()
    assert "hello" in events[-1]["answer"] and events[-1]["reason"] == "stop"
    assert peer.get("get_state")["messages"] == 80 and peer.exit_status() == 0


@posix
@pytest.mark.parametrize("value, exists, told", [
    ("yes", True, ""), (True, True, ""), ("always", True, ""), ("no", False, "the person said no"),
    (False, False, "the person said no"), (None, False, "the person said no"),
    ("not that file", False, "the person said no: not that file")])
def test_questions_go_to_the_other_end(tmp_path, value, exists, told):
    peer = Peer(tmp_path, *DEMO)
    asked = peer.question("run touch made")
    assert asked["payload"]["title"].endswith("\n  | touch made") and asked["payload"]["method"] == "select"
    assert asked["payload"]["options"] == ["yes", "no", "always"]
    peer.send("extension_ui_response", id="another", value="yes")
    assert "no question" in peer.until(type="response")["error"]
    peer.send("extension_ui_response", id=asked["id"], value=5)
    assert "needs a value" in peer.until(type="response")["error"]
    peer.send("extension_ui_response", id=asked["id"], value=value)
    assert told in peer.until(type="tool_end")["content"]
    peer.until(type="run_settled")
    assert (tmp_path / "workspace/made").exists() is exists
    if value == "always":
        assert "extension_ui_request" not in [line["type"] for line in peer.run("run touch made")]
    assert peer.exit_status() == 0


def test_an_abort_answers_an_open_question(tmp_path):
    peer = Peer(tmp_path, *DEMO)
    asked = peer.question("run touch made")
    peer.send("abort")
    assert peer.until(type="run_settled")["reason"] == "aborted"
    peer.send("extension_ui_response", id=asked["id"], value="yes")
    assert "no question" in peer.until(type="response")["error"]
    assert not (tmp_path / "workspace/made").exists()
    assert peer.run("sing")[-1]["reason"] == "stop" and peer.exit_status() == 0


@posix
@pytest.mark.parametrize("task, waits_for", [(WAITING, "tool_output"), ("run touch made", "extension_ui_request"),
                                             ("sing", "response")])
@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGINT", "SIGHUP"])
def test_an_end_aborts_and_settles(tmp_path, task, waits_for, how):
    peer = Peer(tmp_path, *(DEMO if "touch" in task else AUTO))
    peer.send("prompt", message=task)
    peer.until(type=waits_for)
    if how != "end of input":
        peer.process.send_signal(getattr(signal, how))
        assert peer.process.wait(20) == 128 + getattr(signal, how)
        peer.exit_status()
    else:
        assert peer.exit_status() == 0
    if task != "sing":
        assert peer.lines[-1]["type"] == "run_settled" and peer.lines[-1]["reason"] == "aborted"
        assert not (tmp_path / "workspace/made").exists()


@posix
def test_what_may_be_asked_while_a_run_goes_on(tmp_path):
    peer = Peer(tmp_path, *AUTO)
    needed = {"prompt": {"message": "x"}, "resume": {"session": "x"}, "rewind": {"entry_id": "x"},
              "set_model": {"provider": "demo", "model": ""}}
    assert all("no run" in peer.error(name, message="x") for name in sorted(ta.ONLY_RUNNING))
    peer.get("prompt", message=WAITING)
    peer.until(type="tool_output")
    assert all("abort" in peer.error(name, **needed.get(name, {})) for name in sorted(ta.ONLY_IDLE))
    state = peer.get("set_mode", mode="plan")
    assert (state["running"], state["mode"], state["messages"]) == (True, "plan", 2)
    assert [m["role"] for m in peer.get("get_messages")["messages"]] == ["user", "assistant"]
    peer.get("abort")
    assert peer.until(type="run_settled")["reason"] == "aborted"
    assert peer.get("get_state")["running"] is False
    assert peer.exit_status() == 0


@posix
def test_a_run_is_steered_and_followed_up(tmp_path):
    peer = Peer(tmp_path, *AUTO)
    peer.get("prompt", message="run touch begun; while [ ! -e go ]; do sleep 0.02; done")
    peer.until(type="tool_start")
    peer.get("follow_up", message="run echo afterwards")
    peer.get("steer", message="run echo steered")
    (tmp_path / "workspace/go").touch()
    assert "afterwards" in peer.until(type="run_settled")["answer"]
    persons = [m["content"] for m in peer.get("get_messages")["messages"] if m["role"] == "user"]
    assert persons[1:] == ["run echo steered", "run echo afterwards"]
    assert [m["content"].split()[-1] for m in peer.get("get_messages")["messages"]
            if m["role"] == "tool_result"][1:] == ["steered", "afterwards"]
    assert peer.exit_status() == 0


def test_a_session_is_compacted(tmp_path):
    session = new_session(tmp_path)
    talk(session, *["some words " * 300] * 12)
    session.close()
    peer = Peer(tmp_path, *DEMO, "-r", str(session.path))
    done = peer.ask("compact", text="the end")
    assert done["success"] and done["data"]["reason"] == "manual" and done["data"]["after"] < done["data"]["before"]
    assert peer.run("sing")[-1]["reason"] == "stop" and peer.exit_status() == 0


BAD_LINES = {
    "not JSON": (b"nope", "not a request"), "empty": (b"", "not a request"), "a list": (b"[1]", "not a request"),
    "a number": (b"5", "not a request"), "not UTF-8": (b'{"type": "\xff"}', "not a request"),
    "deep": (b"[" * 100_000, "not a request"), "no type": (b'{"id": 1}', "not a request"),
    "a type that is none": (b'{"type": ["abort"]}', "not a request"),
    "an id that is no JSON": (b'{"type": "abort", "id": NaN}', "not a request"),
    "unknown": (b'{"type": "sing"}', "there is no request 'sing'"),
    "a field is missing": (b'{"type": "prompt"}', "'message' is missing; the form is prompt(message: str)"),
    "a field is null": (b'{"type": "rewind", "entry_id": null}', "'entry_id' is missing"),
    "a field is no text": (b'{"type": "prompt", "message": 5}', "must be a text, not 5"),
    "a field is no truth": (b'{"type": "rewind", "entry_id": "x", "files": 7}', "true or false"),
    "half a character": (b'{"type": "prompt", "message": "\\ud83d"}', "whole characters"),
    "no such mode": (b'{"type": "set_mode", "mode": "fast"}', "choose one of plan, ask, auto"),
    "no such provider": (b'{"type": "set_model", "provider": "x", "model": "y"}', "no provider 'x'"),
    "no key": (b'{"type": "set_model", "provider": "groq", "model": ""}', "GROQ_API_KEY"),
    "no such session": (b'{"type": "resume", "session": "zz"}', "0 sessions"),
    "no such entry": (b'{"type": "rewind", "entry_id": "zz"}', "no entries"),
}


def test_bad_lines_are_answered_and_the_server_lives_on(tmp_path):
    peer = Peer(tmp_path, *DEMO)
    for name, (line, said) in BAD_LINES.items():
        peer.write(line + b"\r\n")
        answer = peer.until(type="response")
        assert (answer["success"], answer["id"]) == (False, None) and said in answer["error"], name
    assert "not a session file" in peer.error("resume", session=str(tmp_path / "program.py"))
    peer.write(b'{"type": "get_state", "id": {"any": ["id"]}, "unknown": 1, "id": "last"}\n')
    assert peer.until(id="last")["success"] and peer.exit_status() == 0


def test_only_lf_ends_a_line_and_it_may_be_long(tmp_path):
    peer = Peer(tmp_path, *DEMO)
    text = "sing\u2028\u2029\x85\r\n" + "many words " * 500_000
    peer.write(json.dumps({"type": "prompt", "id": "é", "message": text}, ensure_ascii=False).encode() + b"\n")
    assert peer.until(type="response")["id"] == "é"
    peer.until(type="run_settled")
    assert peer.get("get_messages")["messages"][0]["content"] == text
    peer.write(b'{"type": "get_state", "id": "the last line has no end"}')
    assert peer.exit_status() == 0 and peer.lines[-1]["id"] == "the last line has no end"


def test_the_requests_about_sessions(tmp_path):
    peer = Peer(tmp_path, *AUTO)
    peer.run("create fib.py that prints the first 10 Fibonacci numbers")
    first = peer.get("get_state")
    assert first["provider"] == "demo" and first["totals"]["tool_calls"] == 2 and Path(first["session"]).exists()
    peer.run("create other.py that prints the first 5 Fibonacci numbers")
    messages = peer.get("get_messages")["messages"]
    assert [m["role"] for m in messages] == ["user", *["assistant", "tool_result"] * 2, "assistant"] * 2
    (tmp_path / "workspace/other.py").write_text("mine", "utf-8")
    done = peer.get("rewind", entry_id=messages[0]["entry_id"], files=True)
    assert (done["text"][:13], done["files"], done["left"]) == ("create fib.py", ["fib.py"], ["other.py"])
    assert [p.name for p in (tmp_path / "workspace").iterdir()] == ["other.py"]
    tree = peer.get("get_tree")
    assert tree["leaf"] == done["leaf"] == tree["entries"][0]["id"] and peer.get("get_messages")["messages"] == []
    [undo] = [entry for entry in tree["entries"] if entry["type"] == "leaf"]
    done = peer.get("rewind", entry_id=undo["id"])
    assert (done["text"], done["files"], done["left"]) == ("", [], ["fib.py"])
    assert peer.get("get_messages")["messages"] == messages
    copy = peer.get("fork")["session"]
    assert copy != first["session"] and len(peer.get("get_messages")["messages"]) == len(messages)
    assert peer.get("new_session") == {"session": None} and peer.get("get_state")["messages"] == 0
    listed = peer.get("list_sessions")["sessions"]
    assert {one["file"] for one in listed} == {copy, first["session"]}
    assert peer.get("resume", session=Path(copy).stem[-8:]) == {"session": copy, "notes": []}
    assert "already" in peer.error("resume", session=copy)
    assert peer.exit_status() == 0


def test_labels_and_commands_are_listed(tmp_path):
    session = Session.new(tmp_path / "home", tmp_path)
    talk(session, "one", "two")
    session.append("label", label="here")
    session.close()
    peer = Peer(tmp_path, *DEMO, "-r", str(session.path))
    entries = peer.get("get_tree")["entries"]
    assert [(e["text"], e.get("label")) for e in entries[1:3]] == [("you: one", None), ("model: two", "here")]
    found = peer.get("get_commands")
    assert [one["name"].partition(" ")[0] for one in found["commands"]] == list(ta.COMMANDS)
    assert {"name": "set_mode", "fields": ["mode"]}.items() <= found["requests"][9].items()
    assert peer.get("set_model", provider="demo", model="other")["model"] == "other"
    assert peer.exit_status() == 0


@pytest.mark.parametrize("code, success, said", [
    ("yield ta.Compaction('manual', 900, 90, None, None)", True, 90),
    ("raise ta.UsageError('nothing to sum up'); yield", False, "nothing to sum up"),
    ("yield ta.Compaction('manual', 900, 900, None, 'useless')", False, "useless")])
def test_compact_is_answered_when_it_is_done(tmp_path, code, success, said):
    peer = Peer(tmp_path, *DEMO, code=f"def compact(agent, text=''):\n    {code}\nta.Agent.compact = compact")
    answer = peer.ask("compact")
    assert answer["success"] is success and ("yield ta" in code) == (peer.lines[0]["type"] == "compaction")
    assert said == (answer["data"]["after"] if success else answer["error"])
    assert peer.run("sing")[-1]["reason"] == "stop" and peer.exit_status() == 0


def test_nothing_else_reaches_stdout(tmp_path):
    """Not a print, not a write to descriptor 1, not a command that inherits it."""
    peer = Peer(tmp_path, *AUTO, code="""
out = sys.stdout
def shell(self, command: str):
    "Prints."
    print("late"), print("old", file=out, flush=True), os.write(1, b"raw\\n"), os.system("echo child")
ta.Workspace.shell = ta.tool(shell)
""")
    peer.run("run it")
    assert peer.exit_status() == 0
    assert all(f"{word}\n" in peer.errors.replace("\r", "") for word in ("late", "old", "raw", "child"))


def test_no_key_is_sent_to_the_other_end(tmp_path, serve):
    peer = Peer(tmp_path, "--base-url", serve(says(f"It is {KEY}.")).url, env={"AGENT_API_KEY": KEY})
    peer.run(f"my key is {KEY}")
    peer.get("get_messages")
    assert peer.exit_status() == 0 and KEY not in json.dumps(peer.lines) and "[key]" in json.dumps(peer.lines)


@posix
@pytest.mark.parametrize("task", ["run while true; do echo x; sleep 0.02; done", ""])
def test_a_peer_that_goes_away_ends_the_server(tmp_path, task):
    peer = Peer(tmp_path, *AUTO)
    if task:
        peer.get("prompt", message=task)
        peer.until(type="tool_output")
    peer.process.stdout.close()
    with contextlib.suppress(OSError):       # it may have ended already
        peer.send("get_state")
    assert peer.process.wait(20) == 1
    assert "cannot be written" in (said := peer.process.stderr.read().decode()) and "Traceback" not in said
    peer.clock.cancel()


@pytest.mark.parametrize("words", [["sing"], ["--json"]])
def test_rpc_takes_no_task_and_no_json(tmp_path, words):
    done = cli(tmp_path, "--rpc", *words, stdin='{"type": "get_state"}\n')
    assert (done.returncode, done.stdout) == (2, "") and "as requests on stdin" in done.stderr


# ─── Export and inspection ───────────────────────────────────────────────────────────────────────

def test_the_tree_shows_the_active_path_straight_down():
    session = Session(cwd="/x")
    u1, a1, u2, _ = talk(session, "u1", "a1", "u2", "a2")
    session.append("label", label="end")
    session.set_leaf(u1.id)
    session.append(AssistantMessage("b1", stop_reason="error", error_message="x"))
    lines = [re.sub("[0-9a-f]{8}", "ID", line) for line in ta.draw_tree(session)]
    assert lines == ["* ID  you: u1", "  ID    model: a1", "  ID    you: u2", "  ID    model: a2  [end]",
                     "* ID  model: (error) b1  <- you are here"]


def test_a_tree_of_many_turns_is_drawn():
    session = Session(cwd="/x")
    talk(session, *["x"] * 20_000)
    assert len(ta.draw_tree(session)) == 20_000


# ─── Settings and main ───────────────────────────────────────────────────────────────────────────

def test_the_first_command_of_the_readme_says_what_would_allow_it(tmp_path):
    done = cli(tmp_path, "create fib.py that prints the first 10 Fibonacci numbers, then run it")
    assert done.returncode == 0 and "--mode auto" in done.stdout
    assert not (tmp_path / "workspace/fib.py").exists()
    assert "GROQ_API_KEY" in done.stderr and ".env" in done.stderr


def test_auto_mode_runs_it_through(tmp_path):
    done = cli(tmp_path, "--mode", "auto", "--sandbox", "off",
               "create fib.py that prints the first 10 Fibonacci numbers, then run it")
    assert done.returncode == 0 and done.stdout.endswith("34\n")
    assert "range(10)" in (tmp_path / "workspace/fib.py").read_text()


WHYS = [     # words, status, the decision, the rule
    (["shell", "git status"], 0, "allow", "allow shell git status *"),
    (["shell", "git push --force"], 1, "deny", "deny shell git push --force*"),
    (["shell", "touch x"], 3, "ask", None), (["read_file", ".env"], 1, "deny", "deny * .env"),
    (["grep", "."], 0, "allow", "allow grep *"), (["find_files", "*.py"], 0, "allow", "allow find_files *"),
    (["--mode", "auto", "--sandbox", "off", "shell", "touch x"], 0, "allow", None),
    (["--deny", "write_file:src/*", "write_file", "src/a"], 1, "deny", "deny write_file src/*")]


@pytest.mark.parametrize("words, status, decision, rule", WHYS, ids=[" ".join(w[0]) for w in WHYS])
def test_why_prints_the_derivation_and_runs_nothing(tmp_path, words, status, decision, rule):
    words = [*words[:-2], "--why", *words[-2:]]
    done = cli(tmp_path, *words, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["decision"], found["rule"]) == (status, decision, rule)
    assert found["reason"] and all(set(part) >= {"text", "decision", "rule"} for part in found["parts"])
    assert cli(tmp_path, *words).stdout.startswith(f"{decision}: {found['reason']}\n")
    assert list(tmp_path.iterdir()) == []


BAD = {      # words, environment, the status, words on stderr
    "an unknown provider": (["-p", "nope", "hi"], {}, 2, "no provider 'nope'"),
    "an unknown mode": (["--mode", "fast", "hi"], {}, 2, "plan, ask, auto"),
    "an unknown mode in the environment": (["hi"], {"AGENT_MODE": "Auto "}, 2, "no mode"),
    "an unknown flag": (["--nope", "hi"], {}, 2, "--nope"),
    "an abbreviated flag": (["--mod", "auto", "hi"], {}, 2, "--mod"),
    "no key": (["-p", "groq", "hi"], {}, 2, "GROQ_API_KEY"),
    "a bad budget": (["hi"], {"AGENT_BUDGET": "16k"}, 2, "whole number"),
    "a negative number": (["--max-steps", "-1", "hi"], {}, 2, "max-steps"),
    "no such workspace": (["-w", "nowhere", "hi"], {}, 2, "nowhere"),
    "a workspace that is a file": (["-w", "file", "hi"], {}, 2, "file"),
    "a bad address": (["--base-url", "localhost:1", "hi"], {}, 2, "http://"),
    "an address that cannot be": (["--base-url", "http://[::1/v1", "hi"], {}, 2, "base URL"),
    "a blank in the address": (["--base-url", "http://exa mple/v1", "hi"], {}, 2, "base URL"),
    "why, of no tool": (["--why", "fly", "x"], {}, 2, "no tool 'fly'"),
    "a bad rule": (["--allow", "shel:ls", "hi"], {}, 2, "TOOL:PATTERN"),
    "no session of this id": (["-r", "zzz", "hi"], {}, 1, "zzz"),
    "no session yet": (["-c", "hi"], {}, 1, "no session"),
    "a session that is none": (["-r", "file", "hi"], {}, 1, "not a session file"),
    "two sessions": (["-c", "-r", "x", "hi"], {}, 2, "two sessions"),
    "an id that is empty": (["-r", "", "hi"], {}, 1, "0 sessions"),
    "nobody's home": (["-w", "~no_such_user_x/y", "hi"], {}, 2, "not a folder"),
    "nobody's home for sessions": (["hi"], {"AGENT_HOME": "~no_such_user_x/y"}, 2, "not a folder"),
    "a model that only a real provider has": (["-m", "big", "hi"], {}, 2, "nobody is there"),
    "JSON without a task": (["--json"], {}, 2, "no task"),
    "nothing to do": ([], {}, 2, "no task"),
    "nobody there": (["--base-url", "http://127.0.0.1:9/v1", "hi"], {}, 1, "connection refused")}


@pytest.mark.parametrize("words, env, status, said", BAD.values(), ids=BAD)
def test_bad_input_gets_a_line_that_says_what_to_do(tmp_path, words, env, status, said):
    (tmp_path / "file").write_text("x\n")
    done = cli(tmp_path, *words, env=env)
    assert done.returncode == status and said in done.stderr, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "x\n" and not (tmp_path / "home/sessions").exists()


@pytest.mark.parametrize("lines, found", [
    ("A=1\nexport B = two words # note\n\n# C=3\nD='x # y'\nE=\"q\"\nF=\n",
     {"A": "1", "B": "two words", "D": "x # y", "E": "q", "F": ""}),
    ("\ufeffA=b=c\r\n", {"A": "b=c"})])
def test_env_files(tmp_path, lines, found):
    (tmp_path / ".env").write_bytes(lines.encode())
    assert ta.read_env_file(tmp_path / ".env") == found


@pytest.mark.parametrize("line", ["no equals", "1A=x", "A B=x", "A='open", "=x", "A=x\0y"])
def test_a_broken_env_line_is_named(tmp_path, line):
    (tmp_path / ".env").write_text(f"A=1\n{line}\n")
    with pytest.raises(ta.UsageError, match="line 2"):
        ta.read_env_file(tmp_path / ".env")


@pytest.fixture
def copied(tmp_path, serve):
    """A copy of the program with a .env beside it: (run(words, env), the server)."""
    server = serve(says("from the server"))
    (tmp_path / "app").mkdir()
    (tmp_path / "app/tiny_agent.py").write_text(SOURCE, "utf-8")
    (tmp_path / "app/.env").write_text(f"AGENT_BASE_URL={server.url}\nAGENT_API_KEY={KEY}\n")

    def run(*words, env=()):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **dict(env)}
        return subprocess.run([sys.executable, str(tmp_path / "app/tiny_agent.py"), *words],
                              cwd=tmp_path, env=environment, capture_output=True, text=True, input="")
    return run, server


def test_settings_come_from_flags_then_environment_then_the_env_file(copied):
    run, server = copied
    assert run("hi").stdout == "from the server\n"
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    run("hi", env={"AGENT_API_KEY": "other-key", "AGENT_MODEL": "big"})
    assert server.requests[1][1]["Authorization"] == "Bearer other-key"
    assert server.body()["model"] == "big"
    run("-m", "small", "hi", env={"AGENT_MODEL": "big"})
    assert server.body()["model"] == "small"


def test_the_workspace_cannot_configure_the_program(tmp_path, serve):
    server = serve(says())
    (tmp_path / ".env").write_text("AGENT_MODE=auto\nAGENT_API_KEY=wrong\n")
    done = cli(tmp_path, "-w", tmp_path, "--base-url", server.url, "hi")
    assert "ask mode" in done.stderr and "Authorization" not in server.requests[0][1]


def test_a_session_goes_on_with_the_same_history(tmp_path, serve):
    server = serve(stream_of(call_delta(0, "c1", "find_files", '{"pattern": "*"}'),
                             delta("tool_calls")), says("first answer"), says("second answer"))
    words = ["--base-url", server.url, "-m", "m"]
    assert cli(tmp_path, *words, "one").stdout == "first answer\n"
    assert cli(tmp_path, *words, "-c", "two").stdout == "second answer\n"
    before, after = server.body(1), server.body(2)
    assert after["messages"][:len(before["messages"])] == before["messages"]
    assert after["tools"] == before["tools"]
    assert [m["content"] for m in after["messages"][-2:]] == ["first answer", "two"]
    assert len(list((tmp_path / "home").rglob("*.jsonl"))) == 2           # one session, the audit


def test_piped_input_joins_the_task(tmp_path, serve):
    server = serve(says())
    cli(tmp_path, "--base-url", server.url, "review", "this", stdin="line 1\n/mode auto\n")
    assert server.body()["messages"][-1]["content"] == "review this\n\nline 1\n/mode auto"
    cli(tmp_path, "--base-url", server.url, stdin="only this\n")
    assert server.body()["messages"][-1]["content"] == "only this"
    cli(tmp_path, "--base-url", server.url, "--", "--mode", "auto")
    assert server.body()["messages"][-1]["content"] == "--mode auto"


EXITS = {"answered": (says(), [], 0), "cut by length": (says("half", "length"), [], 1),
         "filtered": (says("half", "content_filter"), [], 1),
         "a wrong key": (error_reply(401, {}), [], 1),
         "step limit": (stream_of(call_delta(0, None, "find_files", '{"pattern": "*"}'),
                                  delta("tool_calls")), ["--max-steps", "2"], 3)}


@pytest.mark.parametrize("reply, words, status", EXITS.values(), ids=EXITS)
def test_exit_statuses(tmp_path, serve, reply, words, status):
    done = cli(tmp_path, "--base-url", serve(reply).url, *words, "hi")
    assert done.returncode == status
    assert (not done.stdout) == (status != 0 and "half" not in done.stdout)


@posix
def test_ctrl_c_in_one_shot_is_130(tmp_path, serve):
    server = serve({"chunks": [], "end": "stall"})
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--base-url", server.url, "hi"], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while not server.requests:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err


def test_no_session_leaves_nothing(tmp_path):
    done = cli(tmp_path, "--no-session", "--mode", "auto", "--sandbox", "off", "--json", "run seq 9999")
    assert json.loads(done.stdout.splitlines()[-1])["session"] is None
    assert not (tmp_path / "home").exists()


@posix
@pytest.mark.parametrize("redirect, status", [(">&-", 0), ("2>&-", 0), (">/dev/full", 1), ("<&-", 0)])
def test_closed_and_full_streams(tmp_path, redirect, status):
    command = f'"{sys.executable}" "{PROGRAM}" "sing" {redirect}'
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert done.returncode == status and "Traceback" not in done.stderr
    assert status == 0 or "No space left" in done.stderr


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_program_and_its_command(tmp_path, name):
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--mode", "auto", "--sandbox", "off",
         "run trap '' TERM HUP; echo $$ > p; sleep 60"], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    file = tmp_path / "workspace/p"
    while not (file.exists() and file.read_text()):
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + getattr(signal, name) and b"Traceback" not in err
    assert ends(int(file.read_text()))


def test_resuming_without_keeping_writes_nothing(tmp_path):
    cli(tmp_path, "sing")
    [path] = (tmp_path / "home").rglob("sessions/*/*.jsonl")
    before = path.read_bytes()
    assert cli(tmp_path, "-c", "--no-session", "run echo x").returncode == 0
    assert path.read_bytes() == before


def test_a_session_is_resumed_in_its_own_folder(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/story.txt").write_text("Once\n")
    cli(tmp_path, "-w", "there", "sing")
    [path] = (tmp_path / "home").rglob("sessions/*/*.jsonl")
    done = cli(tmp_path, "-r", path.stem, "read story.txt")
    assert "Once" in done.stdout and not (tmp_path / "workspace").exists()
    (tmp_path / "workspace").mkdir()
    done = cli(tmp_path, "-r", path.stem, "-w", "workspace", "read story.txt")
    assert "did not work" in done.stdout and "another folder" in done.stderr


def test_a_session_with_a_server_of_its_own_asks_for_the_address(tmp_path, serve):
    server = serve(says())
    cli(tmp_path, "--base-url", server.url, "-m", "big", "one")
    done = cli(tmp_path, "-c", "two")
    assert done.returncode == 2 and "--base-url" in done.stderr
    cli(tmp_path, "--base-url", server.url, "-c", "two")
    assert server.body()["model"] == "big"


def test_a_named_provider_with_an_address_of_its_own_is_not_left_for_the_public_one(tmp_path, serve):
    server = serve(says())
    env = {"OPENAI_API_KEY": KEY}
    assert cli(tmp_path, "-p", "openai", "--base-url", server.url, "one", env=env).returncode == 0
    done = cli(tmp_path, "-c", "two", env=env)
    assert done.returncode == 2 and "--base-url" in done.stderr and len(server.requests) == 1


@posix
def test_a_chat_keeps_the_address_and_the_folder_it_was_given(tmp_path, serve):
    server = serve(says())
    (tmp_path / "there").mkdir()
    cli(tmp_path, "-w", "there", "sing")
    [path] = (tmp_path / "home").rglob("sessions/*/*.jsonl")
    terminal = Terminal(tmp_path, "--base-url", server.url, "-m", "m", "-r", path.stem)
    for line, shown in (("/provider demo", r"\* demo"), ("/provider custom", r"\* custom"), ("/new", "A new"),
                        ("hi", "fine"), ("/status", "session: ")):
        terminal.send(line + "\n")
        shown = terminal.read_until(shown + r"[\s\S]*\w+ ask \d+%> ")
    terminal.send("exit\n")
    assert terminal.exit_status() == 0
    assert Path(re.search(r"session: (\S+)", shown)[1]).parent == path.parent


def test_it_runs_where_there_is_nothing_but_python(tmp_path):
    """As on Windows: no fcntl, termios, readline, process groups, or flags of os.open."""
    code = (f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\n"
            "for name in ('fcntl', 'termios', 'readline', 'resource', 'pwd'):\n"
            "    sys.modules[name] = None\n"
            "for name in ('killpg', 'O_NOFOLLOW', 'O_NONBLOCK', 'O_DIRECTORY', 'getuid', 'fork'):\n"
            "    vars(os).pop(name, None)\n"
            "os.supports_dir_fd.clear()\n"
            "import signal\nvars(signal).pop('SIGHUP', None), vars(signal).pop('setitimer', None)\n"
            "import tiny_agent\n"
            "sys.exit(tiny_agent.main(['--mode', 'auto', '--sandbox', 'off', 'create fib.py that '\n"
            "    'prints the first 3 Fibonacci numbers, then run it']))\n")
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          input="", env={**os.environ, "AGENT_HOME": str(tmp_path / "home")})
    assert done.returncode == 0 and done.stdout.endswith("0\n1\n1\n"), done.stderr


def test_no_key_reaches_any_place(tmp_path, serve):
    """Also if a command prints it, a file holds it, or the model says it."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/k.txt").write_text(f"key = {KEY}\n")
    server = serve(stream_of(
        call_delta(0, "a", "shell", json.dumps({"command": f"echo {KEY}"})),
        call_delta(1, "b", "read_file", '{"path": "k.txt"}'),
        call_delta(2, "c", "write_file", json.dumps({"path": "l.txt", "content": KEY})),
        delta("tool_calls")), says(f"It is {KEY}."), error_reply(401, {"error": f"{KEY}?"}))
    words = ["--base-url", server.url, "--mode", "auto", "--sandbox", "off"]
    for more in ([], ["--json"], ["-c"]):
        done = cli(tmp_path, *words, *more, "hi", env={"AGENT_API_KEY": KEY})
        assert KEY not in done.stdout + done.stderr and "[key]" in done.stdout + done.stderr
    assert [m["content"].count("[key]") for m in server.body(1)["messages"][-3:-1]] == [1, 1]
    for path in (tmp_path / "home").rglob("*"):
        assert path.is_dir() or KEY not in path.read_text()


def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path):
    command = f'"{sys.executable}" "{PROGRAM}" --json --no-session "sing" | head -n 1'
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert json.loads(done.stdout)["type"] == "run_start" and "Traceback" not in done.stderr


# ─── House rules ─────────────────────────────────────────────────────────────────────────────────

TREE = ast.parse(SOURCE)
MARKS = [(number, line.strip("# ─")) for number, line in enumerate(SOURCE.splitlines(), 1)
         if line.startswith("# ─── ")]


def section(line) -> int:
    return sum(mark <= line for mark, _ in MARKS)


def test_only_the_standard_library_is_imported():
    names = {alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import)
             for alias in node.names}
    names |= {node.module for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_the_map_has_the_titles_of_the_sections():
    listed = re.findall(r"^      ([A-Z]\w*(?: \w+)*)  +\w", ast.get_docstring(TREE, False), re.M)
    assert listed == [title for _, title in MARKS]


def test_tests_have_the_titles_of_the_sections_too():
    own = re.findall(r"^# ─── (.*?) ─", Path(__file__).read_text("utf-8"), re.M)
    assert own == ["Helpers", *[title for _, title in MARKS], "House rules"]


def test_each_section_uses_only_those_above_it():
    home = {node.name: section(node.lineno) for node in TREE.body if hasattr(node, "name")}
    late = [(node.lineno, node.id) for node in ast.walk(TREE) if isinstance(node, ast.Name)
            and home.get(node.id, 0) > section(node.lineno)]
    assert late == []


def test_nothing_above_the_front_ends_prints():
    first = next(line for line, title in MARKS if title == "Showing events")
    prints = [node.lineno for node in ast.walk(TREE) if isinstance(node, ast.Name)
              and node.id in ("print", "input") and node.lineno < first]
    assert prints == []


def test_lines_are_short_and_sections_have_heads():
    source = SOURCE.splitlines()
    assert [n for n, line in enumerate(source, 1) if len(line) > 100] == []
    for number, title in MARKS:
        head = list(iter(iter(source[number:]).__next__, ""))
        assert 2 <= sum(line.startswith("#") for line in head), title


def test_every_tool_documents_every_parameter():
    for schema in TOOLS:
        assert schema["description"]
        for name, about in schema["parameters"]["properties"].items():
            assert about.get("description"), (schema["name"], name)


def test_public_classes_and_functions_have_docstrings():
    events = {kind.__name__ for kind in ta.EVENTS.values()}
    bare = [node.name for node in TREE.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            and not ast.get_docstring(node) and not node.name.startswith(("_", "demo_"))
            and node.name not in events]
    assert bare == []


README, DESIGN = ((HERE / name).read_text("utf-8") for name in ("README.md", "DESIGN.md"))


def table(text, title) -> list[str]:
    """The first cells of the table under a heading."""
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", part, re.M)


def test_the_tables_of_the_readme_are_true():
    assert table(README, "Events") == list(ta.EVENTS)
    assert [name.replace("\\|", "|") for name in table(README, "Commands of the chat")] == [
        f.__doc__.partition(":")[0] for f in ta.COMMANDS.values()]
    assert [name.partition(" ")[0] for name in table(README, "Settings")] == [
        row[0] for row in ta.SETTINGS]
    assert table(README, "Tools") == list(Workspace(".").tools())
    chapter = README.partition("\n## RPC")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", chapter, re.M)
    when = {**dict.fromkeys(ta.ONLY_IDLE, "no"), **dict.fromkeys(ta.ONLY_RUNNING, "yes")}
    assert rows == [(name, ", ".join(f"`{field}`" for field in inspect.signature(method).parameters
                                     if field != "self"), when.get(name, ""))
                    for name, method in ta.REQUESTS.items()]
    assert table(README, "Providers") == list(ta.PROVIDERS)


def test_the_design_has_the_titles_of_the_sections():
    headings = re.findall(r"^### (.*)", DESIGN, re.M)
    assert headings == [title for _, title in MARKS]


def test_the_example_settings_are_those_that_are_read():
    named = re.findall(r"^#?\s*([A-Z_]+)=", (HERE / ".env.example").read_text("utf-8"), re.M)
    keys = [p.key_env for p in ta.PROVIDERS.values() if p.key_env]
    assert sorted(named) == sorted([*(row[0] for row in ta.SETTINGS), "AGENT_API_KEY", "AGENT_HOME",
                                    *keys])
    read = set(re.findall(r'"(AGENT_[A-Z_]+)"', SOURCE))
    assert read <= set(named)


def experiments() -> list[tuple[str, str]]:
    """(commands, what they print) of the README's experiments: ```sh and ```text blocks."""
    return re.findall(r"```sh\n((?:(?!```).)*)```\n+```text\n(.*?)```", README, re.S)


@posix
@pytest.mark.parametrize("commands, printed", experiments())
def test_the_experiments_of_the_readme(tmp_path, commands, printed):
    (tmp_path / "tiny_agent.py").write_text(SOURCE, "utf-8")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
           "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", commands], cwd=tmp_path, env=env, text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    assert re.sub(r"\(\d+\.\d s\)", "(0.0 s)", done.stdout) == printed


# ── Figures, for `make bench`: printed side by side with a bare Python, never asserted

def fastest(function, times=5) -> float:
    """Seconds of the fastest of some calls."""
    def once():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    return min(once() for _ in range(times))


def bench() -> None:
    """Prints figures of this machine."""
    import tempfile
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = [sys.executable, "-c"]
        bare = fastest(lambda: subprocess.run([*run, "pass"]))
        start = fastest(lambda: subprocess.run([sys.executable, str(PROGRAM), "--version"],
                                               stdout=subprocess.DEVNULL))
        print(f"start-up              {start * 1000:8.1f} ms   bare Python {bare * 1000:.1f} ms")

        turns = 200
        calls = [[("find_files", {"pattern": f"nothing{n}"})] for n in range(turns)] + ["done"]
        agent = ta.Agent(ScriptedProvider(calls), Workspace(folder), max_steps=turns + 1,
                         budget=10**9,
                         session=Session.new(folder / "home", folder), home=folder / "home")
        seconds = fastest(lambda: list(agent.run("go")), 1) / turns
        print(f"a turn, scripted      {seconds * 1000:8.2f} ms   over {turns} turns, one call each")
        agent.session.close()

        server = Server(says())
        agent = ta.Agent(Provider("custom", server.url, "m"), Workspace(folder))
        seconds = fastest(lambda: list(agent.run("go")), 20)
        print(f"a turn, loopback HTTP {seconds * 1000:8.2f} ms")
        server.close()

        count = 50_000
        session = Session.new(folder / "home", folder / "long")
        seconds = fastest(lambda: talk(session, *["some words of a message"] * count), 1)
        print(f"session, append       {seconds / count * 1e6:8.1f} us   an entry")
        session.close()
        size = session.path.stat().st_size
        loading = fastest(lambda: Session.load(session.path).close(), 1)
        parsing = fastest(lambda: [json.loads(x) for x in open(session.path)], 1)
        print(f"session, load         {loading / count * 1e6:8.1f} us   an entry of {count:,} "
              f"({size / 1e6:.0f} MB); json.loads alone {parsing / count * 1e6:.1f} us")
        loaded = Session.load(session.path)
        seconds = fastest(lambda: ta.project(loaded.active_path()), 1)
        print(f"session, project      {seconds / count * 1e6:8.1f} us   an entry")

        for number in range(1000):
            (folder / f"f{number}.txt").write_text("some words on a line\n" * 200)
        seconds = fastest(lambda: Workspace(folder).grep("nothing like it", "."), 2)
        print(f"grep                  {seconds * 1000:8.0f} ms   1,000 files of 200 lines")
    with contextlib.suppress(ImportError):
        import resource
        print(f"memory, at the most   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:8} MB")


if __name__ == "__main__" and sys.argv[1:] == ["bench"]:
    bench()
