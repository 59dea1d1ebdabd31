#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""tiny_agent: a coding agent in one file that a person can read, run, change and trust.

    python3 tiny_agent.py "create fib.py that prints the first 10 Fibonacci numbers, then run it"
    python3 tiny_agent.py -p groq                            a chat (set GROQ_API_KEY first)
    git diff | python3 tiny_agent.py "review this" > review.md

An agent is a while-loop around one API call; the rest is guardrails and memory:

    session.append(task)
    while True:
        reply = provider.stream(system, project(session), tools)
        session.append(reply)
        if not reply.tool_calls:
            return reply.content
        for call in reply.tool_calls:
            allowed = decide(call)
            session.append(run(call) if allowed else "denied: by this rule")

Map: each section uses only those above it, so the file reads once from top to bottom.

    Part I, the agent
      Messages and events       the nouns, what happens in a run, the errors
      HTTP and event streams    one request; bytes on a socket become JSON objects
      Providers                 the port; chat completions, Anthropic messages, scripted
      Tool schemas              a function's signature and docstring tell the model how to call it
      Workspace and tools       one path check, the seven tools, clipping, the sandbox
      Permissions               Rule, RULES, reading command lines, decide()
      Hooks                     veto before a call, observe after it
      Session                   the ledger: an append-only file that holds a tree
      Context                   the system prompt, projection, what gives way when it is too much
      Agent                     the loop
    Part II, the front ends
      Showing events            terminal text, JSON lines, asking the person
      Commands                  the chat's slash commands
      RPC                       the same agent for another program, JSON lines on both sides
      Export and inspection     the tree, the list of sessions, why it was decided so
      Settings and main         flags, environment, .env; one-shot and chat

Words, each with one meaning everywhere:

    entry        one line of the session file                {"type": "message", "id": "5f0c…", …}
    branch       the entries from the header to a leaf       header, question, call, result, answer
    leaf         the entry that the next one is added to     after a rewind, an older one
    projection   a branch turned into messages for a model   project(session.active_path())
    turn         one request, its reply and its tool calls   "read a.py", and the text of a.py
    event        one thing that happened, for watchers       TextDelta("Hel"), ToolEnd(…)
    rule         who may do what to which target             Rule("deny", "shell", "npm publish *")
    hook         a function called at a moment of the run    @agent.hooks.on("before_tool")
"""
import contextlib
import copy
import fnmatch
import functools
import inspect
import itertools
import json
import os
import queue
import random
import re
import stat
import sys
import threading
import time
import types
import typing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

VERSION = "0.1"


# ─── Messages and events ─────────────────────────────────────────────────────────────────────────
# The nouns. Three kinds of message make a conversation; events tell what happens while one is made.
# Both are small frozen dataclasses inside the program and become dictionaries only at its two
# edges, the wire and the session file. Pictures are left out: every content is text.

@dataclass(frozen=True)
class Usage:
    """What a reply cost, in tokens; `cost` in the provider's currency, where it reports one."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None


@dataclass(frozen=True)
class ToolCall:
    """A tool the model wants run. `arguments` is None if they were not a JSON object, and
    `raw_arguments` then holds the text that came instead."""
    id: str
    name: str
    arguments: dict | None
    raw_arguments: str | None = None


@dataclass(frozen=True)
class UserMessage:
    """What the person said."""
    content: str
    role: str = field(default="user", init=False)


@dataclass(frozen=True)
class AssistantMessage:
    """What the model said. `stop_reason` is stop, length, tool_use, error or aborted.

    `provider_data` maps a provider's name to what that provider, and no other, must get back
    unchanged: signatures, reasoning details, extra content of calls.
    """
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    stop_reason: str = "stop"
    error_message: str | None = None
    usage: Usage | None = None
    provider: str = ""
    model: str = ""
    provider_data: dict = field(default_factory=dict)
    role: str = field(default="assistant", init=False)


@dataclass(frozen=True)
class ToolResultMessage:
    """What came of a call. `details` is for people and front ends; the model never sees it."""
    tool_call_id: str
    tool_name: str
    content: str
    is_error: bool = False
    details: dict = field(default_factory=dict)
    role: str = field(default="tool_result", init=False)


Message = UserMessage | AssistantMessage | ToolResultMessage
MESSAGE_TYPES = {"user": UserMessage, "assistant": AssistantMessage,
                 "tool_result": ToolResultMessage}
PLAIN = (str, bool, dict, str | None)        # the types of fields that are JSON as they are
LEFT_OUT_IF_EMPTY = {"raw_arguments", "provider_data", "cost"}


def to_json(value: object) -> object:
    """A message, an event, or a part of one, as plain JSON data."""
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if not is_dataclass(value):
        return value
    named = {"type": value.type} if isinstance(value, Event) else {}
    for name in value.__dataclass_fields__:
        item = getattr(value, name)
        if item or name not in LEFT_OUT_IF_EMPTY:
            named[name] = to_json(item)
    return named


def from_json(data: dict) -> Message:
    """The message that to_json made. Fields that are unknown, or of another type than they should
    be, are left out; ValueError if there is no message without them."""
    kind = MESSAGE_TYPES.get(str(data.get("role")))
    if kind is None:
        raise ValueError(f"no message has the role {data.get('role')!r}")
    known = {"content": "", **{f.name: data.get(f.name) for f in fields(kind) if f.init
                               and f.type in PLAIN and isinstance(data.get(f.name), f.type)}}
    if not isinstance(data.get("content", ""), str | None):
        raise ValueError("the content of a message must be text")
    if kind is ToolResultMessage and not known.keys() >= {"tool_call_id", "tool_name"}:
        raise ValueError("a result names its call")
    if kind is AssistantMessage:
        calls, usage = data.get("tool_calls") or (), data.get("usage")
        known["tool_calls"] = tuple(call_from_json(call) for call in calls)
        known["usage"] = usage_from_json(usage) if isinstance(usage, dict) else None
        known["provider_data"] = {name: value for name, value in
                                  known.get("provider_data", {}).items() if isinstance(value, dict)}
    return kind(**known)


def call_from_json(data: dict) -> ToolCall:
    """A call as to_json made it. Raises KeyError, TypeError."""
    arguments, raw = data.get("arguments"), data.get("raw_arguments")
    return ToolCall(str(data["id"]), str(data["name"]),
                    arguments if isinstance(arguments, dict) else None,
                    raw if isinstance(raw, str) else None)


def usage_from_json(data: dict) -> Usage:
    """A usage as to_json made it; what is no number counts nothing."""
    counts = {name: data[name] for name in ("input_tokens", "output_tokens", "cached_tokens")
              if type(data.get(name)) is int}
    cost = data.get("cost")
    return Usage(**counts, cost=cost if isinstance(cost, int | float) else None)


# A run, in time order. Indented lines happen any number of times.
#
#   run_start
#       message_start, message_end                the person's message
#       turn_start
#           retry                                 a request is sent again
#           message_start                         the assistant's
#               text_delta  thinking_delta  toolcall_start  toolcall_delta  toolcall_end
#           message_end
#               tool_start                        it is decided
#                   tool_output
#               tool_end
#               message_start, message_end        the tool's result
#       turn_end
#       compaction                                older messages give way to a summary
#       warning                                   something to know; the run goes on
#   run_end
#   run_settled                                   everything is written; nothing follows

class Event:
    """Something that happened; `type` is its name in JSON."""
    type: str


EVENTS: dict[str, type[Event]] = {}


def event(name: str, /, **members: object) -> type[Event]:
    """A new kind of event, as a frozen dataclass with these members."""
    EVENTS[name] = make_dataclass(name.title().replace("_", ""), members.items(), bases=(Event,),
                                  namespace={"type": name}, frozen=True)
    return EVENTS[name]


RunStart = event("run_start", session=str | None, provider=str, model=str, mode=str, workspace=str)
MessageStart = event("message_start", message=Message)
MessageEnd = event("message_end", message=Message)
TurnStart = event("turn_start", turn=int)
TurnEnd = event("turn_end", turn=int)
Retry = event("retry", attempt=int, delay=float, error=dict)    # the one that failed; in seconds
TextDelta = event("text_delta", delta=str)
ThinkingDelta = event("thinking_delta", delta=str)
ToolcallStart = event("toolcall_start", id=str, name=str)
ToolcallDelta = event("toolcall_delta", id=str, name=str, delta=str)
ToolcallEnd = event("toolcall_end", tool_call=ToolCall)
ToolStart = event("tool_start", id=str, name=str, arguments=dict | None, decision=str,
                  rule=str | None, reason=str)
ToolOutput = event("tool_output", id=str, text=str)
ToolEnd = event("tool_end", id=str, name=str, is_error=bool, content=str, seconds=float)
Compaction = event("compaction", reason=str, before=int, after=int,              # in tokens
                   first_kept_entry_id=str | None, error=str | None)
Warned = event("warning", message=str)
RunEnd = event("run_end", reason=str,              # stop, length, error, aborted or max_steps
               error=dict | None)
RunSettled = event("run_settled", reason=str, error=dict | None, answer=str, session=str | None,
                   totals=dict)

# ── Text from elsewhere, made fit to show
# What a server, a model or a file says may hold keys, escape sequences, or signs that turn text
# around. Keys are replaced before anything is kept or shown; the rest when it is shown.

SECRETS: set[str] = set()          # the values of the keys in use; filled where a key is read
HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180e\u2800\u3164"
                    "\ufe00-\ufe0f\uffa0\u200b-\u200f\u2028-\u202e"
                    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]")


def mask(text: str) -> str:
    """The text without the values of the keys in use."""
    for secret in SECRETS:
        text = text.replace(secret, "[key]")
    return text


def visible(text: str) -> str:
    """The text with control, invisible and reordering characters as escapes like \\x1b."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def brief(text: str, limit: int = 200) -> str:
    """The text in one line of at most `limit` characters; of an HTML page its title or words."""
    if re.match(r"[\s\ufeff]*(<!--.*?-->\s*)?<(!doctype|html|head|body|\?xml)", text, re.I | re.S):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.I | re.S)
        text = title[1] if title else re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", text)
    text = re.sub(r"//[^/\s@]+@", "//", " ".join(text.split()))       # no passwords of addresses
    text = visible(mask(text.lstrip("\ufeff")))
    return text if len(text) <= limit else text[:limit - 1] + "…"


class AgentError(Exception):
    """What a person can do something about: what happened, and a hint what to do next."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message, self.hint = message, hint


class UsageError(AgentError):
    """A setting or a flag that cannot be used; exit status 2."""


class SessionError(AgentError):
    """A session file that cannot be used."""


class ToolError(Exception):
    """A sentence for the model: why the tool did nothing, and what would work."""


class ProviderError(AgentError):
    """A request that failed.

    `kind` is auth, rate_limit, overflow, network, server, invalid_request or aborted. It may be
    sent `attempts` times in all, after `delay` seconds (None: the caller's own waits). `window`
    is the context length in tokens, if the error names it.
    """

    def __init__(self, kind: str, message: str, hint: str = "", *, attempts: int = 1,
                 delay: float | None = None, window: int | None = None):
        super().__init__(brief(message), brief(hint, 400))
        self.kind, self.attempts, self.delay, self.window = kind, attempts, delay, window
        self.details = message           # all that the server said, for learn()

    def to_json(self) -> dict:
        """The error as it stands in events."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


# ─── HTTP and event streams ──────────────────────────────────────────────────────────────────────
# One request at a time, and an answer that arrives in pieces, if it does. A thread of its own
# talks to the server and puts what arrives into a queue; who waits for it waits at that queue.
# So every wait has a limit, an abort from any thread is felt at once, and a cut is never taken
# for an end. Left out: kept connections, HTTP/2, SOCKS proxies.

USER_AGENT = f"tiny_agent/{VERSION}"
PATIENCE = {                 # seconds
    "connect": 15,
    "first byte": 300,       # a large model on a small machine reads a long prompt for minutes
    "byte": 120,
    "event": 300,            # comments keep a connection alive, but only data is progress
    "end": 1.5,              # after the finish reason, for the usage: some servers send none
}
MAX_REPLY = 64_000_000       # bytes


class Abort:
    """A stop signal. Any thread, or a signal handler, may set it; whoever waits wakes at once."""

    def __init__(self):
        self.done = False
        self.callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        self.done = True
        for callback in list(self.callbacks):
            callback()

    @contextlib.contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within, setting the signal calls `callback`, which must neither block nor raise."""
        self.callbacks.append(callback)
        if self.done:
            callback()
        try:
            yield
        finally:
            self.callbacks.remove(callback)

    def sleep(self, seconds: float) -> bool:
        """Waits; True if the time is over, False as soon as the signal is set."""
        wake: queue.SimpleQueue = queue.SimpleQueue()       # safe to use in a signal handler
        with self.calling(lambda: wake.put(None)), contextlib.suppress(queue.Empty):
            wake.get(timeout=max(0, seconds))
            return False
        return True


@contextlib.contextmanager
def request(method: str, url: str, headers: dict, body: bytes | None,
            abort: Abort) -> "Iterator[Answer]":
    """Sends one HTTP request and gives its answer, as soon as its status is known.

    No redirect is followed: the key would go along. Raises ProviderError.
    """
    answer = Answer(url, abort)
    with abort.calling(answer.close):
        threading.Thread(target=answer.talk, args=(method, headers, body), daemon=True).start()
        try:
            head = answer.take()
            answer.status, answer.headers = head.status, head.headers
            yield answer
        finally:
            answer.close()


class Answer:
    """The answer to one HTTP request: `status`, `headers` and the body's `chunks()`."""

    def __init__(self, url: str, abort: Abort):
        self.url, self.abort = url, abort
        self.status, self.headers = 0, {}
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.socket, self.closed = None, False
        self.patience, self.event_patience = PATIENCE["first byte"], PATIENCE["event"]
        self.last_event = time.monotonic()

    def talk(self, method: str, headers: dict, body: bytes | None) -> None:
        """The thread: puts the answer's head into the inbox, the pieces of its body, then b""."""
        connection = None
        try:
            connection, target, more = connect(self.url)
            self.socket = connection.sock
            if self.closed:
                return
            connection.request(method, target, body, {**more, **headers})
            head = connection.getresponse()
            self.inbox.put(head)
            while data := head.read1(65536):
                self.inbox.put(data)
            self.inbox.put(b"")
        except Exception as error:      # whatever goes wrong in this thread, the other one reports
            self.inbox.put(error)
        finally:
            if connection:
                connection.close()

    def close(self) -> None:
        """Wakes who waits and ends the connection; from any thread."""
        import socket
        self.closed = True
        self.inbox.put(ProviderError("aborted", "stopped"))
        if self.socket:
            with contextlib.suppress(OSError):       # not SSLSocket's: it would wait for its peer
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def take(self) -> object:
        """The next thing from the inbox, within the time that is left for it."""
        seconds = min(self.patience, self.last_event + self.event_patience - time.monotonic())
        try:
            item = self.inbox.get(timeout=max(0, seconds))
        except queue.Empty:
            what = "stopped in the middle of its answer" if self.status else "does not answer"
            raise ProviderError("network", f"the server {what}", attempts=5) from None
        if self.abort.done:
            raise ProviderError("aborted", "stopped")
        if isinstance(item, Exception):
            raise item if isinstance(item, ProviderError) else connection_error(item, self.url)
        return item

    def chunks(self) -> Iterator[bytes]:
        """Yields the body in pieces as they arrive, inflated if the server squeezed it."""
        import zlib
        squeezed = re.search("gzip|deflate", self.headers.get("Content-Encoding", ""), re.I)
        inflate = zlib.decompressobj(wbits=47).decompress if squeezed else bytes
        self.patience = min(self.patience, PATIENCE["byte"])
        size = 0
        while data := self.take():
            try:
                data = inflate(data)
            except zlib.error:
                raise ProviderError("network", "the answer is damaged", attempts=5) from None
            size += len(data)
            if size > MAX_REPLY:
                raise ProviderError("network", f"the answer is longer than {MAX_REPLY:,} bytes")
            yield data

    def text(self) -> str:
        """The whole body, decoded. What a cut leaves of an error's body is still worth reading."""
        parts = []
        with contextlib.suppress(ProviderError):
            parts.extend(self.chunks())
        if self.abort.done:
            raise ProviderError("aborted", "stopped")
        return b"".join(parts).decode("utf-8", "replace")


def connect(url: str) -> tuple:
    """(a connected http.client connection, the target of the request line, more headers).

    Proxies as urllib finds them, but never for this machine itself. Raises OSError, ValueError.
    """
    import http.client
    from urllib.parse import unquote, urlsplit
    from urllib.request import getproxies, proxy_bypass
    goal = urlsplit(url)
    at = goal
    if not is_loopback(goal.hostname) and not proxy_bypass(goal.netloc):
        proxies = getproxies()
        way = proxies.get(goal.scheme) or proxies.get("all")
        at = urlsplit(way if "://" in way else f"http://{way}") if way else goal
    if at.scheme not in ("http", "https") or not at.hostname:
        raise ValueError(f"{at.scheme}://{at.hostname or ''} is not an address for HTTP")
    login, proxied, seconds = {}, at is not goal, PATIENCE["connect"]
    if proxied and at.username:
        import base64
        words = f"{unquote(at.username)}:{unquote(at.password or '')}".encode()
        login = {"Proxy-Authorization": "Basic " + base64.b64encode(words).decode()}
    target, more = f"{goal.path or '/'}{'?' + goal.query if goal.query else ''}", {}
    if goal.scheme == "https":
        port = at.port or (80 if proxied else 443)
        connection = http.client.HTTPSConnection(at.hostname, port, timeout=seconds,
                                                 context=tls_context())
        if proxied:
            connection.set_tunnel(goal.hostname, goal.port or 443, login)
    else:
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=seconds)
        if proxied:
            target, more = url, {**login, "Host": goal.netloc}
    connection.connect()
    connection.sock.settimeout(None)        # from here on the one who waits keeps the time
    return connection, target, more


def is_loopback(host: str | None) -> bool:
    """Is it this machine?"""
    import ipaddress
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return host == "localhost" or (host or "").endswith(".localhost")


@functools.cache
def tls_context():
    """The one TLS context of the process; loading the certificates takes longer than a request.

    SSL_CERT_FILE is honoured by OpenSSL itself. Python builds for macOS come without certificates
    but the system has a file of them.
    """
    import ssl
    context = ssl.create_default_context()
    if not context.get_ca_certs() and os.path.exists("/etc/ssl/cert.pem"):
        context.load_verify_locations("/etc/ssl/cert.pem")
    return context


def connection_error(error: Exception, url: str) -> ProviderError:
    """What went wrong below HTTP, as a network error that says what to do."""
    import http.client
    import socket
    import ssl
    host = (re.match(r"\w+://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", url) or ["", "?"])[1].strip("[]")
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProviderError("network", f"the certificate of {host} is not trusted: "
                             f"{error.verify_message}",
                             "set SSL_CERT_FILE to a file with the certificates of your system or "
                             "company; python.org's Python on macOS has 'Install Certificates'")
    if isinstance(error, socket.gaierror):
        return ProviderError("network", f"the name {host} cannot be resolved",
                             "check the address and the network connection", attempts=3)
    if isinstance(error, ConnectionRefusedError) and is_loopback(host):
        return ProviderError("network", f"nothing answers at {url}, connection refused",
                             "start the server first (Ollama: `ollama serve`), or check the "
                             "address after --base-url")
    if isinstance(error, (ValueError, http.client.InvalidURL)):
        return ProviderError("invalid_request", f"{url}: {error}",
                             "check the base URL and the proxy settings (HTTPS_PROXY and its kin)")
    if "Tunnel connection failed: 4" in str(error):
        return ProviderError("network", f"the proxy refuses: {error}",
                             "check the proxy settings (HTTPS_PROXY and its kin)")
    what = str(error) or type(error).__name__
    return ProviderError("network", f"the connection to {host} failed: {what}",
                         "check the network connection and the proxy settings", attempts=5)


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a byte stream, ended by CR, LF or CRLF wherever the chunks are cut."""
    parts: list[bytes] = []
    after_cr = False
    for chunk in filter(None, chunks):
        fresh = chunk.removeprefix(b"\n") if after_cr else chunk
        after_cr = chunk.endswith(b"\r")
        first, *more = re.split(rb"\r\n|\r|\n", fresh)
        parts.append(first)
        for line in more:
            yield b"".join(parts)
            parts = [line]
    yield b"".join(parts)


def server_events(chunks: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yields (event name, data) of a server-sent event stream.

    By https://html.spec.whatwg.org/multipage/server-sent-events.html, with two things more: a
    last event without a blank line counts, and so does a field called `error` (old llama.cpp).
    """
    name, data = "", []
    for number, line in enumerate(itertools.chain(lines(chunks), [b""])):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        if not line:
            if any(data):
                yield name, b"\n".join(data)
            name, data = "", []
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"event":
            name = value.decode("utf-8", "replace")
        elif key in (b"data", b"error"):
            data.append(value)
            name = "error" if key == b"error" else name


DONE = {"[DONE]": True}      # the object that json_events gives for the end mark


def json_events(chunks: Iterable[bytes]) -> Iterator[dict]:
    """Yields the JSON objects of a reply, and DONE where the reply says that it is whole.

    Its first byte decides whether it is a stream of events or one JSON body: servers answer a
    request for a stream with either, under any Content-Type. Raises ProviderError.
    """
    chunks = iter(chunks)
    head = b""
    while not head.strip(b"\xef\xbb\xbf \t\r\n") and (data := next(chunks, None)) is not None:
        head += data
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        body = parse_event(start + b"".join(chunks))
        yield body if body.keys() & {"choices", "content", "error"} else {"error": body}
        yield DONE
    elif start[:1] == b"<":
        page = (start + b"".join(chunks)).decode("utf-8", "replace")
        raise ProviderError("network", f"a web page came instead of an answer: {brief(page, 120)}",
                            "check the base URL, and whether a proxy or a login page is in between")
    else:
        for name, data in server_events(itertools.chain([head], chunks)):
            if data.strip() == b"[DONE]":
                yield DONE
                return
            body = parse_event(data)
            yield {"error": body} if name == "error" and "error" not in body else body


def parse_event(data: bytes) -> dict:
    """One JSON object (of a list, its first). Raises ProviderError: a network error."""
    try:
        value = json.loads(data.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        raise ProviderError("network", "the server sent something that is not a JSON object: "
                            + brief(data.decode("utf-8", "replace"), 80), attempts=5)
    return value

# ── What a refusal means
# Every server words its errors in its own way. One function reads them all, one table says what
# they mean; its first row that fits decides. Sources of the rows: the wire tests.

OVERFLOW = "|".join((
    r"prompt is too long", r"exceeds? (the )?context (limit|window)", r"context window exceeds",
    r"maximum context length", r"context_length_exceeded", r"reduce the length of the messages",
    r"input token count.*exceeds the maximum", r"maximum prompt length is", r"input is too long",
    r"exceed_context_size", r"exceeds the (available|maximum) context size",
    r"(greater|longer) than the context length", r"n_keep.*>= ?n_ctx", r"context the overflows",
    r"too large for model with", r"max_tokens must be at least 1, got -",
    r"exceeded model token limit", r"exceeds the limit of \d", r"context_window_exceeded",
    r"context length is only \d"))
WINDOW = re.compile(r"limit:? (\d+), requested|maximum (?:context|prompt) length (?:is|of) (\d+)|"
                    r"> ?(\d+) maximum|context limit: .*> ?(\d+)|n_ctx\W+(\d+)|"
                    r"context size\W+(\d+)|context length (?:is|of) only (\d+)|"
                    r"token limit:? (\d+)|"
                    r"maximum number of tokens allowed \((\d+)\)|with (\d+) maximum context|"
                    r"limit of (\d+)|maximum of (\d+) tokens|at most (\d+) tokens", re.I)
NO_CREDIT = "the account has no credit left; add some, or choose another provider with -p"
NO_MODEL = "choose another one with -m; {base_url}/models lists what there is"
USUAL_ATTEMPTS = {"server": 5, "network": 5, "rate_limit": 5}          # of other kinds, one
FAULTS = (   # status, what the text says, kind, hint; attempts and delay where they are not usual
    ("413|429", r"request too large", "overflow", ""),
    ("413", r"", "overflow", ""),
    ("400", r"^\s*$", "overflow", ""),                                  # Cerebras
    ("400|404|422|5..", OVERFLOW, "overflow", ""),
    ("402", r"", "auth", NO_CREDIT),
    ("429", r"insufficient_quota|insufficient balance", "auth", NO_CREDIT),
    ("400", r"credit balance", "auth", NO_CREDIT),
    ("403", r"error code: 1010", "auth",
     f"the site refuses this program by its User-Agent ({USER_AGENT}), not by the key"),
    ("401|403", r"", "auth", "check the key in {key_env}"),
    ("429", r"per.day|daily", "rate_limit",
     "the day's quota is used up; choose another model or provider", 1),
    ("429", r"", "rate_limit", ""),
    ("400", r"tool_use_failed", "invalid_request",
     "the model writes calls that the server cannot read; another model may do better", 3, 0),
    ("400", r"DEGRADED function", "server", ""),
    ("500|503", r"ResourceExhausted|total request limit", "rate_limit", ""),
    ("503", r"loading", "server", "", 5, 15),
    ("408", r"", "network", ""),
    ("5..|498", r"", "server", ""),
    ("400|404", r"support tools?\b", "invalid_request",
     "choose a model that can use tools with -m"),
    ("404", r"data policy", "invalid_request",
     "the account's privacy settings exclude every host of this model"),
    ("404", r"model|function", "invalid_request", NO_MODEL),
    ("404", r"", "invalid_request",
     "check the base URL {base_url}; it must end before /chat/completions or /messages"),
    ("...", r"", "invalid_request", ""),
)
STATUS_OF_NAME = {   # for errors inside an answer with status 200, where no number is given
    "insufficient_quota": 402, "billing": 402, "rate_limit": 429, "resource_exhausted": 429,
    "overloaded": 529, "authentication": 401, "invalid_api_key": 401, "permission": 403,
    "not_found": 404, "too_large": 413, "tool_use_failed": 400, "exceed_context": 400,
    "context_length": 400, "invalid_request": 400}


def read_fault(body: str | dict | list) -> tuple[str, str]:
    """(what the person may read, what only the table reads) of an error body of any shape."""
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            return brief(body, 1000), ""
    if isinstance(body, list):
        body = body[0] if body else {}
    if not isinstance(body, dict):
        return str(body), ""
    inner = body.get("error")
    about = inner if isinstance(inner, dict) else body
    message = inner if isinstance(inner, str) else about.get("message") or about.get("detail") \
        or about.get("title") or ""
    if isinstance(message, list):            # FastAPI: where, and what is wrong there
        message = "; ".join(" ".join(map(str, [*m.get("loc", ()), m.get("msg", m)]))
                            if isinstance(m, dict) else str(m) for m in message)
    elif not isinstance(message, str) or not message:
        message = json.dumps(message or body)
    codes = " ".join(str(about[k]) for k in ("code", "type", "status", "status_code", "param")
                     if about.get(k) is not None)
    codes += " ".join(re.findall(r"'type': '(\w+)'", str(about.get("detail"))))
    cause = about.get("metadata") if isinstance(about.get("metadata"), dict) else {}
    if cause.get("raw"):                        # OpenRouter: what the host behind it said
        deeper, more = read_fault(cause["raw"])
        message, codes = f"{message}: {deeper}", f"{codes} {more}"
    return message, codes


def refusal(status: int, body: str | dict, headers=None, **names: str) -> ProviderError:
    """The error that an answer means. `names` fill the hints: key_env, base_url, model, name."""
    headers = {} if headers is None else headers
    message, codes = read_fault(body)
    if status == 200:
        number = re.search(r"\b[45]\d\d\b", codes)
        named = [code for name, code in STATUS_OF_NAME.items() if name in codes.lower()]
        status = int(number[0]) if number else named[0] if named else 500
    if 300 <= status < 400:
        return ProviderError("invalid_request", f"the server redirects (status {status})",
                             f"it points to {headers.get('Location') or 'nowhere'}; a redirect is "
                             "not followed: use its address as base URL if you trust it")
    kind, hint, *special = next(row[2:] for row in FAULTS if re.fullmatch(row[0], str(status))
                                and re.search(row[1], f"{codes} {message}", re.I))
    attempts, delay = [*special, USUAL_ATTEMPTS.get(kind, 1)][0], (special[1:] or [None])[0]
    asked = wait_asked_for(headers, body, message)
    delay = asked if asked is not None else delay
    wanted = headers.get("x-should-retry", "").lower()
    attempts = {"true": max(attempts, 5), "false": 1}.get(wanted, attempts)
    if kind == "invalid_request" and hint == NO_MODEL and names.get("name") == "ollama":
        hint = "`ollama pull {model}` fetches it"
    window = WINDOW.search(f"{message} {body}") if kind == "overflow" else None
    error = ProviderError(
        kind, message if str(status) in message else
        f"{message.strip('{} ') or 'refused'} (status {status})",
        hint.format(**names), attempts=attempts, delay=delay,
        window=int(next(filter(None, window.groups()))) if window else None)
    error.details = f"{codes} {message}"
    return error


UNITS = {"h": 3600, "m": 60, "s": 1, "ms": 0.001, "": 1}     # in seconds


def seconds_of(text: str) -> float | None:
    """"1m2.5s", "260ms", "34s" or a bare number of seconds; None if it is none of these."""
    parts = re.findall(r"([\d.]+)(h|ms?|s|$)", text.strip())
    if "".join(number + unit for number, unit in parts) == text.strip() != "":
        with contextlib.suppress(ValueError):
            return round(sum(float(number) * UNITS[unit] for number, unit in parts), 3)
    return None


def wait_asked_for(headers, body: str | dict, message: str) -> float | None:
    """How many seconds a server asks to wait; None if it says nothing usable."""
    from email.utils import formatdate, parsedate_to_datetime
    found = [seconds_of(headers.get("retry-after-ms", "") + "ms"),
             seconds_of(headers.get("Retry-After", ""))]
    with contextlib.suppress(ValueError, TypeError):
        now = parsedate_to_datetime(headers.get("Date") or formatdate(usegmt=True))
        found.append((parsedate_to_datetime(headers.get("Retry-After")) - now).total_seconds())
    text = (body if isinstance(body, str) else json.dumps(body)).replace("\\", "")
    for where, pattern in (
            (text, r'"retryDelay":\s*"([^"]+)"'),
            (message, r"(?:try again|retry) (?:in|after) ((?:\d+h)?(?:\d+m)?[\d.]+ ?m?s)")):
        if asked := re.search(pattern, where, re.I):
            found.append(seconds_of(asked[1].replace(" ", "")))
    if reset := re.search(r'"X-RateLimit-Reset":\s*"?(\d{12,})',
                          f'{text} "X-RateLimit-Reset":{headers.get("X-RateLimit-Reset")}', re.I):
        found.append(int(reset[1]) / 1000 - time.time())
    for what in ("tokens", "requests"):
        if headers.get(f"x-ratelimit-remaining-{what}") == "0":
            found.append(seconds_of(headers.get(f"x-ratelimit-reset-{what}", "")))
    return next((seconds for seconds in found if seconds and 0 < seconds < 1e7), None)


# ─── Providers ───────────────────────────────────────────────────────────────────────────────────
# The port: `stream(system, messages, tools, abort)` yields text_delta, thinking_delta and
# toolcall_* events and ends in exactly one Done or Failed. Two wire formats fill it, each a pair
# of pure translators around one request path; a scripted provider plays a part without a network.
# What differs between hosts of a format is data: a line in PROVIDERS. Left out: images, logprobs.

@dataclass(frozen=True)
class Done:
    """The end of a stream: the whole message."""
    message: AssistantMessage


@dataclass(frozen=True)
class Failed:
    """The other end of a stream: why, and what there is of the message."""
    error: ProviderError
    message: AssistantMessage


def own_id() -> str:
    """A new id of nine letters and digits, which every provider accepts (Mistral no other)."""
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9))


def short_id(text: str) -> str:
    """Always the same nine letters and digits for the same id."""
    import hashlib
    return text if re.fullmatch("[A-Za-z0-9]{9}", text) else hashlib.sha256(
        text.encode("utf-8", "replace")).hexdigest()[:9]


def known_name(name: str, names: Iterable[str]) -> str:
    """The tool that a model means by a name with leaked tokens, a prefix or other letter case."""
    name = name.partition("<|")[0].strip()
    for guess in (name, *reversed(re.split(r"[.:/]", name))):
        found = [known for known in names if known.casefold() == guess.casefold()]
        if guess in names or len(found) == 1:
            return guess if guess in names else found[0]
    return name


def parse_arguments(text: str) -> dict | None:
    """The arguments of a call; None if the text is no JSON object, however it may look.

    No text and `null` are an object without members; a text inside a text is unpacked once.
    """
    try:
        value = json.loads(text.strip() or "{}", strict=False)
        value = json.loads(value, strict=False) if isinstance(value, str) else value
        json.dumps(value, allow_nan=False)           # NaN and infinity are not JSON
    except (ValueError, RecursionError):
        return None
    return {} if value is None else value if isinstance(value, dict) else None


# Small models write calls as text. These are the ways in which they do.
CALL_TEXT = re.compile(r"""\s*(?:
    <tool_call>\s*(?P<tagged>\{.*?\})\s*</tool_call>
  | (?:<tool_call>\s*)?<function=(?P<name>[\w.-]+)>(?P<parameters>.*?)</function>
    (?:\s*</tool_call>)?
  | (?:<\|start\|>)?(?:assistant)?(?:<\|channel\|>)?(?:\w+)?\s*to=(?P<harmony>[\w.]+)
    [^{]*?<\|message\|>(?P<body>\{.*?\})\s*(?:<\|call\|>|<\|end\|>|\Z)
  | ```(?:json|tool_call)?\s*(?P<fenced>\{.*?\})\s*```
  | (?P<bare>\{.*\})
  )\s*""", re.S | re.X)
CALL_START = re.compile(r"<tool_call>|<function=|<\|start\|>|<\|channel\|>|"
                        r"```(?:json|tool_call)?\s*\{|\A\s*(?:\{|(?:commentary )?to=functions)")
WHOLE_CALLS = ("{", "```json", "```tool_call", "to=functions", "commentary to=functions")
MAY_OPEN = re.compile(r"<tool_call>|<function=|<\|\w|</think>|<[\w/|]{0,11}\Z")


def calls_in_text(text: str, names: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """(the text before, [(name, arguments as JSON)]) if calls of known tools end the text."""
    for start in itertools.islice(CALL_START.finditer(text), 100):
        calls, place = [], start.start()
        while place < len(text) and (found := CALL_TEXT.match(text, place)):
            name, arguments = found["name"] or found["harmony"], found["body"] or ""
            if written := found["tagged"] or found["fenced"] or found["bare"]:
                call = parse_arguments(written) or {}
                name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            elif found["name"]:
                pairs = re.findall(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>",
                                   found["parameters"], re.S)
                arguments = json.dumps(dict(pairs)) if pairs else found["parameters"]
            if not isinstance(name, str) or known_name(name, names) not in names:
                break
            calls.append((known_name(name, names), arguments))
            place = found.end()
        if calls and place == len(text):
            return text[:start.start()].rstrip(), calls
    return text, []


class Pending:
    """A tool call in the making."""

    def __init__(self, id: str, given: str):
        self.id, self.given = id, given              # `given` by the provider; "" until it does
        self.name, self.arguments, self.place = "", "", "new"       # new, started, ended


class Reply:
    """An assistant message in the making: takes its pieces as they come, yields their events."""

    def __init__(self, provider: "Provider", tools: list[dict], messages: list[Message]):
        self.provider, self.names = provider, [schema["name"] for schema in tools]
        self.taken = {c.id for m in messages if isinstance(m, AssistantMessage)
                      for c in m.tool_calls}
        self.text, self.thought = "", 0              # all that came; how much of its <think> is out
        self.content, self.sent, self.thinking = "", 0, ""
        self.calls: list[Pending] = []
        self.by_index: dict[object, Pending] = {}
        self.usage: dict = {}
        self.data: dict = {}                         # what must go back to this provider
        self.finish, self.ended = "", False          # the finish reason; is the message whole?

    def add_text(self, piece: str, last: bool = False) -> Iterator[Event]:
        """Content. A <think> at its start opens a thought; elsewhere it is text."""
        self.text += piece
        self.content, start = self.text, self.text.lstrip()
        if start.startswith("<think>"):
            thought, end, rest = start[7:].partition("</think>")
            thought, self.content = thought.lstrip(), rest.lstrip()
            whole = end or last             # else its end may be the beginning of the closing tag
            held = "" if whole else re.search(r"(<[/a-z]{0,7})?\Z", thought[-8:])[0]
            cut = len(thought) - len(held)
            yield from self.add_thinking(thought[self.thought:cut])
            self.thought = cut
        if last or not "<think>".startswith(start):
            yield from self.send(self.settled())

    def settled(self) -> int:
        """How far the content can be shown: not past what may turn out to be a call or a tag."""
        start = self.content.lstrip()
        if self.names and any(mark.startswith(start[:len(mark)]) for mark in WHOLE_CALLS):
            return 0
        found = MAY_OPEN.search(self.content, self.sent)
        return found.start() if found else len(self.content)

    def send(self, end: int) -> Iterator[Event]:
        if end > self.sent:
            start, self.sent = self.sent, end
            yield TextDelta(self.content[start:end])

    def add_thinking(self, piece: str) -> Iterator[Event]:
        if piece:
            self.thinking += piece
            yield ThinkingDelta(piece)

    def add_call(self, index: object = None, id: str = "", name: str = "", arguments: object = "",
                 extra: object = None) -> Iterator[Event]:
        """A piece of a call. Which call: that of its index, unless another id comes with it; else
        that of its id; else the last one."""
        if index is None:
            index = self.index_of(id, name)
        call = self.by_index.get(index)
        if call is None or id and call.given and id != call.given:
            call = Pending(own_id() if not id or id in self.taken else id, id)
            self.taken.add(call.id)
            self.calls.append(call)
            self.by_index.pop(index, None)           # so that the newest is the last
            self.by_index[index] = call
        call.given = call.given or id
        if name and (not call.name or call.name != name and self.begins(call.name + name)):
            call.name += name
        if extra:
            self.data.setdefault("extra_content", {})[call.id] = extra
        piece = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if piece and piece != "null":
            call.arguments += piece
            if call.name:
                yield from self.tell(call)
                yield ToolcallDelta(call.id, known_name(call.name, self.names), piece)

    def begins(self, name: str) -> bool:
        """Is it the beginning of a tool's name?"""
        return any(known.startswith(name) for known in self.names)

    def index_of(self, id: str, name: str) -> object:
        """The index for a piece that has none: a known id's, the last, or a new one if a name
        comes that cannot belong to that call any more."""
        by_id = {call.given: index for index, call in self.by_index.items()}
        index = by_id.get(id, id) if id else next(reversed(self.by_index), None)
        call = self.by_index.get(index)
        if call is None:
            return index if id else len(self.calls)
        whole = call.arguments and parse_arguments(call.arguments) is not None
        other = name and call.name and (whole if name == call.name else
                                        not self.begins(call.name + name))
        return f"new {len(self.calls)}" if other else index

    def tell(self, call: Pending) -> Iterator[Event]:
        if call.place == "new":
            call.place = "started"
            yield ToolcallStart(call.id, known_name(call.name, self.names))

    def end_calls(self) -> Iterator[Event]:
        for call in self.calls:
            if call.place == "started":
                call.place = "ended"
                yield ToolcallEnd(self.whole(call))

    def add_usage(self, usage: object) -> None:
        """Counts; the last one of each wins."""
        if isinstance(usage, dict):
            self.usage.update({k: v for k, v in usage.items() if v is not None})

    def end(self) -> Iterator[Event]:
        """What was held back, calls written as text, and the ends of the calls.

        Raises ProviderError for a reply that is no success: refused, broken off, empty.
        """
        yield from self.add_text("", last=True)
        lost = re.match(r"((?:(?!<think>).)*?)(?:\n</think>\s*|</think>\s*\n\s*)(.*)",
                        self.content, re.S)
        if lost and not self.thinking:               # the opening tag was in the prompt
            self.thinking, self.content, self.sent = lost[1].strip(), lost[2], 0
        if self.finish in BROKEN_FINISH:
            kind, message, attempts = BROKEN_FINISH[self.finish]
            raise ProviderError(kind, message, attempts=attempts)
        if self.names and not self.calls and FINISH.get(self.finish) != "length":
            self.content, written = calls_in_text(self.content, self.names)
            for number, (name, arguments) in enumerate(written):
                yield from self.add_call(f"text {number}", "", name, arguments)
        yield from self.send(len(self.content))
        for call in self.calls:
            call.name = known_name(call.name, self.names)
        self.calls = [call for call in self.calls if call.name]
        for call in self.calls:
            yield from self.tell(call)
        yield from self.end_calls()
        if not self.content.strip() and not self.calls and FINISH.get(self.finish) != "length":
            raise ProviderError("server", "the reply is empty: no text and no tool call",
                                "send the message again, or choose another model", attempts=2)

    def whole(self, call: Pending) -> ToolCall:
        arguments = parse_arguments(call.arguments)
        return ToolCall(call.id, call.name, arguments,
                        call.arguments if arguments is None else None)

    def message(self, stop_reason: str = "", error: str | None = None) -> AssistantMessage:
        """The message as far as it has come."""
        calls = tuple(self.whole(call) for call in self.calls if call.name)
        own = FINISH.get(self.finish, "tool_use" if calls else "stop")
        return AssistantMessage(
            self.content, calls, self.thinking, stop_reason or own, error, usage_of(self.usage),
            self.provider.name, self.provider.model,
            {self.provider.name: self.data} if self.data else {})


FINISH = {"length": "length", "model_length": "length", "max_tokens": "length"}
BROKEN_FINISH = {       # kind, message, attempts
    "content_filter": ("invalid_request", "the provider's filter stopped the answer", 1),
    "refusal": ("invalid_request", "the model refused to answer (refusal)", 1),
    "sensitive": ("invalid_request", "the provider's filter stopped the answer", 1),
    "error": ("server", "the provider broke the answer off", 5),
    "abort": ("server", "the provider broke the answer off", 5),
    "network_error": ("network", "the provider lost its connection", 5),
    "insufficient_system_resource": ("server", "the provider ran out of resources", 5),
    "model_context_window_exceeded": ("overflow", "the context window is exceeded", 1),
}


def usage_of(counts: dict) -> Usage | None:
    """The counts of any known provider as Usage; None if there are none."""
    def first(*names: str) -> int:
        found = [counts.get(name) for name in names]
        return next((n for n in found if isinstance(n, int) and n >= 0), 0)
    if not counts:
        return None
    details = counts.get("prompt_tokens_details")
    cached = first("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        cached = details["cached_tokens"]
    asked = first("prompt_tokens", "input_tokens")
    if "prompt_tokens" not in counts:       # Anthropic counts what came from its cache apart
        asked += first("cache_read_input_tokens") + first("cache_creation_input_tokens")
    cost = counts.get("cost")
    return Usage(asked, first("completion_tokens", "output_tokens"), cached,
                 cost if isinstance(cost, (int, float)) else None)


THINKING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")


def to_openai(system: str, messages: list[Message], tools: list[dict],
              provider: "Provider") -> dict:
    """The body of a chat completions request."""
    habits = provider.habits
    longest = 0 if habits.get("short_ids") else 40           # OpenAI takes 40 characters

    def the_id(text: str) -> str:
        return short_id(text) if len(text) > longest else text
    sent: list[dict] = [{"role": "system", "content": system}]
    for message in messages:
        if isinstance(message, UserMessage):
            if sent[-1]["role"] == "tool" and habits.get("answers_tools"):
                sent.append({"role": "assistant", "content": "(stopped)"})
            sent.append({"role": "user", "content": message.content})
        elif isinstance(message, ToolResultMessage):
            sent.append({"role": "tool", "tool_call_id": the_id(message.tool_call_id),
                         "content": message.content or "(no output)"})
        else:
            sent.append(_assistant_to_openai(message, provider, the_id))
    body = {"model": provider.model, "messages": sent, "stream": True,
            "stream_options": {"include_usage": True}, **habits.get("extra", {})}
    if tools:
        body["tools"] = [{"type": "function", "function": schema} for schema in tools]
    for old, new in habits.get("rename", {}).items():
        if old in body:
            body[new] = body[old]
    calls = (call for message in sent for call in message.get("tool_calls", ()))
    for part in (body, *sent, *calls):
        for name in habits.get("drop", ()):
            part.pop(name, None)
    return body


def _assistant_to_openai(message: AssistantMessage, provider: "Provider", the_id: Callable) -> dict:
    own = own_data(message, provider)
    sent: dict = {"role": "assistant", "content": message.content or None}
    if own.get("thinking_field"):
        sent[own["thinking_field"]] = message.thinking
    elif message.tool_calls and provider.habits.get("needs_reasoning"):
        sent["reasoning_content"] = ""
    if own.get("reasoning_details"):
        sent["reasoning_details"] = own["reasoning_details"]
    extra = own.get("extra_content", {})
    calls = [{"id": the_id(call.id), "type": "function",
              "function": {"name": wire_name(call.name),
                           "arguments": json.dumps(call.arguments or {})},
              **({"extra_content": extra[call.id]} if call.id in extra else {})}
             for call in message.tool_calls]
    return {**sent, "tool_calls": calls} if calls else sent


def wire_name(name: str) -> str:
    """A tool's name in the characters that every host takes; a model may have made it up."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]


def own_data(message: AssistantMessage, provider: "Provider") -> dict:
    """What a message holds for this provider and model; nothing of what is another's."""
    if (message.provider, message.model) != (provider.name, provider.model):
        return {}
    return message.provider_data.get(provider.name, {})


def from_openai(chunk: dict, reply: Reply) -> Iterator[Event]:
    """Feeds one chunk (or one whole completion) to the reply. Only the first choice counts."""
    for choice in chunk.get("choices") or ():
        if choice.get("index"):
            continue
        delta = choice.get("delta") or choice.get("message") or {}
        reply.add_usage(choice.get("usage"))
        name, thought = next(((k, delta[k]) for k in THINKING_FIELDS if delta.get(k)), ("", ""))
        if isinstance(thought, dict):
            thought = thought.get("text") or ""
        elif thought:
            reply.data["thinking_field"] = name
        yield from reply.add_thinking(thought)
        for detail in delta.get("reasoning_details") or ():
            add_detail(reply.data.setdefault("reasoning_details", []), detail)
        content = delta.get("content") or ()
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                yield from reply.add_text(part)
            elif part.get("type") == "thinking":
                for piece in part.get("thinking") or ():
                    yield from reply.add_thinking(piece if isinstance(piece, str)
                                                  else piece.get("text") or "")
            else:
                yield from reply.add_text(part.get("text") or "")
        if delta.get("refusal"):
            yield from reply.add_text(delta["refusal"])
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function = call.get("function") or {}
            index = call.get("index") if "delta" in choice else number
            yield from reply.add_call(index, str(call.get("id") or ""),
                                      function.get("name") or "", function.get("arguments") or "",
                                      call.get("extra_content"))
        old = delta.get("function_call") or {}
        if old.get("name") or old.get("arguments"):
            yield from reply.add_call(0, "", old.get("name") or "", old.get("arguments") or "")
        if choice.get("finish_reason"):
            reply.finish, reply.ended = str(choice["finish_reason"]).lower(), True


def add_detail(details: list[dict], piece: dict) -> None:
    """Joins pieces of one reasoning detail: texts are put together, other fields replaced."""
    last = details[-1] if details else {}
    same = piece.get("index") is not None and last.get("index") == piece["index"]
    if not same or last.get("type") != piece.get("type"):
        details.append(dict(piece))
        return
    for name, value in piece.items():
        joined = name in ("text", "summary", "data") and isinstance(last.get(name), str)
        last[name] = last[name] + (value or "") if joined else value


def to_anthropic(system: str, messages: list[Message], tools: list[dict],
                 provider: "Provider") -> dict:
    """The body of a messages request. Marks for the cache: after tools and system, at the end."""
    mark = {"cache_control": {"type": "ephemeral"}}
    sent: list[dict] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            role, blocks = "assistant", list(own_data(message, provider).get("thinking", ()))
            if message.content.strip():
                blocks.append({"type": "text", "text": message.content})
            blocks += [{"type": "tool_use", "id": re.sub(r"[^\w-]", "_", call.id),
                        "name": wire_name(call.name), "input": call.arguments or {}}
                       for call in message.tool_calls]
        elif isinstance(message, ToolResultMessage):
            role, blocks = "user", [{
                "type": "tool_result", "tool_use_id": re.sub(r"[^\w-]", "_", message.tool_call_id),
                "content": message.content or "(no output)", "is_error": message.is_error}]
        else:
            role, blocks = "user", [{"type": "text", "text": message.content}]
        if sent and sent[-1]["role"] == role:
            sent[-1]["content"] += blocks
        else:
            sent.append({"role": role, "content": blocks})
    if sent and sent[-1]["content"]:
        sent[-1]["content"][-1] = {**sent[-1]["content"][-1], **mark}
    body = {"model": provider.model, "max_tokens": 8192, "stream": True, "messages": sent,
            "system": [{"type": "text", "text": system, **mark}],
            **provider.habits.get("extra", {})}
    if tools:
        body["tools"] = [{"name": schema["name"], "description": schema["description"],
                          "input_schema": schema["parameters"]} for schema in tools]
    for name in provider.habits.get("drop", ()):
        body.pop(name, None)
    return body


def from_anthropic(data: dict, reply: Reply) -> Iterator[Event]:
    """Feeds one event (or one whole message) to the reply. It is whole only at message_stop."""
    index, thoughts = data.get("index", 0), reply.data.get("thinking", [])
    part = data.get("content_block") or data.get("delta") or {}
    match data.get("type"), part.get("type"):
        case "message_start", _:
            reply.add_usage(data["message"].get("usage"))
        case "message", _:
            for number, block in enumerate(data.get("content") or ()):
                yield from from_anthropic({"type": "content_block_start", "index": number,
                                           "content_block": block}, reply)
            reply.finish = data.get("stop_reason") or ""
        case "content_block_start", "tool_use":
            yield from reply.add_call(index, part["id"], part["name"], part.get("input") or "")
        case "content_block_start", "text":
            yield from reply.add_text(part.get("text") or "")
        case "content_block_start", "thinking" | "redacted_thinking":
            reply.data["thinking"] = [*thoughts, dict(part)]
            yield from reply.add_thinking(part.get("thinking") or "")
        case "content_block_delta", "text_delta":
            yield from reply.add_text(part["text"])
        case "content_block_delta", "input_json_delta":
            yield from reply.add_call(index, arguments=part["partial_json"])
        case "content_block_delta", "thinking_delta":
            thoughts[-1]["thinking"] += part["thinking"]
            yield from reply.add_thinking(part["thinking"])
        case "content_block_delta", "signature_delta":
            thoughts[-1]["signature"] = part["signature"]
        case "content_block_start" | "content_block_delta", None:
            raise KeyError("type")
        case "message_delta", _:
            reply.finish = data["delta"].get("stop_reason") or reply.finish
        case "message_stop", _:
            reply.ended = True


class Provider:
    """A host of chat completions: `Provider("groq", base_url, model, "GROQ_API_KEY")`.

    `habits` are what is particular to it: `short_ids` (only ids of nine letters and digits),
    `needs_reasoning` (a reasoning field on every message with calls), `answers_tools` (results are
    followed by an assistant message), `extra` (more fields of the request), `drop` and `rename`
    (fields that it refuses), `windows` (where it tells context lengths). A refusal that names the
    habit to change changes it, for as long as the object lives.
    """
    path = "/chat/completions"
    to_wire, from_wire = staticmethod(to_openai), staticmethod(from_openai)
    needed = {"model", "messages", "stream", "tools", "role", "content", "tool_calls",
              "tool_call_id"}

    def __init__(self, name: str, base_url: str, model: str, key_env: str | None = None,
                 **habits: object):
        self.name, self.base_url, self.model, self.key_env = name, base_url, model, key_env
        self.habits: dict = habits
        self.window: int | None = None       # context length in tokens, once it is known

    def using(self, model: str = "", base_url: str = "") -> "Provider":
        """The same provider with another model or address."""
        other = copy.copy(self)
        other.habits = dict(self.habits)
        other.model, other.base_url = model or self.model, (base_url or self.base_url).rstrip("/")
        return other

    def has_own_address(self) -> bool:
        """Is its address another than the one of this name in PROVIDERS?"""
        listed = PROVIDERS.get(self.name)
        return bool(self.base_url) and (listed is None or listed.base_url != self.base_url)

    def key(self) -> str:
        """The key, from the environment; "" if there is none."""
        key = os.environ.get(self.key_env or "", "").strip()
        if len(key) >= 6:
            SECRETS.add(key)
        return key

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key()}"} if self.key() else {}

    def stream(self, system: str, messages: list[Message], tools: list[dict],
               abort: Abort | None = None) -> Iterator[Event | Done | Failed]:
        """Sends one request and yields what comes: deltas, then one Done or one Failed."""
        reply = Reply(self, tools, messages)
        try:
            body = self.to_wire(system, messages, tools, self)
            yield from self.converse(body, reply, abort or Abort())
            yield from reply.end()
            yield Done(reply.message())
        except (ProviderError, KeyboardInterrupt) as problem:
            error = problem if isinstance(problem, ProviderError) else \
                ProviderError("aborted", "stopped")
            self.window = error.window or self.window
            if error.attempts == 1 and error.kind == "invalid_request" \
                    and self.learn(error.details, body) \
                    and self.to_wire(system, messages, tools, self) != body:
                error.attempts, error.delay = 5, 0
            ended = "aborted" if error.kind == "aborted" else "error"
            yield from reply.end_calls()
            yield Failed(error, reply.message(ended, error.message))

    def converse(self, body: dict, reply: Reply, abort: Abort) -> Iterator[Event]:
        """Sends the body and feeds what comes to the reply, until that is whole."""
        with self.request("POST", self.base_url + self.path, body, abort) as answer:
            if answer.status != 200:
                raise self.refused(answer.status, answer.text(), answer.headers)
            try:
                for data in json_events(answer.chunks()):
                    answer.last_event = time.monotonic()
                    if data is DONE:
                        reply.ended = True
                        return
                    yield from self.take(data, reply)
                    if reply.ended:
                        answer.event_patience = PATIENCE["end"]
            except ProviderError as error:
                if not reply.ended or error.kind != "network":
                    raise
        if not reply.ended:
            raise ProviderError("network", "the answer ended before it was complete",
                                "try again; if it stays so, check the base URL", attempts=5)

    def request(self, method: str, url: str, body: dict | None, abort: Abort):
        """A request to this provider. Raises ProviderError for a key that cannot be sent."""
        headers = {"User-Agent": USER_AGENT, "Accept": "text/event-stream, application/json",
                   "Content-Type": "application/json", **self.headers()}
        if not all(v.isascii() and v.isprintable() for v in headers.values()):
            raise ProviderError("auth", f"the value of {self.key_env} is not a key",
                                "it holds characters that no key has")
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") if body else None
        return request(method, url, headers, data, abort)

    def refused(self, status: int, body: str | dict, headers=None) -> ProviderError:
        return refusal(status, body, headers, name=self.name, model=self.model,
                       base_url=self.base_url, key_env=self.key_env or "AGENT_API_KEY")

    def take(self, data: dict, reply: Reply) -> Iterator[Event]:
        """Feeds one object to the reply. Raises ProviderError if it tells of an error."""
        groq = data.get("x_groq") if isinstance(data.get("x_groq"), dict) else {}
        if data.get("error") or groq.get("error") or "error" in (data.get("object"),
                                                                 data.get("type")):
            raise self.refused(200, {"error": groq["error"]} if groq.get("error") else data)
        try:
            reply.add_usage(data.get("usage") or groq.get("usage"))
            yield from self.from_wire(data, reply)
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as problem:
            # A server may send anything; what the translator cannot read is the server's fault.
            raise ProviderError("network", "the answer has a shape that no provider is known for: "
                                f"{type(problem).__name__} in {brief(json.dumps(data), 80)}",
                                attempts=5) from problem

    def find_window(self, abort: Abort) -> int | None:
        """The context length in tokens, from where this host tells it; None if it does not."""
        url = self.base_url + "/models"
        if "windows" in self.habits:
            url = self.base_url.removesuffix("/v1") + self.habits["windows"]
        with contextlib.suppress(ProviderError, ValueError, AttributeError, TypeError):
            with self.request("GET", url, None, abort) as answer:
                if answer.status == 200:
                    self.window = window_in(json.loads(answer.text()), self.model) or self.window
        return self.window

    def learn(self, text: str, body: dict) -> bool:
        """Changes the habit that a refusal of this body names. False if it names none."""
        sent = {*body, *(name for message in body["messages"] for name in message)}
        named = [name for name in sent - self.needed if re.search(rf"\b{name}\b", text)]
        if named and REFUSES.search(text):
            better = re.search(r"use ['\"`]?(\w+)['\"`]? instead", text, re.I)
            if better:
                named = [name for name in named if name != better[1]]
                self.habits["rename"] = {**self.habits.get("rename", {}),
                                         **dict.fromkeys(named, better[1])}
            self.habits["drop"] = {*self.habits.get("drop", ()), *named}
        elif re.search(r"reasoning_content.*(missing|must be passed)|missing .?reasoning_content",
                       text, re.I):
            self.habits["needs_reasoning"] = True
        elif re.search(r"tool call id .* must be", text, re.I):
            self.habits["short_ids"] = True
        else:
            return False
        return True


REFUSES = re.compile(r"un(supported|recognized|known|expected)|not? (be )?(supported|permitted|"
                     r"allowed|accepted)|extra|forbidden|additional propert", re.I)
WINDOW_FIELDS = ("loaded_context_length", "context_window", "max_model_len", "context_length",
                 "max_context_length")


def window_in(body: dict | list, model: str) -> int | None:
    """The context length of a model in a list of models, or in what describes one."""
    if isinstance(body, dict) and "model_info" in body:        # Ollama's /api/show; its default
        found = re.search(r"num_ctx\s+(\d+)", body.get("parameters") or "")
        return int(found[1]) if found else 4096
    listed = body if isinstance(body, list) else body.get("data") or body.get("models") or ()
    entry = next((e for e in listed if model in (e.get("id"), e.get("name"), e.get("model"))), {})
    sizes = [next((entry[name] for name in WINDOW_FIELDS if entry.get(name)), None),
             (entry.get("top_provider") or {}).get("context_length")]
    return min((size for size in sizes if isinstance(size, int)), default=None)


class Anthropic(Provider):
    """A host of Anthropic messages."""
    path = "/messages"
    to_wire, from_wire = staticmethod(to_anthropic), staticmethod(from_anthropic)
    needed = Provider.needed | {"system", "max_tokens"}

    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.key(), "anthropic-version": "2023-06-01"}


# ── A provider without a network

class ScriptedProvider(Provider):
    """Plays replies from a list, or from one function (messages, tools) -> reply.

    A reply is a text, a list of calls (a ToolCall or a pair of name and arguments), a whole
    AssistantMessage, a ProviderError, a Failed, or a function like the one above. `requests`
    holds what was asked, for tests.
    """

    def __init__(self, replies: Iterable | Callable, name: str = "scripted",
                 model: str = "scripted"):
        super().__init__(name, "", model)
        self.replies = replies if callable(replies) else iter(replies)
        self.requests: list[dict] = []

    def stream(self, system: str, messages: list[Message], tools: list[dict],
               abort: Abort | None = None) -> Iterator[Event | Done | Failed]:
        self.requests.append({"system": system, "messages": list(messages), "tools": tools})
        reply = self.replies if callable(self.replies) else next(self.replies, ProviderError(
            "invalid_request", "the script is over", "give the ScriptedProvider more replies"))
        reply = reply(messages, tools) if callable(reply) else reply
        if isinstance(reply, ProviderError):
            reply = Failed(reply, AssistantMessage(stop_reason="error", error_message=str(reply)))
        elif not isinstance(reply, Failed):
            reply = Done(self.as_message(reply))
        message = replace(reply.message, provider=self.name, model=self.model)
        if message.thinking:
            yield ThinkingDelta(message.thinking)
        for piece in re.findall(r"\s*\S+\s*\Z|\s*\S+", message.content):
            yield TextDelta(piece)
        for call in message.tool_calls:
            yield ToolcallStart(call.id, call.name)
            yield ToolcallDelta(call.id, call.name, json.dumps(call.arguments))
            yield ToolcallEnd(call)
        yield replace(reply, message=message)

    @staticmethod
    def as_message(reply: str | list | AssistantMessage) -> AssistantMessage:
        if isinstance(reply, AssistantMessage):
            return reply
        if isinstance(reply, str):
            return AssistantMessage(reply)
        calls = tuple(c if isinstance(c, ToolCall) else ToolCall(own_id(), *c) for c in reply)
        return AssistantMessage(tool_calls=calls, stop_reason="tool_use")


# The demo model: what it can do, as a list of (a pattern for the task, a generator). It gets the
# match, yields a call, gets what came of it, and returns the answer. Like any model it remembers
# nothing: for each request it begins anew and is sent the results so far.

FIBONACCI = '''"""Prints the first {n} Fibonacci numbers."""

a, b = 0, 1
for _ in range({n}):
    print(a)
    a, b = b, a + b
'''
DEMO_SUMMARY = """## Goal
See the messages that were kept. A scripted model cannot summarise; it only shows how it is done."""
DEMO_HELP = """I am a scripted model, here to show the program at work without a key. I can

- create fib.py that prints the first 10 Fibonacci numbers, then run it
- read FILE
- count the lines of FILE
- find where NAME is defined
- run COMMAND

For anything else choose a real model: set a key such as GROQ_API_KEY in the environment or in
.env, or start Ollama; or name one with -p."""


def demo_fibonacci(task: re.Match) -> Generator:
    path, count = task["path"], int(task["count"] or 10)
    yield "write_file", {"path": path, "content": FIBONACCI.format(n=count)}
    printed = yield "shell", {"command": f"python3 {path}"}
    return f"I wrote {path} and ran it. It prints:\n\n{printed.partition(chr(10))[2]}"


def demo_read(task: re.Match) -> Generator:
    text = yield "read_file", {"path": task["path"]}
    first = [line.partition("\t")[2] for line in text.splitlines()[:12]]
    return f"{task['path']} begins like this:\n\n" + "\n".join(first).rstrip()


def demo_count(task: re.Match) -> Generator:
    text = yield "read_file", {"path": task["path"], "limit": 1}
    lines = text.splitlines()
    total = re.search(r"lines 1-1 of (\d+)", lines[-1])
    return f"{task['path']} has {total[1] if total else len(lines)} lines."


def demo_find(task: re.Match) -> Generator:
    name = task["name"]
    hits = yield "grep", {"pattern": rf"\b(def|class|function|fn|func)\s+{name}\b|^\s*{name}\s*="}
    hit = re.match(r"(.+?):(\d+):", hits)
    if not hit:
        return f"I found no definition of {name}."
    text = yield "read_file", {"path": hit[1], "offset": int(hit[2]), "limit": 5}
    lines = [line.partition("\t")[2] for line in text.splitlines()[:5]]
    return f"{name} is defined in {hit[1]}, line {hit[2]}:\n\n" + "\n".join(lines).rstrip()


def demo_run(task: re.Match) -> Generator:
    printed = yield "shell", {"command": task["command"]}
    return f"I ran `{task['command']}`:\n\n{printed}"


def demo_summary(task: re.Match) -> Generator:
    yield from ()
    return DEMO_SUMMARY


DEMO = (
    (r"^Do not go on with the task now", demo_summary),
    (r"(?P<path>[\w./-]+\.py)\b.*?(?P<count>\d+)? fibonacci", demo_fibonacci),
    (r"(?:count|how many) .*?lines.*? (?P<path>[\w./-]*\w)\W*$", demo_count),
    (r"where\W+(?:is |are )?(?:the )?(?:function |class )?(?P<name>\w+)\W+.*?defin", demo_find),
    (r"definition of (?P<name>\w+)", demo_find),
    (r"(?:read|show|open|what is in|what's in|say what) (?:me )?(?:the )?(?:file )?"
     r"(?P<path>[\w./-]*\w)", demo_read),
    (r"^run (?:the command )?[`'\"]?(?P<command>.+?)[`'\"]?$", demo_run),
)


def demo_reply(messages: list[Message], tools: list[dict]) -> AssistantMessage | str | list:
    """The demo model's reply to these messages."""
    start = max(i for i, m in enumerate(messages) if isinstance(m, UserMessage))
    results = [m for m in messages[start:] if isinstance(m, ToolResultMessage)]
    task = messages[start].content.split("\n[note ")[0].strip()
    if results and results[-1].is_error:
        return f"That did not work. The tool {results[-1].tool_name} says:\n{results[-1].content}"
    for pattern, part in DEMO if len(task) < 5000 else ():       # the patterns are slow on more
        if found := re.search(pattern, task, re.I):
            steps = part(found)
            try:
                step = next(steps)
                for result in results:
                    step = steps.send(result.content)
            except StopIteration as end:
                return end.value
            if step[0] not in [schema["name"] for schema in tools]:
                return f"I need the tool {step[0]} for that, and it is not offered to me."
            return [step]
    return DEMO_HELP


PROVIDERS: dict[str, Provider] = {offered.name: offered for offered in (
    Provider("groq", "https://api.groq.com/openai/v1", "openai/gpt-oss-120b", "GROQ_API_KEY"),
    Provider("openrouter", "https://openrouter.ai/api/v1", "openai/gpt-oss-20b:free",
             "OPENROUTER_API_KEY"),
    Provider("nvidia", "https://integrate.api.nvidia.com/v1", "openai/gpt-oss-120b",
             "NVIDIA_API_KEY"),
    Provider("openai", "https://api.openai.com/v1", "gpt-5-mini", "OPENAI_API_KEY"),
    Anthropic("anthropic", "https://api.anthropic.com/v1", "claude-sonnet-4-5",
              "ANTHROPIC_API_KEY"),
    Provider("gemini", "https://generativelanguage.googleapis.com/v1beta/openai",
             "gemini-2.5-flash", "GEMINI_API_KEY"),
    Provider("deepseek", "https://api.deepseek.com/v1", "deepseek-chat", "DEEPSEEK_API_KEY",
             needs_reasoning=True),
    Provider("mistral", "https://api.mistral.ai/v1", "devstral-medium-latest", "MISTRAL_API_KEY",
             short_ids=True, answers_tools=True),
    Provider("ollama", "http://localhost:11434/v1", "qwen3:4b", windows="/api/ps"),
    ScriptedProvider(demo_reply, name="demo", model="scripted"),
)}


# ─── Tool schemas ────────────────────────────────────────────────────────────────────────────────
# A tool is a function with annotations and a docstring; both are what the model gets to read.
# Models send "5" for 5 and null for nothing: what can only mean one thing is taken so, anything
# else is answered with a sentence that shows the right form. Left out: nested object schemas.

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array",
              dict: "object"}


def tool(function: Callable) -> Callable:
    """Marks a function, or a method of a class, as a tool."""
    function.is_tool = True
    return function


def tool_schema(function: Callable) -> dict:
    """{"name", "description", "parameters"} of a tool, from its signature and docstring.

    A line `name: help` of the docstring describes that parameter. Raises TypeError for an
    annotation that has no JSON form.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    text, helps = [], {}
    for line in (inspect.getdoc(function) or "").splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in parameters:
            helps[name] = rest
        elif helps and line.startswith("  "):
            helps[next(reversed(helps))] += " " + line.strip()
        else:
            text.append(line)
    properties = {}
    for name, parameter in parameters.items():
        try:
            properties[name] = type_schema(parameter.annotation)
        except TypeError as error:
            raise TypeError(f"the parameter {name} of {function.__name__}: {error}") from None
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"the tool {function.__name__} cannot have *{name}")
        if name in helps:
            properties[name]["description"] = helps[name]
    required = [name for name, p in parameters.items()
                if p.default is p.empty and not without_none(p.annotation)[1]]
    return {"name": function.__name__, "description": "\n".join(text).strip(),
            "parameters": {"type": "object", "properties": properties, "required": required}}


def without_none(kind: object) -> tuple[object, bool]:
    """(the annotation, or its part that is not None; may it be None?)"""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return kind, False


def type_schema(kind: object) -> dict:
    """The JSON schema of an annotation."""
    kind, _ = without_none(kind)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal and len({type(choice) for choice in arguments}) == 1 \
            and type(arguments[0]) in JSON_TYPES:
        return {"type": JSON_TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin not in JSON_TYPES:
        what = "without a type" if kind is inspect.Parameter.empty else f"of type {kind}"
        raise TypeError(f"a tool cannot have a parameter {what}; use str, int, float, bool, list, "
                        "dict, Literal or Optional")
    items = {"items": type_schema(arguments[0])} if origin is list and arguments else {}
    return {"type": JSON_TYPES[origin], **items}


def check_arguments(function: Callable, arguments: dict) -> dict:
    """The arguments as the function wants them. Raises ToolError with the right form."""
    signature = inspect.signature(function, eval_str=True)
    form = re.sub(r" ->.*|typing\.", "", f"{function.__name__}{signature}")
    given = {name: value for name, value in arguments.items()
             if value is not None or name in signature.parameters}
    unknown = [name for name in given if name not in signature.parameters]
    if unknown:
        raise ToolError(f"there is no argument {unknown[0]!r}; the form is {form}")
    fitting = {}
    for name, parameter in signature.parameters.items():
        kind, optional = without_none(parameter.annotation)
        value = given.get(name)
        if value is None and parameter.default is parameter.empty:
            if not optional:
                raise ToolError(f"the argument {name!r} is missing; the form is {form}")
            fitting[name] = None
        if value is None:
            continue
        try:
            fitting[name] = fit(value, kind)
        except ValueError as error:
            raise ToolError(f"the argument {name!r} must be {error}, not "
                            f"{brief(json.dumps(value), 60)}; the form is {form}") from None
    return fitting


def fit(value: object, kind: object) -> object:
    """The value as this type, if it can only mean that; ValueError says what is wanted."""
    kind, optional = without_none(kind)
    if value is None and optional:
        return None
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        for choice in arguments:
            if str(value) == str(choice) and isinstance(value, (type(choice), str)):
                return choice
        raise ValueError(f"one of {', '.join(map(repr, arguments))}")
    if isinstance(value, str) and origin in (int, float, list, dict, bool):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value.strip().lower() if origin is bool else value)
    if origin in (int, float) and type(value) in (int, float) and abs(value) < float("inf"):
        with contextlib.suppress(OverflowError):
            if origin is float or value == int(value):
                return origin(value)
    elif origin in (bool, list, dict) and type(value) is origin:
        inner = arguments[0] if origin is list and arguments else None
        return [fit(item, inner) for item in value] if inner else value
    elif origin is str and isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
        raise ValueError("a text of whole characters, without halves of surrogate pairs")
    raise ValueError({str: "a text", int: "a whole number", float: "a number", list: "a list",
                      bool: "true or false", dict: "an object"}[origin])


# ─── Workspace and tools ─────────────────────────────────────────────────────────────────────────
# The seven things a model can do to the world. Every path goes through one check, resolve(), and
# every file is written beside itself and renamed, so that a failed write leaves the old one whole.
# What is too long for the model stays in a file that it can read. A tool that yields pieces of
# text, as shell does, is shown while it runs. Left out: anything beside text files.

MAX_FILE = 20_000_000         # bytes that read_file and grep will look at
MAX_KEPT = 100_000_000        # bytes of one command's output that are kept
MAX_RESULT = 50_000           # characters of a result, whatever the budget
MAX_BEFORE = 1_000_000        # bytes of a file's old text that the ledger keeps, for a rewind
SKIPPED = {".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".tox", ".nox",
           ".mypy_cache", ".pytest_cache", ".ruff_cache"}
GREP_SECONDS = 10
ENVIRONMENT = ("PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TMP TEMP VIRTUAL_ENV "
               "SYSTEMROOT SYSTEMDRIVE COMSPEC PATHEXT WINDIR USERPROFILE APPDATA LOCALAPPDATA "
               "PROGRAMFILES PROGRAMDATA").split()     # of these a command sees; and LC_*


@dataclass(frozen=True)
class Outcome:
    """What a tool gives back, if it is more than a text."""
    content: str
    is_error: bool = False
    details: dict = field(default_factory=dict)


def count_of(number: int, thing: str) -> str:
    """"1 line", "2 lines"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class Text:
    """A file's text, with what must survive an edit: byte order mark, newline style, odd bytes."""

    def __init__(self, data: bytes, name: str):
        if b"\0" in data[:8192]:
            raise ToolError(f"{name} is a binary file of {len(data):,} bytes, not text")
        self.mark = b"\xef\xbb\xbf" if data.startswith(b"\xef\xbb\xbf") else b""
        self.text = data[len(self.mark):].decode("utf-8", "surrogateescape")
        self.all_crlf = 0 < self.text.count("\n") == self.text.count("\r\n")

    def in_style(self, text: str) -> str:
        """A text with the newlines of this file."""
        return re.sub(r"\r?\n", "\r\n", text) if self.all_crlf else text

    def encode(self, text: str) -> bytes:
        """The bytes of this file with another text. Raises ToolError for half characters."""
        try:
            return self.mark + text.removeprefix("\ufeff").encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ToolError("the text holds half of a surrogate pair; write the character "
                            "itself") from None


def shown(text: str) -> str:
    """A text with odd bytes in it, for the model."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def make_folders(folder: Path) -> Path:
    """Makes a folder and those above it, for nobody else to look into; gives it back."""
    if not folder.is_dir():
        make_folders(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
    return folder


class Output:
    """What a command prints. All of it while it is short, else its head and tail, and a file."""

    def __init__(self, limit: int, new_file: Callable):
        import codecs
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.limit, self.new_file = limit, new_file
        self.head, self.tail, self.size, self.held = "", "", 0, ""
        self.file = self.path = None

    def add(self, data: bytes, final: bool = False) -> str:
        """Takes bytes as they come; gives their text."""
        piece = mask(self.held + self.decode(data, final))
        begun = max((length for secret in SECRETS for length in range(1, len(secret))
                     if piece.endswith(secret[:length])), default=0)
        if begun and not final:              # this may be the beginning of a key
            piece, self.held = piece[:-begun], piece[-begun:]
        else:
            self.held = ""
        before, self.size = self.size, self.size + len(piece)
        if self.size <= self.limit:
            self.head += piece
            return piece
        if before <= self.limit:
            whole = self.head + piece
            with contextlib.suppress(OSError):
                self.path, self.file = self.new_file("shell")
            self.head, self.tail = whole[:self.limit // 3], whole[-(self.limit * 2 // 3):]
            self.keep(whole)
        else:
            self.tail = (self.tail + piece)[-(self.limit * 2 // 3):]
            self.keep(piece)
        return piece

    def keep(self, text: str) -> None:
        if self.file and self.size <= MAX_KEPT:
            try:
                self.file.write(text)
            except OSError:                  # a full disk must not stop the command
                self.file = self.path = None

    def text(self) -> str:
        """What the model gets."""
        if self.file:
            with contextlib.suppress(OSError):
                self.file.close()
        if not self.tail:
            return self.head
        left = self.size - len(self.head) - len(self.tail)
        return f"{self.head}\n{left_out(left, self.path)}\n{self.tail}"


def left_out(characters: int, path: Path | None) -> str:
    """The line that says what a result does not show, and where it is."""
    where = f"is in {path}, for read_file and grep" if path else "could not be kept in a file"
    return f"[{characters:,} characters left out here; the whole of it {where}]"


def as_bytes(text: str | None) -> bytes | None:
    """The bytes of a file whose text the ledger kept; None of None, which is no file."""
    return None if text is None else text.encode("utf-8", "surrogateescape")


def digest(data: bytes | None) -> str | None:
    """The SHA-256 of bytes, None of None."""
    import hashlib
    return None if data is None else hashlib.sha256(data).hexdigest()


def not_kept(details: dict) -> str:
    """What the result of a change says if a rewind will not be able to undo it."""
    why = details.get("uncovered")
    return f"; its old text is not kept ({why}), so a rewind cannot bring it back" if why else ""


def equal_lines(one: list[str], other: list[str]) -> int:
    """How many lines two lists have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


class Workspace:
    """The folder the agent works in, and its tools.

    `limit` is the length of a result in characters. `outputs` is a folder for what is longer;
    made when it is needed. The agent sets `may_read(path)`, made from the rules, and `abort`.
    """

    def __init__(self, root: str | Path, *, limit: int = 16_000, outputs: Path | None = None):
        self.root = Path(os.path.realpath(root))
        self.limit, self.outputs = max(1000, min(limit, MAX_RESULT)), outputs
        self.may_read: Callable[[str], bool] = lambda path: True
        self.abort = Abort()
        self.sandboxed, self.network, self.read_only = False, False, False      # for commands
        self.hidden: list[Path] = []         # folders that a command in the sandbox must not see

    def tools(self) -> dict[str, Callable]:
        """The tools by name."""
        return {name: getattr(self, name) for kind in reversed(type(self).__mro__)
                for name, member in vars(kind).items() if getattr(member, "is_tool", False)}

    def resolve(self, path: str, reading: bool = False) -> Path:
        """Where a path leads once links and `..` are followed. Raises ToolError if outside.

        Reading may also look at the kept outputs of this session.
        """
        if not path.strip() or "\0" in path:
            raise ToolError(f"{path!r} is not a path")
        real = Path(os.path.realpath(self.root / path))
        if real.is_relative_to(self.root):
            return real
        if reading and self.outputs and Path(os.path.realpath(self.outputs)) in real.parents:
            return real
        raise ToolError(f"{path} is outside the workspace {self.root}; only what is inside "
                        "can be used")

    def name(self, real: Path) -> str:
        """A resolved path as it is shown and as rules see it: relative to the workspace."""
        inside = real.is_relative_to(self.root)
        return real.relative_to(self.root).as_posix() if inside else real.as_posix()

    def target(self, path: str) -> str:
        """What rules compare: the resolved path, relative to the workspace where it is inside."""
        return self.name(Path(os.path.realpath(self.root / path.replace("\0", ""))))

    def read_bytes(self, real: Path) -> bytes:
        """The content of a regular file. Raises ToolError, OSError."""
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) \
            | getattr(os, "O_BINARY", 0)
        name = self.name(real)
        if real.is_dir():
            raise ToolError(f"{name} is a folder; find_files lists files, for example "
                            f"find_files({name + '/*'!r})")
        if not os.path.lexists(real):
            raise ToolError(f"there is no file {name}{self.look_alike(real)}")
        with os.fdopen(os.open(real, flags), "rb") as file:
            self.check_opened(file.fileno(), real)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{name} is not a regular file but a pipe, socket or device")
            if status.st_size > MAX_FILE:
                raise ToolError(f"{name} is too large: {status.st_size:,} bytes, the most is "
                                f"{MAX_FILE:,}; look at parts of it with grep or shell")
            return file.read(MAX_FILE)

    def write_bytes(self, real: Path, data: bytes) -> None:
        """Replaces a file, or makes it, so that it is at all times whole. Raises as read_bytes."""
        mode = None
        if os.path.lexists(real):
            status = os.lstat(real)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{self.name(real)} is not a regular file")
            if not os.access(real, os.W_OK):
                raise ToolError(f"{self.name(real)} is write-protected")
        real.parent.mkdir(parents=True, exist_ok=True)
        with self.folder(real.parent) as folder:
            beside = f".{real.name[:100]}.{own_id()}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            where = str(real.parent / beside) if folder is None else beside
            try:
                with os.fdopen(os.open(where, flags, 0o666, dir_fd=folder), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                if mode is not None:
                    os.chmod(where, mode, dir_fd=folder)
                os.replace(where, real if folder is None else real.name, src_dir_fd=folder,
                           dst_dir_fd=folder)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(where, dir_fd=folder)

    def remove(self, real: Path) -> None:
        """Removes a file, if it is there. Raises ToolError, OSError."""
        with contextlib.suppress(FileNotFoundError), self.folder(real.parent) as folder:
            os.unlink(real if folder is None else real.name, dir_fd=folder)

    def undoing(self, real: Path, data: bytes | None) -> dict:
        """What will undo it if a file gets these bytes (None: is removed), as `details`.

        `before` is the text that is there now (None: no file), `after` the SHA-256 of the new
        bytes (None: no file). Instead of a text that is not kept, `uncovered` says why.
        """
        old = self.read_bytes(real) if os.path.lexists(real) else None
        text = None if old is None else old.decode("utf-8", "surrogateescape")
        why = "" if text is None else \
            f"larger than {MAX_BEFORE:,} bytes" if len(old) > MAX_BEFORE else \
            "binary" if b"\0" in old else "holding a key" if mask(text) != text else ""
        return {"path": self.name(real), "after": digest(data),
                **({"uncovered": why} if why else {"before": text})}

    def recorded(self, name: str) -> Path:
        """The path of a name from the ledger. Raises ToolError if it leads elsewhere by now."""
        real = self.resolve(name)
        if self.name(real) != name:
            raise ToolError(f"it is a link to {self.name(real)} by now")
        return real

    def put(self, real: Path, data: bytes | None) -> None:
        """Gives a file these bytes, or removes it. Raises ToolError, OSError."""
        self.remove(real) if data is None else self.write_bytes(real, data)

    def state(self, real: Path) -> str | None:
        """The SHA-256 of a file; None if there is none. Raises ToolError, OSError."""
        return digest(self.read_bytes(real)) if os.path.lexists(real) else None

    @contextlib.contextmanager
    def folder(self, real: Path) -> Iterator[int | None]:
        """A folder held open, so that a link that is put in its place meanwhile is not followed;
        None where the system has no such thing."""
        if os.open not in os.supports_dir_fd:
            yield None
            return
        handle = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self.check_opened(handle, real)
            yield handle
        finally:
            os.close(handle)

    @staticmethod
    def check_opened(handle: int, real: Path) -> None:
        """Raises ToolError if something else was opened than what was checked."""
        link = f"/proc/self/fd/{handle}"
        if os.path.exists(link) and os.readlink(link) != str(real):
            raise ToolError(f"{real} was exchanged for something else meanwhile")

    @staticmethod
    def look_alike(real: Path) -> str:
        """"; but there is …" if a file is there whose name only looks the same."""
        import unicodedata

        def plain(name: str) -> str:
            return " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        with contextlib.suppress(OSError):
            for name in os.listdir(real.parent):
                if plain(name) == plain(real.name):
                    return f"; but there is one written {ascii(name)}"
        return ""

    def new_output(self, tool_name: str) -> tuple[Path, typing.TextIO]:
        """A new file for an output that is too long to show: (its path, open for writing)."""
        if self.outputs is None:
            import atexit
            import shutil
            import tempfile
            self.outputs = Path(tempfile.mkdtemp(prefix="tiny_agent_"))
            atexit.register(shutil.rmtree, self.outputs, ignore_errors=True)
        path = make_folders(self.outputs) / f"{tool_name}_{own_id()}.txt"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return path, os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="")

    def clip(self, text: str, tool_name: str) -> str:
        """The text, if it is not too long; else its beginning, and where the whole of it is."""
        if len(text) <= self.limit:
            return text
        path = None
        with contextlib.suppress(OSError):
            path, file = self.new_output(tool_name)
            with file:
                file.write(text)
        return f"{text[:self.limit]}\n{left_out(len(text) - self.limit, path)}"

    def preview(self, name: str, arguments: dict) -> str:
        """What a call would do, for the person who is asked: a command, or a diff."""
        if name == "shell":
            return arguments["command"]
        if name == "write_file":
            return self.diff(arguments["path"], arguments["content"])
        if name == "replace_in_file":
            try:
                return self.diff(arguments["path"], self.replaced(**arguments)[1])
            except (ToolError, OSError) as error:
                return f"{arguments['path']}: it will fail, {error}"
        return "\n".join(f"{key}: {value}" for key, value in arguments.items())

    def diff(self, path: str, new: str) -> str:
        """The change to a file as a unified diff, with a line that says what it is."""
        import difflib
        old, head = "", f"{path}: new file, {count_of(len(new.splitlines()), 'line')}"
        try:
            if os.path.lexists(real := self.resolve(path)):
                old, head = Text(self.read_bytes(real), path).text, f"{path}: changes this file"
        except (OSError, ToolError) as error:
            return f"{path}: it will fail, {error}"
        before, after = (text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
                         for text in (old, new))
        # What is equal at the beginning and the end need not be compared, but for two lines.
        start = max(0, equal_lines(before, after) - 2)
        end = max(0, equal_lines(before[:start:-1], after[:start:-1]) - 2)
        before, after = before[start:len(before) - end], after[start:len(after) - end]
        if max(len(before), len(after)) > 5000:
            return "\n".join([f"{head}, {len(before):,} lines by {len(after):,}; the new ones:",
                              *(f"+{line}" for line in after)])
        if before == after:
            return f"{head}, {'only the ends of lines' if old != new else 'to what it is'}"
        pieces = difflib.unified_diff(before, after, lineterm="", n=2)
        shift = functools.partial(re.sub, r"(?<=[-+])\d+", lambda n: str(int(n[0]) + start))
        return "\n".join([head, *(shift(piece) if piece.startswith("@@") else piece
                                  for piece in itertools.islice(pieces, 2, None))])

    # ── The tools

    @tool
    def read_file(self, path: str, offset: int = 1, limit: int = 400) -> str:
        """Reads a text file; gives its lines with their numbers.

        path: the file, relative to the workspace
        offset: the first line to give, counted from 1
        limit: how many lines at the most
        """
        if offset < 1 or limit < 1:
            raise ToolError("offset and limit count from 1")
        file = Text(self.read_bytes(self.resolve(path, reading=True)), path)
        lines = shown(file.text).split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            return f"{path} is empty"
        if offset > len(lines):
            raise ToolError(f"{path} has only {count_of(len(lines), 'line')}")
        parts, room = [], self.limit - 200
        for number, line in enumerate(lines[offset - 1:offset - 1 + limit], offset):
            entry = f"{number:6}\t{line.rstrip(chr(13))}\n"
            if len(entry) > room and parts:
                break
            if len(entry) > room:
                entry = f"{entry[:room]}… (this line has {len(line):,} characters)\n"
            parts.append(entry)
            room -= len(entry)
        last = offset + len(parts) - 1
        if last < len(lines) or offset > 1:
            more = f", {len(lines) - last} more: read on with offset={last + 1}" \
                if last < len(lines) else ""
            parts.append(f"[lines {offset}-{last} of {len(lines)}{more}]")
        return "".join(parts)

    @tool
    def write_file(self, path: str, content: str) -> Outcome:
        """Writes a text file, replacing the whole of it; makes the folders it needs.

        path: the file, relative to the workspace
        content: all of its new text
        """
        real = self.resolve(path)
        change = self.diff(path, content)
        old = Text(self.read_bytes(real) if os.path.lexists(real) else b"", path)
        if "\ufffd" in content and re.search("[\udc80-\udcff]", old.text):
            raise ToolError(f"{path} holds bytes that are not UTF-8, and read_file shows them as "
                            "\ufffd; change it with replace_in_file, which keeps them")
        data = old.encode(old.in_style(content))
        details = self.undoing(real, data)
        self.write_bytes(real, data)
        return Outcome(f"wrote {self.name(real)}: {count_of(len(content.splitlines()), 'line')}, "
                       f"{len(data):,} bytes{not_kept(details)}",
                       details={**details, "diff": change})

    @tool
    def replace_in_file(self, path: str, old: str, new: str) -> Outcome:
        """Replaces a piece of a text file. The old piece must occur exactly once.

        path: the file, relative to the workspace
        old: the text to replace, exactly as it stands, with enough lines around it to be unique
        new: the text to put in its place
        """
        real = self.resolve(path)
        file, text = self.replaced(path, old, new)
        change, data = self.diff(path, text), file.encode(text)
        details = self.undoing(real, data)
        self.write_bytes(real, data)
        return Outcome(f"changed {self.name(real)}{not_kept(details)}",
                       details={**details, "diff": change})

    def replaced(self, path: str, old: str, new: str) -> tuple[Text, str]:
        """(the file, its text with `old` replaced). Raises ToolError unless it occurs once."""
        file = Text(self.read_bytes(self.resolve(path)), path)
        if not old or old == new:
            raise ToolError("old is empty" if not old else "old and new are the same text")
        for before, after in ((file.in_style(old), file.in_style(new)),
                              (old.replace("\n", "\r\n"), new.replace("\n", "\r\n"))):
            found = [m.start() for m in re.finditer(f"(?={re.escape(before)})", file.text)]
            if len(found) == 1:
                start = found[0]
                return file, file.text[:start] + after + file.text[start + len(before):]
            if found:
                numbers = [str(file.text.count("\n", 0, start) + 1) for start in found[:10]]
                raise ToolError(f"expected the text once, found it {len(found)} times, at line "
                                f"{', '.join(numbers)}; add a line of context to old")
        raise ToolError(f"the text of old is not in {path}{self.nearest(file.text, old)}")

    @staticmethod
    def nearest(text: str, old: str) -> str:
        """"; the nearest is line 3: …" for an error, or a hint to read the file."""
        import difflib
        first = next((line.strip() for line in old.splitlines() if line.strip()), "")
        lines = {line.strip(): number for number, line in
                 enumerate(itertools.islice(text.split("\n"), 5000), 1)}
        found = difflib.get_close_matches(first, lines, 1, 0.6)
        return f"; the nearest is line {lines[found[0]]}: {brief(shown(found[0]), 160)}" if found \
            else "; read the file first"

    @tool
    def find_files(self, pattern: str) -> str:
        """Lists files by name. Version control, dependencies and caches are left out.

        pattern: for example *.py, src/*.js or **/test_*; * also crosses folders
        """
        wanted = {pattern.removeprefix("./"), pattern.removeprefix("./").replace("**/", "")}
        found, abort = [], self.abort        # of this run, which a thread may outlive
        for name, _ in self.files(self.root):
            if abort.done:
                raise KeyboardInterrupt
            names = (name, name.rpartition("/")[2])
            if any(fnmatch.fnmatch(n, p) for n in names for p in wanted):
                found.append(name)
        more = f"\n[{len(found) - 200:,} more; use a narrower pattern]" if len(found) > 200 else ""
        return "\n".join(found[:200]) + more if found else f"no file matches {pattern}"

    @tool
    def grep(self, pattern: str, path: str = ".") -> str:
        """Searches text files for a regular expression; gives file:line: text of each hit.

        pattern: a regular expression as Python's re knows it
        path: the file or folder to search, relative to the workspace
        """
        try:
            regex = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ToolError(f"the pattern is not a regular expression: {error}") from None
        start, hits = self.resolve(path, reading=True), []
        if not os.path.lexists(start):
            raise ToolError(f"there is no {path}")
        end, here = time.monotonic() + GREP_SECONDS, threading.get_ident()

        def interrupt() -> None:             # in a signal handler it ends even a costly match
            if threading.get_ident() == here:
                raise KeyboardInterrupt
        with self.abort.calling(interrupt), alarm(GREP_SECONDS):
            try:
                self.search(regex, start, end, hits)
            except TimeoutError:
                hits.append(f"[stopped after {GREP_SECONDS} s: the pattern takes too long; use a "
                            "simpler one]")
        return "\n".join(hits) or f"nothing matches {pattern}"

    def search(self, regex: re.Pattern, start: Path, end: float, hits: list[str]) -> None:
        """Adds hits below `start`, until there are many or the time is over."""
        for name, real in self.files(start):
            if self.abort.done:
                raise KeyboardInterrupt
            if time.monotonic() > end:
                hits.append(f"[stopped after {GREP_SECONDS} s; search a smaller folder]")
                break
            try:
                text = shown(Text(self.read_bytes(real), name).text)
            except (ToolError, OSError):            # binary, too large, or gone by now
                continue
            for number, line in enumerate(text.split("\n"), 1):
                if found := regex.search(line.rstrip("\r")):
                    at = max(0, found.start() - 60) if len(line) > 160 else 0
                    hits.append(f"{name}:{number}: {line[at:at + 160].strip()}")
            if len(hits) > 100:
                hits[100:] = ["[more than 100 hits; use a narrower pattern or path]"]
                break

    def files(self, start: Path) -> Iterator[tuple[str, Path]]:
        """Yields (name, resolved path) of the files that may be read, in order of their names."""
        if not start.is_dir():
            if self.may_read(self.name(start)):
                yield self.name(start), start
            return
        try:
            entries = sorted(os.scandir(start), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED and not os.path.exists(f"{entry.path}/pyvenv.cfg"):
                    yield from self.files(Path(entry.path))
                continue
            real = Path(os.path.realpath(entry.path) if entry.is_symlink() else entry.path)
            inside = self.root in real.parents or not entry.is_symlink()
            if inside and real.is_file() and self.may_read(self.name(real)):
                yield self.name(Path(entry.path)), real

    @tool
    def shell(self, command: str, timeout: int = 120) -> Iterator[str]:
        """Runs a command line in the workspace; gives its exit status and what it printed.

        It has no input and cannot ask. What it leaves in the background ends with it.
        command: the command line
        timeout: seconds after which it is stopped, at the most 3600
        """
        if not 1 <= timeout <= 3600:
            raise ToolError("timeout must be between 1 and 3600 seconds")
        started = time.monotonic()
        output, inbox = Output(self.limit - 400, self.new_output), queue.SimpleQueue()
        process = start_command(command, self.root, self.wrapper())
        threading.Thread(target=read_output, args=(process.stdout, output, inbox),
                         daemon=True).start()
        threading.Thread(target=lambda: inbox.put(("exit", process.wait())), daemon=True).start()
        said, at_end, deadline = "", False, started + timeout
        try:
            with self.abort.calling(lambda: inbox.put(("abort", None))):
                while not (said and at_end):
                    kind, value = inbox.get(timeout=max(0, deadline - time.monotonic()))
                    if kind == "text":
                        yield value
                    elif kind == "eof":
                        at_end = True
                    elif kind == "exit":               # what holds the pipe now is its child
                        said = f"exit status {value}" if value >= 0 else f"ended by signal {-value}"
                        deadline = time.monotonic() + 0.3
                    else:
                        raise KeyboardInterrupt
        except queue.Empty:
            said = said or f"stopped, its time limit of {timeout} s was over"
        except KeyboardInterrupt:
            self.abort.set()
            said = "stopped, interrupted by the person"
        finally:
            end_command(process)
        with contextlib.suppress(queue.Empty):
            while not at_end:                          # its last words
                at_end = inbox.get(timeout=0.3)[0] == "eof"
        return Outcome(f"{said} ({time.monotonic() - started:.1f} s)\n{output.text()}".rstrip("\n"),
                       said != "exit status 0",
                       {"output_file": str(output.path)} if output.path else {})

    def wrapper(self) -> list[str]:
        """What stands in front of a command: the sandbox, or nothing."""
        return sandbox_words(self.root, [*self.hidden, *self.unreadable()],
                             read_only=self.read_only, network=self.network) \
            if self.sandboxed else []

    def unreadable(self) -> Iterator[Path]:
        """The files of the workspace that may not be read, such as .env."""
        for folder, _, names in os.walk(self.root):
            dependencies = SKIPPED.intersection(Path(folder).parts)      # many, little to hide
            for name in names:
                if (not dependencies or name.startswith(".env")) and \
                        not self.may_read(self.name(Path(folder, name))):
                    yield Path(folder, name)

    @tool
    def note(self, text: str) -> Outcome:
        """Keeps one line for later sessions, in AGENTS.md: a fact about this project, a wish.

        text: the line
        """
        real = self.resolve("AGENTS.md")
        old = Text(self.read_bytes(real) if os.path.lexists(real) else b"", "AGENTS.md")
        start = old.text if not old.text or old.text.endswith("\n") else old.text + "\n"
        line = " ".join(text.split())
        data = old.encode(old.in_style(f"{start}- {line}\n"))
        details = self.undoing(real, data)
        self.write_bytes(real, data)
        return Outcome(f"noted in AGENTS.md{not_kept(details)}", details=details)


# ── The sandbox for commands: bubblewrap, where it really works
# All that is there can be read but not written, but for the workspace and a /tmp of its own. The
# person's home, the agent's home and .env files are not there at all, nor is the network. Later
# words win over earlier ones.

SANDBOX = ("--ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --tmpfs /run --unshare-pid "
           "--unshare-ipc --die-with-parent --cap-drop ALL").split()
TOOL_FOLDERS = (".pyenv .rustup .cargo/bin .nvm .volta .rbenv .asdf .bun .deno .sdkman go/bin "
                ".local/bin .local/lib miniconda3 anaconda3").split()      # below home, to read
KEY_FOLDERS = ".ssh .gnupg .aws .azure .kube .docker .config .netrc .git-credentials".split()


@functools.cache
def bubblewrap() -> str | None:
    """The path of a bwrap that can run something here; None if there is none."""
    import shutil
    import subprocess
    path = shutil.which("bwrap")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if path and not subprocess.run([path, *SANDBOX, "--unshare-net", "true"], timeout=10,
                                       stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return path
    return None


def sandbox_words(root: Path, hidden: Iterable[Path], *, read_only: bool,
                  network: bool) -> list[str]:
    """What stands in front of a command so that it runs in the sandbox."""
    home = Path(os.path.realpath(Path.home()))
    words = [bubblewrap(), *SANDBOX]
    for folder in {home, Path("/root"), Path("/home")} - {Path("/")}:      # those of others too
        words += ["--tmpfs", str(folder)] if folder.is_dir() else []
    for folder in (home / name for name in TOOL_FOLDERS):
        words += ["--ro-bind", str(folder), str(folder)] if folder.exists() else []
    for git in (parent / ".git" for parent in root.parents):
        words += ["--ro-bind", str(git), str(git)] if git.exists() else []
    words += ["--ro-bind" if read_only else "--bind", str(root), str(root)]
    inside = [home / name for name in KEY_FOLDERS if root in (home / name).parents]
    for path in [*hidden, *inside]:
        if path.is_dir():
            words += ["--tmpfs", str(path)]
        elif path.exists():
            words += ["--ro-bind", "/dev/null", str(path)]
    return words + ([] if network else ["--unshare-net"]) + ["--chdir", str(root)]


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Within, TimeoutError is raised when the time is over, even in the middle of a match; but
    only in the main thread of a POSIX system."""
    import signal
    if not hasattr(signal, "setitimer") or \
            threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise TimeoutError
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def start_command(command: str, folder: Path, wrapper: list[str]):
    """A process that runs a command line, in a process group of its own, without input."""
    import shutil
    import subprocess
    environment = {name: value for name, value in os.environ.items()
                   if name.upper() in ENVIRONMENT or name.startswith("LC_")}
    environment |= {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0",
                    "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1"}      # a sandbox is made of mounts
    words = [*wrapper, shutil.which("bash") or "/bin/sh", "-c", command] \
        if os.name == "posix" else command
    return subprocess.Popen(words, shell=os.name != "posix", cwd=folder, env=environment,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)


def read_output(pipe: typing.BinaryIO, output: Output, inbox: queue.SimpleQueue) -> None:
    """A thread: collects what a command prints. Of a flood it shows the beginning, and after that
    the end of what came, from time to time."""
    held, shown_at = "", 0.0
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(pipe.fileno(), 65536):
            before, piece = output.size, output.add(data)
            if before < MAX_RESULT:
                inbox.put(("text", piece))
                continue
            held = (held + piece)[-1000:]
            if time.monotonic() > shown_at + 0.3:
                inbox.put(("text", f"\n[…]\n{held}"))
                held, shown_at = "", time.monotonic()
        held += output.add(b"", final=True)
    if held:
        inbox.put(("text", held if output.size <= MAX_RESULT else f"\n[…]\n{held}"))
    inbox.put(("eof", None))


def end_command(process) -> None:
    """Ends a command and its whole process group: politely, then not."""
    import signal
    if not hasattr(os, "killpg"):
        process.kill()
        return
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
            end = time.monotonic() + 0.5
            while process.returncode is None and time.monotonic() < end:
                time.sleep(0.01)
    finally:                                           # also if the person is out of patience
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ─── Permissions ─────────────────────────────────────────────────────────────────────────────────
# The model asks, this list decides. The first kind of rule that fits wins, in this order; what no
# rule speaks of is left to the mode:
#
#     mode    deny rule    its own limit           ask rule   allow rule   nothing fits
#     plan    deny         deny, if not READ_ONLY  ask        allow        ask
#     ask     deny         -                       ask        allow        ask
#     auto    deny         -                       ask        allow        allow
#
# Deny and ask reach wide (any part of a command line, options in any order, any folder above a
# path, letter case ignored); allow stays narrow (every part, to the letter, nothing redirected or
# left to the shell). Deny rules are a seat belt; the sandbox is the wall.

MODES = {"plan": "nothing but reading is done",
         "ask": "the person is asked before anything that no rule allows",
         "auto": "everything that no rule forbids is done"}
READ_ONLY = {"read_file", "find_files", "grep"}
TARGETS = {"shell": "command", "find_files": "pattern"}        # else the argument `path`


@dataclass(frozen=True)
class Rule:
    """Who may do what: `decision` is allow, ask or deny, `tool` a name or *, `target` a pattern
    in which * stands for anything, and a path is spared if its last part fits `unless`.

    In a deny or ask rule for commands what begins with an option stands anywhere: `git push -f`
    also means `git push origin -uf`, and `rm -r /` means `rm -f -r x /`.
    """
    decision: str
    tool: str
    target: str = "*"
    unless: str = ""

    def __str__(self) -> str:
        return f"{self.decision} {self.tool} {self.target}"


RULES = [
    Rule("deny", "*", ".env", unless=".env.example"),
    Rule("deny", "*", ".env.*", unless=".env.example"),
    Rule("deny", "shell", "git push --force*"),
    Rule("deny", "shell", "git push -f"),
    Rule("deny", "shell", "git push --mirror"),
    Rule("deny", "shell", "git push * +*"),
    Rule("deny", "shell", "git reset --hard"),
    Rule("deny", "shell", "git clean -f"),
    Rule("deny", "shell", "git clean --force"),
    Rule("deny", "shell", "npm publish *"),
    Rule("deny", "shell", "cargo publish *"),
    Rule("deny", "shell", "docker system prune *"),
    Rule("deny", "shell", "shutdown *"),
    Rule("deny", "shell", "reboot *"),
    Rule("deny", "shell", "halt *"),
    Rule("deny", "shell", "poweroff *"),
    Rule("deny", "shell", "mkfs*"),
    Rule("deny", "shell", "dd *of=/dev/*"),
    Rule("deny", "shell", "*> /dev/sd*"),
    Rule("deny", "shell", "*> /dev/nvme*"),
    Rule("deny", "shell", "rm -r /"),
    Rule("deny", "shell", "rm -r ~"),
    Rule("deny", "shell", "rm -r $HOME"),
    Rule("deny", "shell", "rm --recursive /"),
    Rule("deny", "shell", "rm --recursive ~"),
    Rule("deny", "shell", "rm --recursive $HOME"),
    Rule("ask", "write_file", ".git/*"),
    Rule("ask", "replace_in_file", ".git/*"),
    Rule("allow", "read_file"),
    Rule("allow", "find_files"),
    Rule("allow", "grep"),
    Rule("allow", "note"),
    Rule("allow", "shell", "git status *"),
    Rule("allow", "shell", "git diff *"),
]


@functools.cache
def glob(pattern: str, case: bool) -> re.Pattern:
    """A pattern as a regular expression; only * is special. One that ends in " *" also fits
    without the blank."""
    regex = re.escape(pattern).replace(r"\*", ".*")
    if pattern.endswith(" *"):
        regex = regex.removesuffix(r"\ .*") + r"(\ .*)?"
    return re.compile(rf"(?s:{regex})\Z", 0 if case else re.I)


# ── Reading a command line as a shell would

@dataclass
class Word:
    """A word of a command line, its quotes removed. `hidden`: the shell would put something in
    that cannot be known here. `pattern`: it would be replaced by names of files."""
    text: str = ""
    hidden: bool = False
    pattern: bool = False
    quoted: bool = False
    braces: bool = False

    def expanded(self) -> list["Word"]:
        """The words that its braces make of it, a{b,c} being ab ac; at the most 64."""
        if not self.braces:
            return [self]
        texts = [self.text]
        while len(texts) < 64 and (text := next((t for t in texts if BRACES.search(t)), None)):
            found, place = BRACES.search(text), texts.index(text)
            texts[place:place + 1] = [text[:found.start()] + choice + text[found.end():]
                                      for choice in re.split(r",|\.\.", found[0][1:-1])]
        return [replace(self, text=text) for text in texts]


@dataclass
class Part:
    """A simple command of a line. `doubts` say why no allow rule counts for it."""
    words: list[Word] = field(default_factory=list)
    files: list[Word] = field(default_factory=list)          # what it is redirected from and to
    document: str = ""                                       # its here-documents, put together
    doubts: list[str] = field(default_factory=list)

    def texts(self) -> list[str]:
        """The words as rules compare them: a program without its folder, git without the options
        in front of its command, redirections at the end."""
        texts = [word.text for word in self.words]
        if texts:
            texts[0] = texts[0].rpartition("/")[2]
        while texts[:1] == ["git"] and texts[1:2] and texts[1].startswith("-"):
            del texts[1:3 if texts[1] in GIT_VALUES else 2]
        return texts + [text for file in self.files for text in (">", file.text)]

    def reads_commands(self) -> bool:
        """Is it a shell, or source, that takes its commands from its input?"""
        texts = self.texts()
        options = [word.text for word in self.words[1:]]
        return texts[:1] in (["source"], ["."]) or bool(texts) and texts[0] in SHELLS and all(
            text.startswith("-") for text in options)

    def __str__(self) -> str:
        return " ".join(self.texts())


OPERATOR = re.compile(r"&>>?|(?:\d+|\{\w+\})?(?:<<<|<<-?|<>|<&|>>|>\||>&|<(?!\()|>(?!\())")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[.*\])?\+?=")
ARITHMETIC = re.compile(r"\(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\)|\[[^][]*\]")
DEEPEST = 40             # substitutions and wrappers in one another; more is not read but denied
PLAIN_TEXT = re.compile(r"[\w./:=@%+,-]+")              # what means nothing to a shell anywhere
ANSI_TEXT = re.compile(r"'((?:[^'\\]|\\.)*)'", re.S)
BACKQUOTED = re.compile(r"((?:[^`\\]|\\.)*)`", re.S)
VARIABLE = re.compile(r"\w+|[@*#?$!-]")
RESERVED = {"if", "then", "else", "elif", "fi", "while", "until", "do", "done", "!", "{", "}",
            "for", "case", "esac", "select", "function", "coproc", "[["}
SYSTEM_FOLDERS = {"", "/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin"}
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "su"}
WRAPPERS = {   # programs that run another one: their short options with a value, words before it
    "sudo": ("CDghpRrTtUu", 0), "doas": ("Cu", 0), "env": ("CuS", 0), "nohup": ("", 0),
    "time": ("fo", 0), "timeout": ("ks", 1), "nice": ("n", 0), "ionice": ("cn", 0),
    "xargs": ("aEILnPsd", 0), "command": ("", 0), "builtin": ("", 0), "exec": ("a", 0),
    "setsid": ("", 0), "stdbuf": ("ioe", 0), "chroot": ("", 1), "watch": ("n", 0),
    "flock": ("wE", 1), "ssh": ("bcDEeFIiJLlmopQRSWw", 1), "strace": ("eo", 0),
    "busybox": ("", 0), "parallel": ("jIa", 0), "unshare": ("", 0), "taskset": ("", 1),
    "chrt": ("", 1), "setarch": ("", 1), "prlimit": ("", 0), "setpriv": ("", 0),
    "choom": ("n", 0), "script": ("", 0), "trap": ("", 0), "alias": ("", 0), "hash": ("p", 0),
    "mapfile": ("C", 0), "compgen": ("C", 0)}
GIT_VALUES = {"-C", "-c", "--attr-source", "--git-dir", "--work-tree", "--namespace",
              "--config-env"}
GIT_RUNS = ("--ext-diff", "--textconv", "--output", "--no-index", "--exec", "--open-files-in-pager",
            "--upload-pack", "--receive-pack")       # options that run a program or write a file


class CommandLine:
    """Reads a command line; `parts` are its simple commands, also those in substitutions, groups,
    here-documents, wrappers and shells that it starts. What is not understood is a doubt."""

    def __init__(self, text: str, depth: int = 0):
        self.text, self.at, self.depth = text, 0, depth
        self.parts: list[Part] = []
        self.documents: list[tuple[Word, bool, Part]] = []       # here-documents that are to come

    def read(self) -> list[Part]:
        """All parts; one without words if the line is not whole, or there is nothing in it.

        Raises RecursionError if more is in one another than anybody would write.
        """
        if self.depth > DEEPEST:
            raise RecursionError
        self.commands("")
        if self.documents:
            self.doubt("a here-document has no end")
        if "\\\n" in self.text:         # where lines are joined depends on much; so read both ways
            self.doubt("lines that are joined")
            self.parts += self.inner(self.text.replace("\\\n", ""))
        parts = [inner for part in self.parts for inner in unwrap(part, self.depth)]
        if any(part.reads_commands() for part in parts):
            for part in list(parts):
                said = " ".join(word.text for word in part.words[1:])
                parts += self.inner(part.document) if part.document else []
                parts += self.inner(said) if part.texts()[:1] in (["echo"], ["printf"]) else []
        return parts or [Part(doubts=["there is nothing in it"])]

    def inner(self, text: str) -> list[Part]:
        """The parts of a command line inside this one."""
        return CommandLine(text, self.depth + 1).read()

    def doubt(self, why: str) -> None:
        self.parts.append(Part(doubts=[why]))

    def commands(self, end: str) -> None:
        """Reads commands up to the end sign, or all of the text."""
        part, cases = Part(), 0              # in a case a bracket ends a pattern
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == end and not cases:
                self.at += 1
                break
            if sign in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif operator := OPERATOR.match(self.text, self.at):
                self.at = operator.end()
                self.redirect(part, re.sub(r"^(\d+|\{\w+\})", "", operator[0]))
            elif sign == "(" and (sum_of := ARITHMETIC.match(self.text, self.at)):
                self.at = sum_of.end()
                self.doubt("a calculation")
                self.put_in(sum_of[0])
            elif sign in ";&|\n()":
                self.at += 1
                part = self.finish(part)
                if sign == "(":
                    self.doubt("a group, or a function")
                    self.commands(")")
                elif sign == ")":
                    self.doubt("a bracket that was not opened")
                elif sign == "\n":
                    self.read_documents()
            elif sign == "#":
                stop = self.text.find("\n", self.at)
                self.at = len(self.text) if stop < 0 else stop
            else:
                part.words.append(self.word())
                if len(part.words) == 1:
                    cases += {"case": 1, "esac": -1}.get(part.words[0].text, 0)
        else:
            if end:
                self.doubt(f"no {end} at its end")
        self.finish(part)
        self.depth -= 1

    def finish(self, part: Part) -> Part:
        """Keeps a part, if there is something in it; gives a new one."""
        if part.words or part.files:
            self.parts.append(part)
        return Part()

    def redirect(self, part: Part, operator: str) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        start = self.at
        target = self.word()
        if operator in ("<<", "<<-"):
            if target.hidden:                # its end is compared as it is written
                target.text = self.text[start:self.at]
            self.documents.append((target, operator == "<<-", part))
            return
        if operator == "<<<":
            part.document += target.text + "\n"
        copies = operator.endswith("&") and re.fullmatch(r"\d+|-", target.text)
        if ">" in operator and not copies and target.text != "/dev/null":
            part.doubts.append(f"it is redirected into {target.text}")
        if operator != "<<<" and not copies:
            part.files.append(target)
        if target.hidden:
            part.doubts.append("what it reads is put in by the shell")

    def read_documents(self) -> None:
        """Skips the here-documents that begin here; what they would run is read."""
        for word, tabs, part in self.documents:
            body, found = [], False
            while self.at < len(self.text) and not found:
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line, self.at = self.text[self.at:stop], stop + 1
                found = (line.lstrip("\t") if tabs else line) == word.text
                body += [] if found else [line]
            part.document += "\n".join(body) + "\n"
            if not found:                    # then this may be no here-document at all
                self.doubt("a here-document has no end")
                self.parts += self.inner("\n".join(body))
            if not word.quoted:
                self.put_in("\n".join(body))
        self.documents = []

    def put_in(self, text: str) -> None:
        """Reads what the shell would put into a text that is no command: as between double quotes,
        which themselves are no signs there."""
        inner = CommandLine(text, self.depth + 1)
        word = Word()
        inner.double_quotes(word, end="")
        self.parts += inner.parts
        if word.hidden:
            self.doubt("the shell puts something into a text")

    def word(self) -> Word:
        """Reads one word, up to a blank or an operator."""
        word = Word()
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|)":
            if run := PLAIN_TEXT.match(self.text, self.at):
                word.text, self.at = word.text + run[0], run.end()
                continue
            sign = self.text[self.at]
            self.at += 1
            if sign == "\\":
                escaped, self.at = self.text[self.at:self.at + 1], self.at + 1
                word.text += escaped.replace("\n", "")
                word.quoted = True
            elif self.special(sign, word, False):
                continue
            elif sign in "(<>":
                self.at -= 1
                break
            else:
                word.text += sign
                word.pattern |= sign in "*?[" or sign == "~" and self.at == start + 1
                word.braces |= sign == "{" and bool(BRACES.match(self.text, self.at - 1))
        word.hidden |= word.braces
        return word

    def special(self, sign: str, word: Word, quoted: bool) -> bool:
        """Reads on behind a quote, or a sign for which the shell puts something in; False if it
        is neither. `quoted`: between double quotes."""
        if sign == "'" and not quoted:
            self.single_quotes(word)
        elif sign == '"':
            self.double_quotes(word)
        elif sign == "$":
            self.dollar(word, quoted)
        elif sign == "`":
            self.backquotes(word, quoted)
        elif sign in "<>" and self.text[self.at:self.at + 1] == "(":
            self.at += 1
            word.hidden = True
            self.commands(")")
        else:
            return False
        return True

    def single_quotes(self, word: Word) -> None:
        stop = self.text.find("'", self.at)
        if stop < 0:
            self.doubt("a quote is not closed")
            stop = len(self.text)
        word.text += self.text[self.at:stop]
        word.quoted, self.at = True, stop + 1

    def double_quotes(self, word: Word, end: str = '"') -> None:
        word.quoted = True
        while self.at < len(self.text):
            if run := PLAIN_TEXT.match(self.text, self.at):
                word.text, self.at = word.text + run[0], run.end()
                continue
            sign = self.text[self.at]
            self.at += 1
            if sign == end:
                return
            if sign == "\\" and self.text[self.at:self.at + 1] in ("$", "`", '"', "\\", "\n"):
                word.text += self.text[self.at].replace("\n", "")
                self.at += 1
            elif sign not in "$`" or not self.special(sign, word, True):
                word.text += sign
        if end:
            self.doubt("a quote is not closed")

    def dollar(self, word: Word, quoted: bool) -> None:
        """What follows a dollar sign: a variable, a substitution, a calculation, or $'text'."""
        sign = self.text[self.at:self.at + 1]
        if sum_of := ARITHMETIC.match(self.text, self.at):
            word.hidden, self.at = True, sum_of.end()
            self.put_in(sum_of[0])
        elif sign == "(":
            word.hidden, self.at = True, self.at + 1
            self.commands(")")
        elif sign == "{":
            self.at += 1
            self.braced(word, quoted)
        elif not quoted and (found := ANSI_TEXT.match(self.text, self.at)):
            import codecs
            with contextlib.suppress(UnicodeError):
                text = codecs.decode(found[1].encode("ascii", "replace"), "unicode_escape")
                word.text += text.partition("\0")[0]
            word.hidden, self.at = True, found.end()
        elif not quoted and sign == '"':
            self.at += 1
            self.double_quotes(word)
        elif found := VARIABLE.match(self.text, self.at):
            word.text += "$" + found[0]
            word.hidden, self.at = True, found.end()
        else:
            word.text += "$"

    def braced(self, word: Word, quoted: bool) -> None:
        """The rest of ${name…}, up to its own closing brace."""
        word.hidden = True
        inside = Word()
        while self.at < len(self.text):
            sign = self.text[self.at]
            self.at += 1
            if sign == "}":
                return
            if sign == "\\":
                self.at += 1
            else:
                self.special(sign, inside, quoted)
        self.doubt("a brace is not closed")

    def backquotes(self, word: Word, quoted: bool) -> None:
        found = BACKQUOTED.match(self.text, self.at)
        if not found:
            self.doubt("a backquote is not closed")
            self.at = len(self.text)
            return
        word.hidden, self.at = True, found.end()
        signs = r'\\([`\\$"])' if quoted else r"\\([`\\$])"
        self.parts += self.inner(re.sub(signs, r"\1", found[1]))


def unwrap(part: Part, depth: int = 0) -> list[Part]:
    """The part, and the commands that its program would start: sudo X, sh -c X, find -exec X."""
    if depth > DEEPEST:
        raise RecursionError
    words, doubts = [w for word in part.words for w in word.expanded()], list(part.doubts)
    while words and (words[0].text in RESERVED or ASSIGNMENT.match(words[0].text)):
        doubts.append("an assignment, or control flow")
        named = words[0].text == "function" or words[0].text == "coproc" and len(words) > 2 \
            and words[2].text == "{"
        del words[:2 if named else 1]
    if not words:
        return [replace(part, doubts=doubts)]
    folder, _, name = words[0].text.rpartition("/")
    if folder not in SYSTEM_FOLDERS:
        doubts.append(f"{name} is not the system's own")
    if any(word.hidden for word in words) or words[0].pattern \
            or any(word.pattern and word.text[:1] in "*?[" for word in words):
        doubts.append("the shell puts something in")
    texts = [word.text for word in words]
    if name == "git":
        doubts += git_doubts(texts)
    starts, lines = inner_commands(name, texts)
    inner = [found for start, end in starts if texts[start:end]
             for found in unwrap(Part(words[start:end]), depth + 1)]
    inner += [found for line in lines for found in CommandLine(line, depth + 1).read()]
    if inner:
        doubts.append(f"{name} runs another command")
    return [replace(part, words=words, doubts=doubts), *inner]


def git_doubts(texts: list[str]) -> list[str]:
    """Why a reading git command may do more than read, or read more than the workspace."""
    doubts = []
    options = list(itertools.takewhile(lambda text: text.startswith("-"), texts[1:]))
    if set(options) - {"--no-pager", "-P"}:
        doubts.append("an option in front of git's command")
    if any(run.startswith(text.partition("=")[0]) and len(text) > 4 for text in texts
           for run in GIT_RUNS) or any(text[:2] in ("-o", "-O") for text in texts):
        doubts.append("an option of git that runs a program or writes a file")
    if any(text.startswith(("/", "~")) or ".." in text.split("/") for text in texts[1:]):
        doubts.append("a path that may lead outside")
    return doubts


def inner_commands(name: str, texts: list[str]) -> tuple[list[tuple[int, int]], list[str]]:
    """(where in its words a program's inner commands begin and end, texts that it would run)"""
    starts, lines = [], []
    if name in SHELLS:
        place = next((place for place, text in enumerate(texts)
                      if re.fullmatch(r"[-+]\w*c\w*", text)), None)
        lines = [] if place is None else texts[place + 1:]
    elif name == "eval":
        lines = [" ".join(texts[1:])]
    elif name == "find":
        for place, text in enumerate(texts):
            inside = starts and place < starts[-1][1]
            if text in ("-exec", "-execdir", "-ok", "-okdir") and not inside:
                rest = itertools.takewhile(lambda word: word not in (";", "+"), texts[place:])
                starts.append((place + 1, place + len(list(rest))))
    elif name in WRAPPERS:
        starts = [(start, len(texts)) for start in inner_starts(texts, *WRAPPERS[name])]
        lines = [re.sub(r"^(-\w*S|--split-string=|\w+=)", "", text)
                 for text in texts[1:] if " " in text]
    return starts, lines


def inner_starts(texts: list[str], valued: str, before: int) -> list[int]:
    """Where the command of a wrapper may begin: behind its options. What looks like a long option,
    or a cluster of short ones, may have a value or not, so then each of the next words is tried."""
    place, unsure = 1, False
    while place < len(texts) and (texts[place].startswith("-") or ASSIGNMENT.match(texts[place])):
        text = texts[place]
        unsure |= text.startswith("-") and len(text) > 2 and "=" not in text
        place += 2 if len(text) == 2 and text[1] in valued else 1
    place += before
    return list(range(place, min(len(texts), place + 6))) if unsure else [place]


# ── Which rules fit

def command_fits(pattern: str, texts: list[str]) -> bool:
    """Does the pattern of a deny or ask rule speak of this command? As a whole, or word by word
    with its options, and what follows them, in any place."""
    if glob(pattern, False).match(" ".join(texts)):
        return True
    wanted = pattern.removesuffix(" *").split()
    start = next((i for i, word in enumerate(wanted) if word.startswith("-")), len(wanted))
    operands = [text for text in texts if not text.startswith("-")]
    if texts[1:2] and texts[1].startswith("-") and start > 1:     # its value may be among them
        later = iter(operands[1:])
        operands = operands[:1] + [
            next((text for text in later if glob(want, False).match(text)), "")
            for want in wanted[1:start]]
    return len(operands) >= start and all(
        glob(want, False).match(text) for want, text in zip(wanted[:start], operands)) and all(
        any(word_fits(want, text) for text in texts) for want in wanted[start:])


def word_fits(want: str, text: str) -> bool:
    """A word of a pattern and one of a command: -f is in -uf, --mirror is --mirr, / is /*."""
    if want.startswith("--"):
        text = text.partition("=")[0]
        return bool(glob(want, False).match(text)) or len(text) > 2 and want.startswith(text)
    if want.startswith("-"):
        return bool(re.fullmatch(r"-\w+", text)) and want[1:].lower() in text.lower()
    return bool(glob(want, False).match(text.rstrip("*/") or "/"))


def allowed_by(rule: Rule, part: Part) -> bool:
    """Does an allow rule speak of this part, to the letter? The words in front of its first * are
    compared one by one, so that a quoted blank is not taken for two words."""
    words, texts = rule.target.split(" "), part.texts()
    plain = list(itertools.takewhile(lambda word: "*" not in word, words))
    rest = " ".join(words[len(plain):])
    return texts[:len(plain)] == plain and (
        texts[len(plain):] == [] if not rest else
        rest == "*" or bool(glob(rest, True).match(" ".join(texts[len(plain):]))))


def paths_in(part: Part, workspace: Workspace | None) -> list[str]:
    """What in a command may be a path: words, parts of words as in --file=a, files of a pattern."""
    import glob as files
    words = {(word.text, word.pattern) for word in [*part.words, *part.files]}
    texts = {text for word, _ in words for text in (word, *re.split(r"[=:,@]", word)) if text}
    found = [*texts, *(text.rstrip("/") + "/" for text in texts)]
    for text in texts if workspace else ():
        with contextlib.suppress(OSError, ValueError):          # what is not there leads nowhere
            if "/" in text or os.path.lexists(workspace.root / text):
                found.append(workspace.target(text))
    for text, pattern in words if workspace else ():
        if pattern:
            found += itertools.islice(files.iglob(text, root_dir=workspace.root), 1000)
    return found


def path_fits(rule: Rule, path: str) -> bool:
    """Does the rule's pattern fit this path, or, unless it allows, a folder or name in it?"""
    parts = path.rstrip("/").split("/")
    if rule.unless and glob(rule.unless, False).match(parts[-1]):
        return False
    pattern = glob(rule.target.removeprefix("./"), False)
    names = [path]
    if rule.decision != "allow":
        names += parts + ["/".join(parts[:end]) for end in range(1, len(parts))]
    return any(pattern.match(name) for name in names)


def rule_fits(rule: Rule, name: str, target: str | Part,
              workspace: Workspace | None = None) -> bool:
    """Does the rule speak of this tool and this target, a path or a part of a command line?"""
    if rule.tool not in ("*", name):
        return False
    if isinstance(target, str):
        return path_fits(rule, target)
    if rule.decision == "allow":
        return not target.doubts and (rule.target == "*" or
                                      rule.tool == name and allowed_by(rule, target))
    if rule.target == "*" or rule.tool == name:
        return rule.target == "*" or command_fits(rule.target, target.texts())
    return any(path_fits(rule, path) for path in paths_in(target, workspace))


GIT_SETTINGS = re.compile(
    r"(?:^|\])\s*(external|textconv|fsmonitor|command|process|clean|smudge|path|worktree\w*|"
    r"hookspath|uploadpack|promisor|partialclone\w*|sshcommand)\s*(=|$)|(?:^|\])\s*\[include",
    re.I | re.M)


def git_may_run(workspace: Workspace | None) -> bool:
    """Could the repository's own settings or hooks make a reading git command run a program?"""
    for folder in (workspace.root, *workspace.root.parents) if workspace else ():
        bare = (folder / "HEAD").exists() and (folder / "config").exists()
        git = folder / ".git"
        if bare or git.exists():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                settings = (git / "config").read_text("utf-8")
                hooks = os.listdir(git / "hooks") if (git / "hooks").is_dir() else []
                nested = [entry for entry in os.scandir(folder) if entry.name == ".gitmodules"
                          or os.path.exists(f"{entry.path}/.git")]
                return bool(bare or nested or GIT_SETTINGS.search(settings)
                            or [name for name in hooks if not name.endswith(".sample")])
            return True
    return False


# ── The decision

class Decision(typing.NamedTuple):
    """What was decided and why. `parts` says it of each part of a command line: text, decision,
    rule, and the doubts that kept allow rules from counting."""
    decision: str
    reason: str
    rule: Rule | None = None
    parts: tuple[dict, ...] = ()


def target_of(name: str, arguments: dict, workspace: Workspace | None) -> str:
    """What the rules compare: the command, the path or the pattern of a call."""
    if name == "note":
        return "AGENTS.md"
    target = str(arguments.get(TARGETS.get(name, "path")) or ("." if name == "grep" else ""))
    if name in TARGETS or workspace is None:
        return target
    return workspace.target(target)


def decide(name: str, args: dict, mode: str = "ask", *, rules: Iterable[Rule] | None = None,
           workspace: Workspace | None = None, sandbox: str = "off") -> Decision:
    """Whether a call is allowed, denied, or a matter for the person.

    `sandbox` is "on" (commands run in one), "off" (the person does without), "none" (there is no
    working one) or "require" (there is none, and the person wants no commands without).
    """
    rules = list(RULES if rules is None else rules)
    target = target_of(name, args, workspace)
    try:
        parts = CommandLine(target).read() if name == "shell" else [target]
    except RecursionError:
        return Decision("deny", "the command line is nested deeper than anybody would write one")
    told = [decide_part(name, part, mode, rules, workspace, sandbox) for part in parts]
    one = next((d for kind in ("deny", "ask") for d in told if d.decision == kind), told[0])
    return one._replace(parts=tuple(
        {"text": str(part) or f"({'; '.join(getattr(part, 'doubts', ()))})", "decision": d.decision,
         "rule": str(d.rule) if d.rule else None, "reason": d.reason}
        for part, d in zip(parts, told)))


def decide_part(name: str, part: str | Part, mode: str, rules: list[Rule],
                workspace: Workspace | None, sandbox: str) -> Decision:
    """The decision about one path, or one part of a command line."""
    def first(decision: str) -> Rule | None:
        return next((rule for rule in rules if rule.decision == decision
                     and rule_fits(rule, name, part, workspace)), None)

    if rule := first("deny"):
        return Decision("deny", f"the rule `{rule}` forbids it", rule)
    if mode == "plan" and name not in READ_ONLY and (name, sandbox) != ("shell", "on"):
        return Decision("deny", "plan mode only reads")
    if name == "shell" and sandbox == "require":
        return Decision("deny", "commands need a sandbox, and none works here")
    if rule := first("ask"):
        return Decision("ask", f"the rule `{rule}` wants it asked", rule)
    rule = first("allow")
    runs_git = isinstance(part, Part) and part.texts()[:1] == ["git"]
    if rule and not (runs_git and git_may_run(workspace)):
        return Decision("allow", f"the rule `{rule}` allows it", rule)
    if mode == "auto" and name == "shell" and sandbox == "none":
        return Decision("ask", "no sandbox for commands works here")
    if mode == "auto":
        return Decision("allow", "auto mode allows what no rule forbids")
    doubts = f": {part.doubts[0]}" if isinstance(part, Part) and part.doubts else ""
    return Decision("ask", f"{mode} mode asks where no rule allows{doubts}")


# ─── Hooks ───────────────────────────────────────────────────────────────────────────────────────
# Functions that a person's own code adds: `@agent.hooks.on("before_tool")`. What one returns
# before a tool, if it is a text, vetoes the call with it. A hook that fails before a tool vetoes
# too, since it may be there to protect something; elsewhere a failure is only reported.

MOMENTS = {"run_start": "task", "before_tool": "name, args", "after_tool": "name, args, result",
           "run_end": "reason"}


class Hooks:
    """Functions by the moment at which they are called."""

    def __init__(self):
        self.functions: dict[str, list[Callable]] = {moment: [] for moment in MOMENTS}

    def on(self, moment: str) -> Callable[[Callable], Callable]:
        """A decorator. Raises ValueError for a moment that does not exist."""
        if moment not in MOMENTS:
            raise ValueError(f"no moment {moment!r}; there are {', '.join(MOMENTS)}")

        def register(function: Callable) -> Callable:
            self.functions[moment].append(function)
            return function
        return register

    def call(self, moment: str, *arguments: object) -> tuple[list[str], list[str]]:
        """(the texts that the functions returned, what went wrong in them)"""
        texts, problems = [], []
        for function in self.functions[moment]:
            try:
                if isinstance(text := function(*copy.deepcopy(arguments)), str) and text:
                    texts.append(text)
            except Exception as error:      # a hook is foreign code; the run must not end with it
                name = getattr(function, "__name__", repr(function))
                problems.append(f"the hook {name} failed: {brief(repr(error))}")
        return texts, problems


# ─── Session ─────────────────────────────────────────────────────────────────────────────────────
# The ledger: an append-only file, an entry a line, each with the id of the one before it. Nothing
# is changed or removed. Going back is an entry too (`leaf`), so the entries form a tree:
#
#     header ── u1 ── a1 ── u2 ── a2              a2 was the leaf; `leaf` names a1;
#                      └─── u3 ── a3              u3 is added to a1, and the branch is u1 a1 u3 a3
#
# The file is made with the first answer: what never led to one leaves nothing behind.

FORMAT = 1
NEEDED = {"header": {"version": int}, "message": {"message": dict},       # fields of the types
          "compaction": {"summary": str, "first_kept_entry_id": str},
          "clear_outputs": {}, "leaf": {}, "label": {}, "settings": {}}
MAY_HAVE = {"message": {"told": dict, "typed": int}, "leaf": {"from_id": str, "files": list},
            "clear_outputs": {"last_cleared_entry_id": str, "clip": int}, "label": {"label": str}}
ON_BRANCH = {"header", "message", "compaction", "clear_outputs"}    # entries that become the leaf


@dataclass(frozen=True)
class Entry:
    """One line of the file; `data` is what its type adds to the four fields that all have."""
    type: str
    id: str
    parent_id: str | None
    timestamp: str
    data: dict

    @functools.cached_property
    def message(self) -> Message | None:
        """The message of a message entry."""
        return from_json(self.data["message"]) if self.type == "message" else None

    def to_line(self) -> str:
        """The entry as a line of the file: ASCII, one object, without the keys in use."""
        fixed = {"type": self.type, "id": self.id, "parent_id": self.parent_id,
                 "timestamp": self.timestamp}
        return mask(json.dumps({**fixed, **self.data}, default=str)) + "\n"

    def file_changes(self) -> list[dict]:
        """What a tool, or a rewind, did to files with this entry; see Workspace.undoing."""
        found = self.data.get("files") if self.type == "leaf" else \
            [self.message.details] if isinstance(self.message, ToolResultMessage) else []
        return [change for change in found or () if isinstance(change, dict)
                and isinstance(change.get("path"), str) and "after" in change]


class Moment(typing.NamedTuple):
    """Where a rewind leads: the leaf, how many entries there were, and a text to say anew."""
    leaf: str
    position: int
    text: str


def utc_now() -> str:
    """Now, like 2026-01-31T12:00:00.000Z."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Session:
    """A tree of entries, in memory and, if it has a path, in a file.

    `notes` tells what was wrong with a file that was loaded. `problem` is why the file could not
    be written any more, if it could not.
    """

    def __init__(self, path: Path | None = None, cwd: str | None = ""):
        self.path, self.problem = path, ""
        self.entries: list[Entry] = []
        self.by_id: dict[str, Entry] = {}
        self.below: dict[str | None, list[str]] = {}
        self.leaf: str | None = None
        self.notes: list[str] = []
        self.handle: int | None = None       # open for appending, once the file exists
        self.torn = False                    # does the file end within a line?
        if cwd is not None:                  # None: the header is to be loaded
            self.append("header", version=FORMAT, cwd=cwd)

    # ── The file

    @classmethod
    def new(cls, home: Path, workspace: Path) -> "Session":
        """A session of this workspace whose file will lie below <home>/sessions."""
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        return cls(sessions_folder(home, workspace) / f"{now}_{os.urandom(4).hex()}.jsonl",
                   str(workspace))

    @classmethod
    def load(cls, path: Path) -> "Session":
        """The session of a file, ready to go on. Raises SessionError.

        What is sound is loaded; `notes` names what is not.
        """
        session = cls(Path(path), None)
        if not session.path.is_file():
            raise SessionError(f"{path} is not a file")
        try:
            with open(path, "rb") as file:
                session.open_file(os.O_RDWR)          # before it is read: nobody writes meanwhile
                session.take_lines(file, Path(path).name)
        except OSError as error:
            raise SessionError(f"{path} cannot be read: {error.strerror}") from None
        except SessionError:
            session.close()
            raise
        return session

    def take_lines(self, file: Iterable[bytes], name: str) -> None:
        """Adds the entries of the lines of a file; notes what is left out or put right."""
        bad, lost, unknown, line = [], [], set(), b""
        for number, line in enumerate(file, 1):
            entry = self.take_line(line) if line.strip() else None
            if entry is None and line.strip():
                bad.append(number)
            if not self.entries and (bad or number > 1):
                raise SessionError(f"{name} is not a session file of this program",
                                   "its first line must be a header")
            if entry and entry.type not in NEEDED:
                unknown.add(entry.type)
            if entry and entry.type != "header" and entry.parent_id not in self.by_id:
                lost.append(number)
                entry = replace(entry, parent_id=self.entries[-1].id)
            if entry:
                self.add(entry)
        if not self.entries:
            raise SessionError(f"{name} is empty, not a session file")
        self.torn = not line.endswith(b"\n")
        if self.entries[0].data["version"] > FORMAT:
            self.notes.append(f"{name} was written by a newer version of this program; what this "
                              "one does not know is left out")
        for what, found in (("lines that could not be read are skipped", bad),
                            ("lines whose parent is not there follow the one before", lost),
                            ("entries of unknown types are kept and ignored", sorted(unknown))):
            if found:
                more = f" and {len(found) - 5:,} more" if found[5:] else ""
                self.notes.append(f"{name}: {what}: {', '.join(map(str, found[:5]))}{more}")

    def take_line(self, line: bytes) -> Entry | None:
        """The entry of a line of the file, if there is a sound and new one in it."""
        try:
            data = json.loads(line.strip(b"\0 \r\n").decode("utf-8"))
            entry = Entry(data.pop("type"), data.pop("id"), data.pop("parent_id"),
                          data.pop("timestamp"), data)
            entry.message                    # raises if there should be one and is none
            sound = isinstance(entry.id, str) and isinstance(entry.type, str) \
                and isinstance(entry.parent_id, str | None) and all(
                    isinstance(data[name], kind)
                    for name, kind in NEEDED.get(entry.type, {}).items())
            for name, kind in MAY_HAVE.get(entry.type, {}).items():
                if not isinstance(data.get(name), kind):
                    data.pop(name, None)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not sound or entry.id in self.by_id or (not self.entries) != (entry.type == "header"):
            return None
        return replace(entry, parent_id=None) if entry.type == "header" else entry

    def open_file(self, flags: int) -> None:
        """Opens the file for appending. Raises SessionError if another process has it."""
        try:
            make_folders(self.path.parent)
            flags |= os.O_APPEND | getattr(os, "O_BINARY", 0)
            self.handle = os.open(self.path, flags, 0o600)
        except OSError as error:
            self.broken(error)
            return
        with contextlib.suppress(ImportError):
            import fcntl                     # where there is none, a second writer is not noticed
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise SessionError(f"{self.path} is in use by another run",
                                   "wait for it, or start a new session") from None
            except OSError:                  # a file system without locks
                pass

    def create(self) -> None:
        """Makes the file, with all that was held until now."""
        path = self.path
        self.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        made = self.handle is not None
        self.write("".join(held.to_line() for held in self.entries))
        if made and self.problem:            # nothing could be written: leave nothing behind
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def write(self, text: str) -> None:
        """Appends whole lines with one write; on failure the session goes on in memory."""
        data = (b"\n" if self.torn else b"") + text.encode("ascii")
        self.torn = False
        try:
            if self.handle is not None and os.write(self.handle, data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            self.broken(error)

    def broken(self, error: OSError) -> None:
        self.problem = f"the session cannot be written to {self.path}: {error.strerror or error}"
        self.close()
        self.path = None

    def close(self) -> None:
        """Closes the file and lets others write it."""
        if self.handle is not None:
            with contextlib.suppress(OSError):
                os.close(self.handle)
            self.handle = None

    @property
    def file(self) -> str | None:
        """The path of the file, if there is one."""
        return str(self.path) if self.handle is not None else None

    # ── The tree

    def append(self, what: Message | str, **data: object) -> Entry:
        """Adds a message, or an entry of a type, with more fields, to the leaf; writes it."""
        if not isinstance(what, str):
            what, data = "message", {"message": to_json(what), **data}
        new_id = os.urandom(4).hex()
        while new_id in self.by_id:
            new_id = os.urandom(4).hex()
        entry = Entry(what, new_id, self.leaf, utc_now(), data)
        self.add(entry)
        if self.handle is not None:
            self.write(entry.to_line())
        elif self.path and is_answer(entry):
            self.create()
        return entry

    def add(self, entry: Entry) -> None:
        """Puts an entry into the tree in memory."""
        self.entries.append(entry)
        self.by_id[entry.id] = entry
        self.below.setdefault(entry.parent_id, []).append(entry.id)
        if entry.type in ON_BRANCH:
            self.leaf = entry.id
        elif entry.type == "leaf" and entry.parent_id in self.by_id:
            self.leaf = entry.parent_id

    def describe(self, record: bool = True, **data: object) -> dict:
        """What the header tells, and these data where it does not tell them yet. Recorded, it
        tells them from now on, which counts as long as it is not written."""
        header = self.entries[0]
        kept = {name: header.data[name] for name, value in data.items()
                if isinstance(header.data.get(name), type(value))}
        header = replace(header, data={**header.data, **data, **kept})
        if record:
            self.entries[0] = self.by_id[header.id] = header
        return header.data

    def active_path(self) -> list[Entry]:
        """The branch: the entries from the header to the leaf."""
        path, entry_id = [], self.leaf
        while entry_id is not None:
            path.append(self.by_id[entry_id])
            entry_id = path[-1].parent_id
        return path[::-1]

    def children(self, entry_id: str | None) -> list[Entry]:
        """The entries that were added to this one, oldest first."""
        return [self.by_id[child] for child in self.below.get(entry_id, ())]

    def labels(self) -> dict[str, str]:
        """The labels: a name, and the id of the entry that it was last given to."""
        return {entry.data["label"]: entry.parent_id for entry in self.entries
                if entry.type == "label" and "label" in entry.data}

    def find(self, text: str) -> Entry:
        """The entry that a label, an id, or the start of one means. Raises SessionError."""
        text = self.labels().get(text, text)
        found = [self.by_id[text]] if text in self.by_id else \
            [entry for entry in self.entries if text and entry.id.startswith(text)]
        if len(found) != 1:
            raise SessionError(f"{len(found) or 'no'} entries of this session begin with "
                               f"{brief(text, 60)!r}", "/tree shows the ids and labels")
        return found[0]

    # ── Going back

    def moment(self, entry: Entry) -> Moment:
        """Where a rewind to an entry leads.

        To a message of the person: before it. To a rewind: before that, which undoes it. To
        anything else: on it.
        """
        position = next(i for i, other in enumerate(self.entries) if other is entry)
        if isinstance(entry.message, UserMessage):
            return Moment(entry.parent_id, position,
                          entry.message.content[:entry.data.get("typed")])
        if entry.type == "leaf" and entry.data.get("from_id") in self.by_id:
            return Moment(entry.data["from_id"], position, "")
        return Moment(entry.id if entry.type in ON_BRANCH else entry.parent_id, position + 1, "")

    def set_leaf(self, entry_id: str, files: Iterable[dict] = ()) -> Entry:
        """Goes on from another entry; KeyError if there is none of this id.

        `files` are changes that are made to files with it; see Workspace.undoing.
        """
        data = {"from_id": self.leaf, **({"files": list(files)} if files else {})}
        self.leaf = self.by_id[entry_id].id
        return self.append("leaf", **data)

    def changes(self, position: int) -> dict[str, dict]:
        """What was done to each file since there were so many entries, whatever the branch: what
        it was before, and what it was left as."""
        found: dict[str, dict] = {}
        for entry in self.entries[position:]:
            for change in entry.file_changes():
                first = found.setdefault(change["path"], change)
                found[change["path"]] = {**first, "after": change["after"]}
        return found

    def fork(self, home: Path | None) -> "Session":
        """The branch, copied to a session with a file of its own that names its parent."""
        header, *rest = self.active_path()
        cwd = str(header.data.get("cwd", ""))
        copy = Session.new(home, Path(cwd)) if home and cwd else Session(cwd=cwd)
        first = copy.entries[0]
        copy.describe(**{**header.data, **first.data, "parent_entry_id": self.leaf,
                         "parent_session": self.path.stem if self.path else ""})
        renamed, inside = {header.id: first.id}, {entry.id for entry in rest} | {header.id}
        for entry in self.entries[1:]:
            parent = renamed.get(entry.parent_id, entry.parent_id)
            if entry.id in inside or entry.type == "label" and entry.parent_id in inside:
                copy.add(replace(entry, parent_id=parent))
            elif changes := entry.file_changes():      # of another branch: what a rewind needs
                copy.add(replace(entry, type="leaf", parent_id=copy.leaf, data={"files": changes}))
        if copy.path and any(map(is_answer, rest)):
            copy.create()
        return copy


def is_answer(entry: Entry) -> bool:
    """Is it a message of the model that came whole? With the first one the file is made."""
    message = entry.message
    return isinstance(message, AssistantMessage) and message.stop_reason not in ("error", "aborted")


def session_id(path: Path) -> str:
    """The id in the name of a session's file, which finds it again."""
    return path.stem.rpartition("_")[2]


class Listed(typing.NamedTuple):
    """A session in a list: its file, when it was last written (Unix time), and what is in it."""
    path: Path
    modified: float
    messages: int
    first: str

    def to_json(self) -> dict:
        """It as it stands in lists for programs."""
        return {"id": session_id(self.path), "file": str(self.path), "modified": self.modified,
                "messages": self.messages, "first": self.first}


def sessions_folder(home: Path, workspace: Path) -> Path:
    """Where the sessions of a workspace lie; other paths may have the same name here."""
    slug = re.sub(r"[^\w.-]+", "-", str(workspace), flags=re.ASCII).strip("-")[-100:] or "root"
    return home / "sessions" / slug


def sessions_of(home: Path, workspace: Path) -> list[Path]:
    """The session files of a workspace, the last one first."""
    found = []
    for path in sessions_folder(home, workspace).glob("*.jsonl"):
        if not path.is_file() or not path.stat().st_size:
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:
            header = Session(cwd=None).take_line(file.readline())
            if header is None or header.data.get("cwd", "") in ("", str(workspace)):
                found.append(path)
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def list_sessions(home: Path, workspace: Path) -> list[Listed]:
    """The sessions of a workspace, the last one first. No file is loaded as a whole."""
    found = []
    for path in sessions_of(home, workspace):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            messages, first = 0, ""
            for line in file:
                if re.match(rb'\{"type": ?"message"', line):
                    messages += 1
                    entry = None if first else Session().take_line(line)
                    first = entry.message.content if entry and entry.message else first
            if messages:
                found.append(Listed(path, path.stat().st_mtime, messages, brief(first, 80)))
    return found


def newest_session(home: Path, workspace: Path) -> Path:
    """The file of this workspace's last session. Raises SessionError if there is none."""
    found = sessions_of(home, workspace)
    if not found:
        raise SessionError(f"there is no session of {workspace} yet", "start one without -c")
    return found[0]


def find_session(home: Path, text: str) -> Path:
    """The file that an id, the start of one, or a path means. Raises SessionError."""
    with contextlib.suppress(OSError, ValueError):
        if Path(text).is_file():
            return Path(text)
    found = [path for path in (home / "sessions").glob("*/*.jsonl")
             if text and re.match(rf"(.*_)?{re.escape(text)}", path.stem)]
    if len(found) != 1:
        raise SessionError(f"{count_of(len(found), 'session')} of that id: {brief(text, 80)}",
                           "give more of the id" if found else "give the id or the path of a "
                           f"session file; they lie in {home / 'sessions'}")
    return found[0]


# ─── Context ─────────────────────────────────────────────────────────────────────────────────────
# What the model sees: a system prompt, made once a session, and a projection of the branch. It is
# pure, so the same branch is always the same messages, and what was sent before is the beginning
# of what is sent next: a provider's cache keeps working. Only two kinds of entries change the past,
# when there is too much of it: clear_outputs, and compaction, which puts a summary in its place:
#
#     u1 a1 r1 a2 u2 a3 r3 a4 │ u3 a5 r5          the summary stands for what is left of the line;
#     ╰───── summary ────────╯                    never between a call (a) and its result (r)

SYSTEM_PROMPT = """You are tiny_agent, a coding agent. You work in the folder {folder} on {system} \
with the tools you are given; paths are relative to that folder.

How to work: look before you change anything: read a file before you edit it. After a change run \
or test it, if there is a way to. Do what was asked, no more; then say briefly what you did.

The program around you decides what may be done, by rules and modes that the person has set, and \
may ask the person. So always attempt the tool you need; never ask for permission in words. If a \
call is denied, explain what you wanted and why, and do not work around it. The modes: {modes}. \
The mode is now {mode}. Today is {date}."""


def system_prompt(workspace: Workspace, mode: str) -> str:
    """The system prompt of a new session: who, where, how, and the notes of AGENTS.md."""
    import platform
    text = SYSTEM_PROMPT.format(folder=workspace.root, system=platform.system(),
                                modes="; ".join(f"{m}: {what}" for m, what in MODES.items()),
                                **facts(workspace, mode))
    with contextlib.suppress(ToolError, OSError):
        notes = shown(Text(workspace.read_bytes(workspace.resolve("AGENTS.md")), "AGENTS.md").text)
        text += "\n\nAGENTS.md, the notes of this folder:\n" + notes.strip()[:workspace.limit]
    return text


# ── What changes meanwhile
# The system prompt stays as it is, so the news join the person's next message, each as a marked
# line. Its entry says in `told` what the model knows from then on, and in `typed` how much of the
# text is the person's own.

NOTE = "\n\n[note from the program: {}]"
FACTS = {"mode": "the mode is now {}", "date": "today is {}",
         "notes": "AGENTS.md has changed since you saw it"}


def facts(workspace: Workspace, mode: str) -> dict[str, str]:
    """What the model is told and may change: the mode, the date, a digest of the notes."""
    notes = None
    with contextlib.suppress(ToolError, OSError):
        notes = workspace.state(workspace.resolve("AGENTS.md"))
    return {"mode": mode, "date": time.strftime("%Y-%m-%d"), "notes": notes or ""}


def told_facts(entries: Iterable[Entry], header: dict) -> dict:
    """What the model was last told, by what it still sees of a branch and by the header."""
    told = {name: header.get(name) for name in FACTS}
    for entry in visible_part(list(entries))[1]:
        told |= entry.data.get("told", {})
        for change in entry.file_changes():
            if change["path"] == "AGENTS.md":
                told["notes"] = change["after"]
    return told


SUMMARY_HEAD = "Summary of the conversation so far:\n\n"


def visible_part(entries: list[Entry]) -> tuple[Entry | None, list[Entry]]:
    """(the last compaction on a branch, the entries that it kept and those since)"""
    last = next((entry for entry in reversed(entries) if entry.type == "compaction"), None)
    if last is None:
        return None, entries
    kept = next((place for place, entry in enumerate(entries)
                 if entry.id == last.data["first_kept_entry_id"]), entries.index(last))
    return last, entries[kept:]


def project(entries: Iterable[Entry]) -> list[Message]:
    """The messages that a branch means to a model, oldest first.

    The last compaction's summary stands in front of what it kept. Failed and empty replies are
    left out with their calls. Results follow their calls, in the order of the calls; a call
    without one gets one that says so, a result without a call is dropped.
    """
    last, entries = visible_part(list(entries))
    messages: list[Message] = [UserMessage(SUMMARY_HEAD + last.data["summary"])] if last else []
    spoken = with_outputs_cleared(entries)
    results: dict[tuple[int, str], ToolResultMessage] = {}     # by the place of the call's message
    caller: dict[str, int] = {}                                # the last message with a call's id
    for place, message in enumerate(spoken):
        if isinstance(message, AssistantMessage):
            caller |= {call.id: place for call in message.tool_calls}
        elif isinstance(message, ToolResultMessage) and message.tool_call_id in caller:
            results.setdefault((caller[message.tool_call_id], message.tool_call_id), message)
    for place, message in enumerate(spoken):
        if isinstance(message, UserMessage):
            messages.append(message)
        elif isinstance(message, AssistantMessage) and message.stop_reason not in (
                "error", "aborted") and (message.tool_calls or message.content.strip()):
            messages.append(message)
            messages += [results.get((place, call.id)) or ToolResultMessage(
                call.id, call.name, NO_RESULT, True) for call in message.tool_calls]
    if messages and not isinstance(messages[0], UserMessage):      # its line is damaged
        messages.insert(0, UserMessage(NO_BEGINNING))
    return messages


NO_BEGINNING = "(the beginning of this conversation is lost)"
NO_RESULT = "no result: the run was interrupted before this call ended"
SHORT_OUTPUT = 200           # characters; what is not longer is never cleared


def without_middle(text: str, most: int, mark: str) -> str:
    """The text, if it is not longer; else a third of `most` from its head and two from its tail,
    and between them a line that says how many characters are not there."""
    if len(text) <= most:
        return text
    head, tail = text[:most // 3], text[-(most * 2 // 3):]
    return f"{head}\n{mark.format(len(text) - len(head) - len(tail))}\n{tail}"


def with_outputs_cleared(entries: list[Entry]) -> list[Message]:
    """The messages of entries, with outputs as the clear_outputs entries after them want it:
    cleared up to `last_cleared_entry_id`, later ones clipped to `clip` characters."""
    place_of = {entry.id: place for place, entry in enumerate(entries)}
    messages, cleared, clip = [], -1, sys.maxsize
    for place in range(len(entries) - 1, -1, -1):
        entry, message = entries[place], entries[place].message
        if entry.type == "clear_outputs":
            cleared = max(cleared, place_of.get(entry.data.get("last_cleared_entry_id"), -1))
            clip = min(clip, max(entry.data.get("clip") or clip, SHORT_OUTPUT))
        elif isinstance(message, ToolResultMessage):
            length = len(message.content)
            if place <= cleared and length > SHORT_OUTPUT:
                message = replace(message, content=f"[cleared to save room: {length:,} characters; "
                                  "call the tool again if you need them]")
            elif length > clip:
                message = replace(message, content=without_middle(
                    message.content, clip, "[clipped to save room: {:,} characters more]"))
        if message:
            messages.append(message)
    return messages[::-1]


# ── How much it is
# In tokens: what the provider counted last, and about four characters a token for what came since.

CHARACTERS_A_TOKEN = 4


def size_of(message: Message) -> int:
    """About how many tokens a message takes."""
    size = len(message.content) + 16
    if isinstance(message, AssistantMessage):
        size += sum(len(call.name) + 16 + len(json.dumps(call.arguments))
                    for call in message.tool_calls)
        size += len(json.dumps(message.provider_data)) if message.provider_data else 0
    return size // CHARACTERS_A_TOKEN + 1


def size_of_fixed(system: str, tools: list[dict]) -> int:
    """About how many tokens the system prompt and the tools take."""
    return (len(system) + len(json.dumps(tools))) // CHARACTERS_A_TOKEN


def size_of_all(entries: Iterable[Entry]) -> int:
    """About how many tokens the messages of a branch take, as they are shown."""
    return sum(map(size_of, project(entries)))


def estimate(entries: list[Entry], fixed: int) -> int:
    """About how many tokens a request with this branch takes; `fixed` is size_of_fixed().

    A count of the provider's is used only if the past has not been changed since.
    """
    since = 0
    for entry in reversed(entries):
        if entry.type in ("compaction", "clear_outputs"):
            break
        usage = entry.message.usage if is_answer(entry) else None
        if usage and usage.input_tokens:
            return usage.input_tokens + usage.output_tokens + since
        since += size_of(entry.message) if entry.message else 0
    return fixed + size_of_all(entries)


# ── What gives way
# First the cheap step, older outputs; they can be had again. If that is not enough, a summary.

def first_recent(entries: list[Entry], keep: int, allowed: Callable[[int], bool]) -> int | None:
    """The first allowed place from which on there are no more than `keep` tokens; if there are
    more behind each of them, the last one. None if no place is allowed."""
    found, size = None, 0
    for place in range(len(entries) - 1, -1, -1):
        size += size_of(entries[place].message) if entries[place].message else 0
        if found is not None and size > keep:
            break
        if allowed(place):
            found = place
    return found


def plan_clearing(entries: list[Entry], keep: int) -> dict:
    """A clear_outputs entry that leaves about `keep` tokens of recent outputs, at least those of
    the last calls; if these alone are more, they are clipped."""
    entries = visible_part(entries)[1]
    calls = [place for place, entry in enumerate(entries) if is_answer(entry)
             and entry.message.tool_calls]
    start = first_recent(entries, keep, lambda place: place <= (calls[-1] if calls else place)) or 0
    outputs = [entry.message for entry in entries[start:]
               if isinstance(entry.message, ToolResultMessage)]
    long = [len(output.content) for output in outputs if len(output.content) > SHORT_OUTPUT]
    too_much = sum(map(size_of, outputs)) > keep and long
    return {"last_cleared_entry_id": entries[start - 1].id if start else None,
            "clip": max(SHORT_OUTPUT, keep * CHARACTERS_A_TOKEN // len(long)) if too_much else None}


def find_cut(entries: list[Entry], keep: int) -> int | None:
    """The place of the first entry that a compaction keeps: a message of the person or the model,
    with about `keep` tokens from there on, and no result that is cut off from its call. None if
    nothing would be left out."""
    start = len(entries) - len(visible_part(entries)[1])
    caller: dict[str, int] = {}
    answered: dict[int, int] = {}            # a message with calls -> the last of their results
    for place, entry in enumerate(entries):
        if is_answer(entry):
            caller |= {call.id: place for call in entry.message.tool_calls}
        elif isinstance(entry.message, ToolResultMessage) and entry.message.tool_call_id in caller:
            answered[caller[entry.message.tool_call_id]] = place
    allowed, open_until = set(), -1
    for place, entry in enumerate(entries):
        if place > max(start, open_until) and (
                is_answer(entry) or isinstance(entry.message, UserMessage)):
            allowed.add(place)
        open_until = max(open_until, answered.get(place, -1))
    place = first_recent(entries, keep, allowed.__contains__)
    return place if place is not None and project(entries[start:place]) else None


SUMMARY_REQUEST = """Do not go on with the task now. The older part of this conversation is about \
to be replaced by a summary that you write: what it leaves out is forgotten. Answer with the \
summary alone, as text, without calling a tool, in at most {words} words, under these headings, \
with "none" where there is nothing:

## Goal
## Constraints and preferences
## Done
## In progress
## Blocked
## Decisions
## Next steps
## Critical facts

Be exact about names, paths, numbers, commands and error messages. Carry on what still matters of \
an earlier summary. The files that were read and changed, and the person's last message, are added \
by the program.{wish}"""
SUMMARY_SYSTEM = "You write a summary of the work of a coding agent, for that agent to go on from."


def summary_request(room: int, wish: str) -> str:
    """What the model is asked for."""
    return SUMMARY_REQUEST.format(words=max(100, room // 8), wish=wish and
                                  f"\n\nThe person asks to keep in mind: {wish}")


def transcript(messages: Iterable[Message], limit: int) -> str:
    """A conversation as a text of about `limit` characters at the most, its middle left out."""
    def as_text(message: Message) -> str:
        if isinstance(message, UserMessage):
            return f"Person: {message.content}"
        if isinstance(message, ToolResultMessage):
            return f"Result of {message.tool_name}: {message.content}"
        calls = [f"Call: {call.name} {json.dumps(call.arguments)}" for call in message.tool_calls]
        return "\n".join([f"Model: {message.content}", *calls])

    def short(text: str, most: int) -> str:
        return without_middle(text, most, "[{:,} characters left out]")
    return short("\n\n".join(short(as_text(message), 4000) for message in messages), limit)


def files_touched(entries: Iterable[Entry]) -> dict[str, list[str]]:
    """The paths that were read, and those that were changed, by calls that succeeded."""
    touched: dict[str, dict[str, None]] = {"read": {}, "changed": {}}
    calls: dict[str, ToolCall] = {}
    for entry in entries:
        if is_answer(entry):
            calls |= {call.id: call for call in entry.message.tool_calls}
        elif isinstance(entry.message, ToolResultMessage) and not entry.message.is_error:
            call = calls.get(entry.message.tool_call_id)
            if call and call.name == "read_file" and isinstance(call.arguments, dict):
                touched["read"][str(call.arguments.get("path"))] = None
            for change in entry.file_changes():
                touched["changed"][change["path"]] = None
    return {kind: list(paths)[-100:] for kind, paths in touched.items()}


def whole_summary(text: str, entries: list[Entry], place: int) -> str:
    """The model's summary of what stands before a place, with what the program itself adds: the
    files, and the person's last message word for word if it is not among what is kept."""
    parts = [text.strip()]
    for kind, paths in files_touched(entries[:place]).items():
        if paths:
            parts.append(f"## Files {kind}\n" + "\n".join(f"- {path}" for path in paths))
    last = next((at for at in range(len(entries) - 1, -1, -1)
                 if isinstance(entries[at].message, UserMessage)), place)
    if last < place:
        parts.append("## The person's last message, word for word\n"
                     + entries[last].message.content)
    return "\n\n".join(parts)


# ─── Agent ───────────────────────────────────────────────────────────────────────────────────────
# The loop. run() is a generator of events: who iterates it drives it, and may stop at any time.
# One turn is a request, its reply and its calls, one after the other. How a run ended is data (the
# reason in run_end), not an exception; every failure of a tool is a sentence for the model. An
# entry is in the ledger before its event is told. Calls that only read run side by side. What is
# said meanwhile joins between two turns, where a history may be joined.

WAITS = (1, 2, 4, 8)         # seconds before a request is sent again, if the server names no time
MOST_ATTEMPTS = 5            # of one request, whatever went wrong
MOST_AT_ONCE = 8             # calls that only read, in threads
LONGEST_WAIT = 120           # seconds; a longer wait is not waited but reported
ANSWER_RESERVE = 8_000       # tokens of a known window that are left for the answer, or a quarter
REMARK_AFTER, END_AFTER = 3, 5       # calls in a row that are the same, with the same result


def drained(events: Iterator) -> object:
    """What a generator returns; what it yields is let go."""
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


def stopped_by_person() -> ProviderError:
    """The error of a run that stop() ended."""
    return ProviderError("aborted", "stopped by the person")


def answer_reserve(window: int) -> int:
    """Tokens of a context window that a request leaves free."""
    return min(window // 4, ANSWER_RESERVE)


@dataclass(frozen=True)
class Question:
    """What a person is asked: may this call run? `preview` is what it would do, `flags` what
    would allow it without asking, if anything would."""
    name: str
    arguments: dict
    preview: str
    reason: str
    flags: str


def nobody_to_ask(question: Question) -> str:
    """The answer where nobody can be asked: no, and how to allow it."""
    if not question.flags:
        return f"nobody can be asked here ({question.reason})"
    return f"nobody can be asked here. The person can allow it with {question.flags}"


class FileBack(typing.NamedTuple):
    """What a rewind would do to a file: give it the text `before` (None: remove it), unless
    `problem` says why not. `foreign`: somebody else has changed it since."""
    before: str | None
    problem: str
    foreign: bool


NO_TOTALS = {"turns": 0, "tool_calls": 0, "tool_failures": 0, "retries": 0, "compactions": 0,
             "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0, "cost": None,
             "seconds": 0.0}


class Agent:
    """A model at work in a workspace: `for event in agent.run("task"): ...`

    `approve(question)` gives True, False, or a text that says why not. `home` is where outputs and
    the audit go; None keeps nothing. `sandbox` is what decide() gets; "on" needs bubblewrap.
    """

    def __init__(self, provider: Provider, workspace: Workspace, *, mode: str = "ask",
                 rules: list[Rule] | None = None, approve: Callable = nobody_to_ask,
                 session: Session | None = None, home: Path | None = None, max_steps: int = 30,
                 budget: int = 16_000, sandbox: str = "off"):
        self.provider, self.workspace, self.mode = provider, workspace, mode
        self.rules = list(RULES if rules is None else rules)
        self.approve, self.home = approve, home
        self.max_steps, self.budget, self.sandbox = max_steps, budget, sandbox
        self.hooks, self.abort = Hooks(), Abort()
        self.tools = workspace.tools()
        self.begin(session or Session())
        workspace.sandboxed = sandbox == "on"
        workspace.hidden = [home] if home else []
        workspace.may_read = lambda path: not any(
            rule.decision == "deny" and rule_fits(rule, "read_file", path) for rule in self.rules)

    def begin(self, session: Session) -> None:
        """Goes on with another session."""
        self.session = session
        self.open_calls: list[ToolCall] = []     # of the last reply, without a result yet
        self.same: tuple = (None, 0)         # the last call with its result, and how many times
        if self.home and session.path:
            self.workspace.outputs = self.home / "outputs" / session.path.stem
        self.asides: list[str] = []          # what the model is told with the next message
        self.steering: deque[str] = deque()      # said while a run goes on, not heard yet
        self.follow_ups: deque[str] = deque()    # to be heard when the run would stop
        self.warned: set[str] = set()        # what was said once and need not be said again
        self.problem = ""                    # why the audit cannot be written, if it cannot
        self.totals = dict(NO_TOTALS)
        self.futile: tuple = ()              # where a compaction brought nothing; up to which size

    def stop(self) -> None:
        """Stops the run at once; from any thread or a signal handler."""
        self.abort.set()

    def steer(self, text: str) -> None:
        """Says something to a run that goes on, from any thread: it joins after the calls of the
        turn, and the run goes on with it. Where no turn follows (nothing runs; the run fails, is
        stopped or at its limit) it waits for the next run of this session, which hears it after
        its task; so `steering` holds what was not heard. Another session never hears it."""
        self.steering.append(text)

    def follow_up(self, text: str) -> None:
        """Says something that is to be heard when the run would stop, from any thread; then the
        run goes on with it, one text after the other, and its turns count on. Where no turn
        follows it waits in `follow_ups` for the end of the next run of this session."""
        self.follow_ups.append(text)

    def files_back(self, moment: Moment) -> dict[str, FileBack]:
        """What a rewind would do to files, by their paths; only to those that would change."""
        found = {}
        for path, change in self.session.changes(moment.position).items():
            before, why = change.get("before"), change.get("uncovered", "")
            if "before" not in change or not isinstance(before, str | None):
                found[path] = FileBack(None, why or "its old text is not in the ledger", False)
                continue
            try:
                now = self.workspace.state(self.workspace.recorded(path))
                then = digest(as_bytes(before))
            except (ToolError, OSError, UnicodeError) as error:
                found[path] = FileBack(None, str(error), False)
                continue
            if now != then:
                found[path] = FileBack(before, "", now != change["after"])
        return found

    def rewind(self, moment: Moment, files: dict[str, FileBack], *, conversation: bool = True,
               paths: Iterable[str] = ()) -> list[str]:
        """Goes back: the conversation, these files, or both; gives what failed, in sentences.

        It is in the ledger before a file is touched, with what undoes it. What the model could
        not know of its files is told with the next message.
        """
        records, failed, self.futile = {}, [], ()
        for path in paths:
            try:
                records[path] = self.workspace.undoing(self.workspace.recorded(path),
                                                       as_bytes(files[path].before))
            except (ToolError, OSError) as error:
                failed.append(f"{path} stays as it is: {error}")
        self.session.set_leaf(moment.leaf if conversation else self.session.leaf,
                              records.values())
        for path in list(records):
            try:
                self.workspace.put(self.workspace.recorded(path), as_bytes(files[path].before))
            except (ToolError, OSError) as error:
                failed.append(f"{path} stays as it is: {error}")
                del records[path]
        what = "files were brought back" if not conversation else "later changes stayed in"
        told = records if not conversation else files.keys() - records.keys()
        if told:
            self.asides.append(f"the person went back; {what}: {', '.join(sorted(told))}")
        return failed

    # ── A run

    def run(self, task: str) -> Iterator[Event]:
        """Works on a task and yields what happens, from run_start to run_settled."""
        self.abort = self.workspace.abort = Abort()          # now, so that stop() counts from now
        return self.events_of(task)

    def events_of(self, task: str) -> Iterator[Event]:
        started, self.answer = time.monotonic(), ""
        self.totals = dict(NO_TOTALS)
        self.prepare()
        yield RunStart(self.session.file, self.provider.name, self.provider.model, self.mode,
                       str(self.workspace.root))
        yield from self.warnings(self.hooks.call("run_start", task)[1])
        yield from self.hear(task)
        yield from self.hear_all(self.steering)
        try:
            reason, error = yield from self.turns()
        finally:
            for call in self.open_calls:                     # the run was closed, or broke
                self.finish(call, None, Outcome("not finished: the run was closed", True))
        yield from self.warnings(self.hooks.call("run_end", reason)[1])
        yield RunEnd(reason, error)
        self.totals["seconds"] = round(time.monotonic() - started, 3)
        yield RunSettled(reason, error, self.answer, self.session.file, dict(self.totals))

    def prepare(self, record: bool = True) -> None:
        """Makes what is told with every request, once a session: system prompt and tools.

        Not recorded, it is only what would be told if the session began now.
        """
        tools = [tool_schema(function) for function in self.tools.values()]
        self.told = self.session.describe(
            record, system=system_prompt(self.workspace, self.mode), tools=tools,
            own_address=self.provider.has_own_address(), **facts(self.workspace, self.mode))
        if not all(isinstance(told, dict) and told.keys() >= {"name", "description", "parameters"}
                   for told in self.told["tools"]):
            self.told = {**self.told, "tools": tools}        # a damaged header
        self.fixed = size_of_fixed(self.told["system"], self.told["tools"])

    def turns(self) -> Iterator[Event]:
        """Takes turns until the model asks for nothing more; returns (reason, error)."""
        for turn in range(1, self.max_steps + 1):
            yield from self.make_room("budget")
            if self.abort.done:
                return "aborted", stopped_by_person().to_json()
            self.totals["turns"] = turn
            yield TurnStart(turn)
            message, error = yield from self.ask_model()
            while self.open_calls:
                yield from self.use_tools(self.next_calls(), message.stop_reason == "length")
            yield TurnEnd(turn)
            if error:
                return "aborted" if error.kind == "aborted" else "error", error.to_json()
            if self.abort.done:
                return "aborted", stopped_by_person().to_json()
            if message.stop_reason == "length":
                return "length", None
            if not (message.tool_calls or self.steering or self.follow_ups):
                return "stop", None
            if turn < self.max_steps:        # else nobody would answer
                if not (yield from self.hear_all(self.steering)) and not message.tool_calls:
                    yield from self.hear_all(self.follow_ups, 1)
            if self.same[1] >= END_AFTER:
                return "max_steps", {
                    "kind": "max_steps", "message": f"gave up: the same call of {self.same[0][0]} "
                    f"gave the same result {self.same[1]} times in a row",
                    "hint": "say what should be done differently, or try another model"}
        return "max_steps", None

    def hear(self, text: str) -> Iterator[Event]:
        """A message of the person, with what is new since the last one."""
        self.same = (None, 0)                # it may well make the same call useful
        text, now = mask(text), facts(self.workspace, self.mode)
        told = told_facts(self.session.active_path(), self.told)
        news = {name: value for name, value in now.items() if told[name] != value}
        notes = [FACTS[name].format(value) for name, value in news.items()] + self.asides
        self.asides = []
        more = {"told": news, "typed": len(text)} if notes else {}
        yield from self.record(UserMessage(text + "".join(map(NOTE.format, notes))), **more)

    def hear_all(self, waiting: deque, most: int = sys.maxsize) -> Iterator[Event]:
        """Takes up what waits, in order; returns whether there was anything."""
        heard = 0
        while waiting and heard < most:
            heard += 1
            yield from self.hear(waiting.popleft())
        return heard > 0

    def record(self, message: Message, **more: object) -> Iterator[Event]:
        """A message that is there at once: into the ledger, then told."""
        self.session.append(message, **more)
        yield MessageStart(message)
        yield MessageEnd(message)

    def warnings(self, problems: Iterable[str]) -> Iterator[Event]:
        """Each problem as a warning, once a session."""
        for problem in problems:
            if problem and problem not in self.warned:
                self.warned.add(problem)
                yield Warned(problem)

    # ── The model

    def ask_model(self) -> Iterator[Event]:
        """Asks for the next message of the conversation; returns (message, error).

        If it is too long for the model, it is compacted, and sent once more.
        """
        for last_try in (False, True):
            message, error, begun = yield from self.with_retries(self.converse)
            too_long = error is not None and error.kind == "overflow"
            if last_try or not too_long or not (yield from self.make_room("overflow")):
                break
        if error is None:
            yield from self.check_window()
        elif not begun:
            yield from self.record(message)
        return message, error

    def with_retries(self, send: Callable) -> Iterator[Event]:
        """Sends a request until there is a reply or no hope; returns what `send` did."""
        failed: dict[tuple, int] = {}
        for attempt in itertools.count(1):
            message, error, begun = yield from send()
            if error is None:
                return message, None, begun
            same = error.kind, error.attempts            # failures of another kind count apart
            failed[same] = failed.get(same, 0) + 1
            delay = error.delay if error.delay is not None else \
                WAITS[min(attempt, len(WAITS)) - 1] * random.uniform(0.9, 1.1)
            over = attempt >= MOST_ATTEMPTS or failed[same] >= error.attempts
            if over or delay > LONGEST_WAIT:
                if not over:
                    error.hint = f"the server asks to wait {delay:,.0f} s; try again after that"
                return message, error, begun
            self.totals["retries"] += 1
            yield Retry(attempt, round(delay, 3), {"kind": error.kind, "message": error.message})
            if not self.abort.sleep(delay):
                error = stopped_by_person()
                return replace(message, stop_reason="aborted",
                               error_message=error.message), error, False

    def converse(self) -> Iterator[Event]:
        """One request of the conversation; returns (message, error, had a message begun?).

        A message that began is in the ledger when this returns, as whole as it has become.
        """
        try:
            message, error, begun = yield from self.request(
                self.told["system"], project(self.session.active_path()), self.told["tools"])
        except BaseException:           # who watched has gone: keep what there is
            self.session.append(replace(self.partial, stop_reason="aborted",
                                        error_message="the run was closed"))
            raise
        if error is None:
            self.answer = message.content.strip() or self.answer
            self.open_calls = list(message.tool_calls)
        if begun:
            self.session.append(message)
            yield MessageEnd(message)
        yield from self.warnings([self.session.problem, self.problem])
        return message, error, begun

    def request(self, system: str, messages: list[Message],
                tools: list[dict]) -> Iterator[Event]:
        """Sends a request once and tells what comes; returns as converse() does."""
        begun, error, text = False, None, ""
        message = AssistantMessage(provider=self.provider.name, model=self.provider.model)
        self.partial = message
        stream = self.provider.stream(system, messages, tools, self.abort)
        try:
            for item in stream:
                if not begun and not isinstance(item, Failed):
                    begun = True
                    yield MessageStart(message)
                if isinstance(item, (Done, Failed)):
                    message, error = item.message, getattr(item, "error", None)
                    break
                text += item.delta if isinstance(item, TextDelta) else ""
                self.partial = replace(message, content=text)
                yield item
        except Exception as problem:    # a provider may be anybody's code
            error = ProviderError("server", f"the provider failed: {type(problem).__name__}: "
                                  f"{problem}")
            message = replace(self.partial, stop_reason="error", error_message=error.message)
        finally:
            stream.close()
        self.count(message.usage)
        return message, error, begun

    def count(self, usage: Usage | None) -> None:
        if usage:
            for name in ("input_tokens", "output_tokens", "cached_tokens"):
                self.totals[name] += getattr(usage, name)
            if usage.cost is not None:
                self.totals["cost"] = (self.totals["cost"] or 0) + usage.cost

    def check_window(self) -> Iterator[Event]:
        """Once a session: is the model's window smaller than what we may send?"""
        if "window" in self.warned or "windows" not in self.provider.habits:
            return
        self.warned.add("window")
        window = self.provider.find_window(self.abort)
        if window and window - answer_reserve(window) < self.budget:
            yield Warned(f"{self.provider.name} gives {self.provider.model} only {window:,} "
                         "tokens, so requests stay below the budget; for more set "
                         "OLLAMA_CONTEXT_LENGTH=32768 for `ollama serve`")

    # ── Room in the context

    def room(self) -> int:
        """Tokens that a request may take: the budget, or what a known window leaves; but more
        than system prompt and tools take alone, since something must be said as well."""
        window = self.provider.window
        wanted = max(self.budget, self.fixed + self.budget // 2)
        return min(wanted, window - answer_reserve(window)) if window else wanted

    def use_of_budget(self) -> float:
        """How full the context is: 1.0 is where it is compacted."""
        self.prepare(record=False)
        return estimate(self.session.active_path(), self.fixed) / max(1, self.room())

    def compact(self, wish: str = "") -> Iterator[Event]:
        """Compacts the conversation now, outside of a run, and yields what happens."""
        self.abort = self.workspace.abort = Abort()          # now, so that stop() counts from now
        self.prepare()
        return self.make_room("manual", wish)

    def make_room(self, reason: str, wish: str = "") -> Iterator[Event]:
        """Makes a request smaller, if it is over the budget or for another reason; returns
        whether it did."""
        entries, room = self.session.active_path(), self.room()
        size = estimate(entries, self.fixed)
        if self.fixed > self.budget // 2:
            yield from self.warnings([f"the budget of {self.budget:,} tokens is too small: system "
                                      f"prompt and tools alone take about {self.fixed:,}; give "
                                      f"--budget {self.fixed * 4 // 1000 + 1}000 or more"])
        if reason == "budget" and (size <= room or self.is_futile(size, room)):
            return False
        if reason == "overflow":
            room = min(room, size * 2 // 3)
        keep = min(room, size) // 3
        self.futile = ()
        if reason != "manual" and (yield from self.clear(reason, room * 3 // 4, keep)):
            return True
        can_send = reason != "overflow" and (
            not self.provider.window or size < self.provider.window * 3 // 4)
        data, problem = yield from self.summarise(entries, keep, summary_request(room, wish),
                                                  min(room, size // 2), can_send)
        if data:
            entry = self.session.append("compaction", **data)
            yield self.compacted(reason, size, entry.data["first_kept_entry_id"])
            if self.size() > room:
                yield from self.clear(reason, self.size(), keep)
        elif not self.abort.done:
            yield Compaction(reason, size, size, None, problem)
        if self.size() > room and not self.abort.done:
            self.futile = self.place_of_work(room), size + keep
            yield from self.warnings([
                f"the conversation takes about {self.size():,} tokens, more than the budget of "
                f"{room:,}, and cannot be made smaller; a larger --budget, /rewind or /new helps"])
        return bool(data)

    def size(self) -> int:
        return estimate(self.session.active_path(), self.fixed)

    def place_of_work(self, room: int) -> tuple:
        return self.provider.name, self.provider.model, room, self.session.entries[0].id

    def is_futile(self, size: int, room: int) -> bool:
        """Did compacting bring nothing, and has little changed since?"""
        return bool(self.futile) and self.futile[0] == self.place_of_work(room) \
            and size < self.futile[1]

    def compacted(self, reason: str, before: int, first_kept: str | None) -> Event:
        self.totals["compactions"] += 1
        return Compaction(reason, before, self.size(), first_kept, None)

    def clear(self, reason: str, target: int, keep: int) -> Iterator[Event]:
        """The cheap step: older outputs are cleared, if that leads to the target in tokens;
        returns whether it did."""
        entries = self.session.active_path()
        plan = plan_clearing(entries, keep)
        trial = [*entries, Entry("clear_outputs", "", None, "", plan)]
        before, after = size_of_all(entries), size_of_all(trial)
        size = estimate(entries, self.fixed)
        if after >= before or size * (self.fixed + after) // (self.fixed + before) > target:
            return False
        self.session.append("clear_outputs", **plan)
        yield self.compacted(reason, size, None)
        return True

    def summarise(self, entries: list[Entry], keep: int, wanted: str, most: int,
                  can_send: bool) -> Iterator[Event]:
        """Has the older part summarised; returns (the data of a compaction entry or None, why
        there is none).

        It is asked for at the end of the same conversation, which the provider's cache knows; if
        that cannot be sent, in a request of its own with at most so many tokens.
        """
        place = find_cut(entries, keep)
        if place is None:
            return None, "there is nothing older that could be left out"
        requests = [(self.told["system"], [*project(entries), UserMessage(wanted)],
                     self.told["tools"])] if can_send else []
        for limit in (most, most // 4):
            text = transcript(project(entries[:place]), limit * CHARACTERS_A_TOKEN)
            requests.append((SUMMARY_SYSTEM, [UserMessage(
                f"{wanted}\n\nThe conversation:\n\n{text}")], []))
        for what in requests:
            message, error, _ = yield from self.with_retries(functools.partial(self.aside, *what))
            if error is None or error.kind != "overflow":
                break
        text = message.content.strip()
        problem = f"the summary failed: {error.message}" if error else \
            "a tool was called instead of a summary" if message.tool_calls else \
            "the summary is empty" if not text else \
            "the summary was cut off" if message.stop_reason == "length" else ""
        data = {"summary": whole_summary(text, entries, place),
                "first_kept_entry_id": entries[place].id}
        trial = [*entries, Entry("compaction", "", None, "", data)]
        if not problem and size_of_all(trial) >= size_of_all(entries):
            problem = "the summary does not make it smaller"
        return (None, problem) if problem else (data, "")

    def aside(self, *what: object) -> Iterator[Event]:
        """One request beside the conversation, of which nothing is told; returns as request()."""
        yield from ()
        return drained(self.request(*what))

    # ── Tool calls

    def next_calls(self) -> list[ToolCall]:
        """The calls that are due: one, or those next to each other that only read."""
        reading = list(itertools.takewhile(lambda call: call.name in READ_ONLY, self.open_calls))
        return reading or self.open_calls[:1]

    def use_tools(self, calls: list[ToolCall], cut_off: bool) -> Iterator[Event]:
        """Decides about calls, runs those that may, and gives each its one result, in order."""
        judged = []
        for call in calls:
            judged.append((call, *(yield from self.start_call(call, cut_off))))
        self.workspace.read_only = self.mode == "plan"
        begun = time.monotonic()
        with self.side_by_side(judged) as ahead:
            for place, (call, decision, arguments, refusal) in enumerate(judged):
                if place in ahead:
                    outcome, seconds = self.result_of(ahead[place], begun)
                elif refusal:
                    outcome, seconds = Outcome(refusal, True), 0.0
                else:
                    outcome, seconds = yield from self.run_tool(call, arguments)
                yield from self.end_call(call, decision, arguments, outcome, seconds)

    @contextlib.contextmanager
    def side_by_side(self, judged: list[tuple]) -> Iterator[dict[int, queue.SimpleQueue]]:
        """Within, calls run in threads, if there are several; gives where their results come, by
        their place. Who replaces a tool that only reads gets it called in threads too.

        The threads are not waited for at exit, since a file system that hangs may hold one.
        """
        ahead: dict[int, queue.SimpleQueue] = {
            place: queue.SimpleQueue() for place, (call, *_, refusal) in enumerate(judged)
            if not refusal and len(judged) > 1 and self.may_run_beside(call)}
        waiting = deque(ahead)

        def work() -> None:
            with contextlib.suppress(IndexError):            # nothing waits any more
                while True:
                    place = waiting.popleft()
                    call, _, arguments, _ = judged[place]
                    ahead[place].put(drained(self.run_tool(call, arguments)))
        for _ in range(min(MOST_AT_ONCE, len(ahead))):
            threading.Thread(target=work, daemon=True).start()
        try:
            yield ahead
        finally:
            waiting.clear()

    def may_run_beside(self, call: ToolCall) -> bool:
        """May it run in a thread? Not grep, since only a signal, in the main thread, can end a
        match that takes too long; and not a generator, whose output is told as it comes."""
        return call.name != "grep" and not inspect.isgeneratorfunction(self.tools[call.name])

    def result_of(self, inbox: queue.SimpleQueue, begun: float) -> tuple[Outcome, float]:
        """(the Outcome, seconds) from a thread. After a stop, one that is not done is left to
        itself, whatever holds it."""
        try:
            with self.abort.calling(lambda: inbox.put(None)):
                result = inbox.get()
        except KeyboardInterrupt:
            self.abort.set()
            result = None
        return result or (Outcome("stopped, interrupted by the person", True),
                          round(time.monotonic() - begun, 3))

    def start_call(self, call: ToolCall, cut_off: bool) -> Iterator[Event]:
        """Decides about a call; returns (the decision, the arguments, the refusal or "")."""
        if self.abort.done or cut_off:
            why = "the person stopped the run" if self.abort.done else \
                "the reply was cut off by its length limit"
            return None, {}, f"not run: {why}"
        decision, arguments, refusal = self.judge(call)
        yield ToolStart(call.id, call.name, call.arguments, decision.decision,
                        str(decision.rule) if decision.rule else None, decision.reason)
        return decision, arguments, refusal

    def end_call(self, call: ToolCall, decision: Decision | None, arguments: dict,
                 outcome: Outcome, seconds: float) -> Iterator[Event]:
        """Records and tells what came of a call; a call that did not start has no decision."""
        result = self.finish(call, decision, outcome)
        if decision:
            yield ToolEnd(call.id, call.name, result.is_error, result.content, seconds)
            if decision.decision == "allow":
                yield from self.warnings(self.hooks.call("after_tool", call.name, arguments,
                                                         result.content)[1])
        yield MessageStart(result)
        yield MessageEnd(result)

    def finish(self, call: ToolCall, decision: Decision | None, outcome: Outcome) -> Message:
        """The result of a call, in the ledger and in the audit."""
        result = ToolResultMessage(call.id, call.name, mask(outcome.content.strip("\n"))
                                   or "(no output)", outcome.is_error, outcome.details)
        result = self.remark_repetition(call, result)
        self.open_calls = [other for other in self.open_calls if other is not call]
        self.totals["tool_calls"] += 1
        self.totals["tool_failures"] += result.is_error
        self.audit(call, decision, result)
        self.session.append(result)
        return result

    def remark_repetition(self, call: ToolCall, result: Message) -> Message:
        """The result, with a remark if the same call has brought it several times in a row."""
        varies = re.compile(r" \(\d+\.\d s\)$|" + re.escape(str(self.workspace.outputs))
                            + r"\W\w+\.txt", re.M)         # how long it took, where the whole is
        this = call.name, json.dumps(call.arguments, sort_keys=True), \
            varies.sub("", result.content)
        self.same = this, self.same[1] + 1 if self.same[0] == this else 1
        if self.same[1] < REMARK_AFTER:
            return result
        return replace(result, content=f"{result.content}\n[the same call brought the same result "
                       f"{self.same[1]} times in a row; try something else, or say what is in the "
                       "way]")

    def judge(self, call: ToolCall) -> tuple[Decision, dict, str]:
        """(the decision, the checked arguments, the refusal for the model or "")

        The schema first, then the hooks, then the rules, then the person.
        """
        def refuse(reason: str, text: str, rule: Rule | None = None) -> tuple[Decision, dict, str]:
            return Decision("deny", reason, rule), {}, text

        function = self.tools.get(call.name)
        if function is None:
            return refuse("no such tool", f"there is no tool {call.name!r}; the tools are "
                          f"{', '.join(self.tools)}")
        if not isinstance(call.arguments, dict):
            return refuse("the arguments are not a JSON object",
                          "the call was not run: its arguments are not a JSON object: "
                          f"{brief(str(call.raw_arguments or call.arguments))}")
        try:
            arguments = check_arguments(function, call.arguments)
        except ToolError as error:
            return refuse("the arguments do not fit", f"the call was not run: {error}")
        vetoes, problems = self.hooks.call("before_tool", call.name, arguments)
        if vetoes or problems:
            text = (vetoes or problems)[0]
            return refuse(f"a hook: {text}", f"denied: {text}")
        decision = decide(call.name, arguments, self.mode, rules=self.rules,
                          workspace=self.workspace, sandbox=self.sandbox)
        if decision.decision == "deny":
            return decision, arguments, f"denied: {decision.reason}"
        if decision.decision == "allow":
            return decision, arguments, ""
        try:
            answer = self.approve(Question(
                call.name, arguments, self.workspace.preview(call.name, arguments),
                decision.reason, "" if decision.rule else self.flags_for(call.name)))
        except Exception as error:      # who asks may be anybody's code; no answer is a no
            answer = f"the question failed: {type(error).__name__}: {error}"
        if answer is True:
            return decision._replace(decision="allow", reason="the person said yes"), arguments, ""
        why = answer if isinstance(answer, str) and answer else "the person said no"
        return decision._replace(decision="deny", reason=why), arguments, f"denied: {why}"

    def flags_for(self, name: str) -> str:
        """What would allow a call that no rule speaks of."""
        if self.mode == "plan":
            return f"--allow '{name}:PATTERN'"
        if name == "shell":
            return "--mode auto" + (" --sandbox off" if self.sandbox == "none" else "")
        return f"--mode auto or --allow '{name}:*'"

    def run_tool(self, call: ToolCall, arguments: dict) -> Iterator[Event]:
        """Runs an allowed call, telling its output as it comes; returns (the Outcome, seconds)."""
        started = time.monotonic()
        outcome = yield from self.outcome_of(call, arguments)
        return outcome, round(time.monotonic() - started, 3)

    def outcome_of(self, call: ToolCall, arguments: dict) -> Iterator[Event]:
        abort = self.abort                   # of this run, which a thread may outlive
        if abort.done:
            return Outcome("not run: the person stopped the run", True)
        try:
            outcome = self.tools[call.name](**arguments)
            if inspect.isgenerator(outcome):
                with contextlib.closing(outcome) as pieces:
                    outcome = yield from self.tell_output(call, pieces)
            if not isinstance(outcome, Outcome):
                outcome = Outcome("" if outcome is None else str(outcome))
            return replace(outcome, content=self.workspace.clip(outcome.content, call.name))
        except KeyboardInterrupt:
            abort.set()
            return Outcome("stopped, interrupted by the person", True)
        except ToolError as error:
            return Outcome(str(error), True)
        except OSError as error:
            return Outcome(f"{error.strerror or error}: {error.filename or call.name}", True)
        except (Exception, SystemExit) as error:      # a tool may be anybody's code
            return Outcome(f"the tool failed: {type(error).__name__}: {error}", True)

    def tell_output(self, call: ToolCall, pieces: Iterator) -> Iterator[Event]:
        """Tells what a tool yields; returns what it returns."""
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                return end.value
            yield ToolOutput(call.id, str(piece))

    def audit(self, call: ToolCall, decision: Decision | None, result: Message) -> None:
        """One line in <home>/audit.jsonl for every call asked for, whatever became of it."""
        if not self.home:
            return
        line = {"at": utc_now(), "tool": call.name,
                "args": call.arguments if call.raw_arguments is None else call.raw_arguments,
                "decision": decision.decision if decision else "not run",
                "rule": str(decision.rule) if decision and decision.rule else None,
                "result": result.content[:200]}
        try:
            path = make_folders(self.home) / "audit.jsonl"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, (mask(json.dumps(line)) + "\n").encode("ascii"))
            finally:
                os.close(handle)
        except OSError as error:
            self.problem = f"the audit cannot be written: {error.strerror}"


# ─── Showing events ──────────────────────────────────────────────────────────────────────────────
# Part II: who reads events. The answer goes to stdout, everything else to stderr, so that a pipe
# gets the answer alone. What comes from a model, a file or a server is made visible() before it is
# shown on a terminal. Lines that were shown stay; below them, on a terminal that can erase, stand
# passing lines while nothing else is shown: the last ones of a running command, and how long it
# has been. Left out: any other redrawing.

DIM, RED, BOLD, PLAIN_STYLE = "\033[2m", "\033[31m", "\033[1m", "\033[0m"
ERASE_LINE, LINE_UP, NO_WRAP, WRAP = "\r\033[K", "\033[A", "\033[?7l", "\033[?7h"


def can_erase(stream: typing.TextIO) -> bool:
    """May escape sequences be written there?"""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: typing.TextIO) -> bool:
    """May it be coloured? (https://no-color.org)"""
    return can_erase(stream) and not os.environ.get("NO_COLOR")


def fold(text: str, lines: int = 60, columns: int = 1000) -> str:
    """The text with the middle of long lines, and of many lines, left out, and how much that is."""
    def fold_line(line: str) -> str:
        if len(line) <= columns:
            return line
        head, tail = line[:columns * 2 // 3], line[-(columns // 3):]
        return f"{head} [… {len(line) - len(head) - len(tail):,} characters more …] {tail}"
    found = [fold_line(re.sub(r" {80,}", lambda m: f" [… {len(m[0]):,} blanks …] ", line))
             for line in text.split("\n")]
    if len(found) > lines:
        left = len(found) - lines + 1
        found[lines * 2 // 3:-(lines // 3 - 1)] = [f"[… {left:,} lines more …]"]
    return "\n".join(found)


class Screen:
    """Shows events to a person: text as it streams, one line for a tool call and its outcome."""

    def __init__(self, out: typing.TextIO, err: typing.TextIO):
        self.out, self.err = out, err
        self.live = out.isatty()             # is there somebody to see the answer grow?
        self.colour, self.erases = has_colour(err), can_erase(err)
        self.open_line = ""                  # the style of text that has not ended its line
        self.asked = False                   # has the person seen this call already?
        self.lock = threading.Lock()         # held while something is printed
        self.passing: list[str] = []         # the passing lines that are there now
        self.since: float | None = None      # when something was last shown; None: nothing passes
        self.running, self.last_output = False, ""       # of a tool
        self.begun: dict[str, str] = {}      # calls that have no result yet, in short
        self.several = False                 # are there more than one?
        self.tokens = 0.0                    # of the conversation, estimated

    def style(self, code: str, text: str) -> str:
        return f"{code}{text}{PLAIN_STYLE}" if self.colour else text

    def say(self, text: str = "", code: str = "") -> None:
        """A line for the person, on stderr."""
        self.end_line()
        text = visible(mask(text))
        self.write((self.style(code, text) if code else text) + "\n", self.err)

    def end_line(self) -> None:
        if self.open_line:
            self.write("\n", self.out if self.live else self.err)
            self.open_line = ""

    def stream(self, text: str, code: str, file: typing.TextIO) -> None:
        """A piece of text that goes on where the last one of its style ended."""
        if self.open_line != code:
            self.end_line()
        text = visible(mask(text))
        if text:
            self.write(self.style(code, text), file)
            self.open_line = "" if text.endswith("\n") else code

    def write(self, text: str, file: typing.TextIO) -> None:
        """Prints a text that stays, in the place of what only passes."""
        with self.lock:
            self.erase()
            print(text, end="", file=file, flush=True)
            self.since = time.monotonic()

    # ── What passes

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, a thread of its own draws passing lines while nothing else is shown."""
        over = threading.Event()

        def redraw() -> None:
            with contextlib.suppress(OSError, ValueError):       # the terminal has gone
                while not over.wait(0.2):
                    self.draw()
        self.since = time.monotonic()
        if self.erases:
            threading.Thread(target=redraw, daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self.hush()

    def hush(self) -> None:
        """Nothing passes until the next text that stays: the person has the terminal."""
        with self.lock:
            self.erase()
            self.since = None

    def erase(self) -> None:
        import shutil
        if self.passing:                     # a window that has become narrower breaks lines
            columns = max(1, shutil.get_terminal_size().columns)
            rows = sum(max(1, -(-len(line) // columns)) for line in self.passing)
            print(ERASE_LINE + (LINE_UP + ERASE_LINE) * (rows - 1), end="", file=self.err,
                  flush=True)
            self.passing = []

    def draw(self) -> None:
        """Draws the passing lines, if they are others than before."""
        import shutil
        with self.lock:
            if self.since is None or self.open_line:
                return
            seconds = int(time.monotonic() - self.since)
            if not seconds and not self.last_output:
                return
            size = shutil.get_terminal_size()
            room = max(10, size.columns - 5)
            output = [line.rstrip("\r").rpartition("\r")[2]     # of a progress bar its last state
                      for line in self.last_output.split("\n") if line.strip()]
            lines = [f"  | {brief(line, room)}" for line in output[-3:]] if size.lines > 5 else []
            what = "running" if self.running else "waiting"
            lines.append("  " + brief(f"{what} {seconds} s, about {self.tokens:,.0f} tokens", room))
            if lines != self.passing:
                self.erase()                 # each is one row, however wide its letters may be
                print(NO_WRAP + self.style(DIM, "\n".join(lines)) + WRAP, end="", file=self.err,
                      flush=True)
                self.passing = lines

    def follow(self, event: Event) -> None:
        """Keeps in mind what the passing lines tell."""
        match event:
            case TextDelta(delta) | ThinkingDelta(delta) | ToolcallDelta(delta=delta):
                self.tokens += len(delta) / 4
            case MessageEnd(UserMessage(content) | ToolResultMessage(content=content)):
                self.tokens += len(content) / 4
            case MessageEnd(AssistantMessage(usage=Usage() as usage)):
                self.tokens = usage.input_tokens + usage.output_tokens
            case Compaction(after=after):
                self.tokens = after
            case ToolStart() | ToolEnd():
                self.running, self.last_output = isinstance(event, ToolStart), ""
            case ToolOutput(text=text):
                self.last_output = (self.last_output + text)[-4000:]

    # ── What stays

    def show(self, event: Event) -> None:
        """Shows one event."""
        self.follow(event)
        match event:
            case TextDelta(delta) if self.live:
                self.stream(delta, PLAIN_STYLE, self.out)
            case ThinkingDelta(delta) if self.err.isatty():
                begins = self.open_line != DIM and not self.colour
                self.stream(f"thinking: {delta}" if begins else delta, DIM, self.err)
            case MessageEnd(AssistantMessage(content=text, tool_calls=calls)) if not self.live:
                if text.strip() and calls:
                    self.say(text.strip(), DIM)
            case MessageEnd(AssistantMessage()) | ToolcallStart():
                self.end_line()
            case ToolStart():
                self.begun[event.id] = call_in_short(event.name, event.arguments)
                self.several = len(self.begun) > 1
                self.say(f"- {self.begun[event.id]}", BOLD)
            case ToolEnd(name=name, is_error=is_error, content=content, seconds=seconds):
                call = self.begun.pop(event.id, name)
                first, *more = content.splitlines()
                first = f"{call}: {first}" if self.several else first
                time_taken = f" ({seconds:.1f} s)" if seconds >= 0.1 and name != "shell" else ""
                more = [line for line in more if line.strip()] if name == "shell" else []
                left = f", {count_of(len(more), 'line')}, of which the last" if more[2:] else ""
                self.say(f"  {brief(first, 300)}{time_taken}{left}", RED if is_error else DIM)
                for line in more[-2:]:
                    self.say(f"  | {brief(line, 300)}", DIM)
            case MessageEnd(ToolResultMessage(details=details)):
                if "diff" in details and not self.asked:
                    diff = fold(details["diff"], 20, 200).split("\n")
                    self.say("\n".join("  " + line for line in diff), DIM)
                self.asked = False
            case Retry(attempt, delay, error):
                self.say(f"attempt {attempt} failed: {error['message']}; the next one "
                         f"{f'in {delay:.0f} s' if delay else 'follows'}", DIM)
            case Compaction(error=None, before=before, after=after):
                self.say(f"compacted: about {before:,} tokens became {after:,}", DIM)
            case Compaction(error=error):
                self.say(f"not compacted: {error}", RED)
            case Warned(message):
                self.say(f"warning: {message}", RED)
            case RunEnd(reason, error):
                self.end_line()
                for line in ending_in_words(reason, error):
                    self.say(line, RED)
            case RunSettled(totals=totals) if self.live and totals["input_tokens"]:
                self.say(f"  {totals_in_words(totals)}", DIM)


def explain(decision: Decision) -> list[str]:
    """How it was decided, in lines: the whole, then each part of a command line."""
    return [f"{decision.decision}: {decision.reason}", *(
        f"  {part['decision']:5} {part['text']}   ({part['reason']})" for part in decision.parts)]


def call_in_short(name: str, arguments: dict | None) -> str:
    """A call in a line: shell python3 fib.py."""
    values = [value if isinstance(value, str) else json.dumps(value)
              for value in (arguments or {}).values()]
    first = values[0] if values else ""
    return f"{name} {brief(first, 120)}{' …' if len(values) > 1 else ''}"


def in_short(entry: Entry) -> str:
    """An entry in a few words; "" for one that needs none in the tree."""
    message = entry.message
    if entry.type == "compaction":
        return f"compaction: {entry.data['summary']}"
    if entry.type == "clear_outputs":
        return "older outputs were cleared"
    if isinstance(message, UserMessage):
        return f"you: {message.content}"
    if isinstance(message, AssistantMessage):
        calls = ", ".join(call_in_short(call.name, call.arguments) for call in message.tool_calls)
        failed = f"({message.stop_reason}) " * (message.stop_reason in ("error", "aborted"))
        return f"model: {failed}{' '.join(filter(None, (message.content.strip(), calls)))}"
    return ""


def ending_in_words(reason: str, error: dict | None) -> list[str]:
    """What a person should read about how a run ended; nothing if it ended well."""
    if reason == "aborted":
        return ["stopped"]
    if error:
        hint = [f"  {error['hint']}"] if error["hint"] else []
        return [f"error ({error['kind']}): {error['message']}", *hint]
    return {"length": ["the answer was cut off: the model's length limit was reached"],
            "max_steps": ["gave up at the step limit; --max-steps N allows more"]}.get(reason, [])


def totals_in_words(totals: dict) -> str:
    """What a run took: turns, tokens, the share of them that the provider's cache served."""
    share = totals["cached_tokens"] / max(1, totals["input_tokens"])
    cost = f", cost {totals['cost']:.4f}" if totals["cost"] is not None else ""
    return (f"{count_of(totals['turns'], 'turn')}, {totals['input_tokens']:,} tokens in "
            f"({share:.0%} from the cache), {totals['output_tokens']:,} out{cost}, "
            f"{totals['seconds']:.1f} s")


def show_json(event: Event) -> None:
    """One event as a line of JSON on stdout."""
    print(mask(json.dumps(to_json(event), default=str)), flush=True)


# ── Asking the person

@contextlib.contextmanager
def handling(**handlers: Callable) -> Iterator[None]:
    """Within, these signals, where the system has them, call these functions."""
    import signal
    known = {getattr(signal, name): handler for name, handler in handlers.items()
             if hasattr(signal, name)}
    if threading.current_thread() is not threading.main_thread():
        known = {}
    before = {number: signal.signal(number, handler) for number, handler in known.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Terminated(BaseException):
    """The system, or a closing terminal, wants the program to end."""


def terminate(number: int, frame: object) -> None:
    """The handler of such a signal while nothing runs that must be ended first."""
    raise Terminated(number)


def can_ask() -> bool:
    """Is there a person? Only where both stdin and stderr are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


LOOK_ALIKE = re.compile(r"[a-zA-Z]+[^\x00-\x7f]|[^\x00-\x7f][a-zA-Z]+")


def asker(agent: Agent, put: Callable[[Question], str]) -> Callable[[Question], bool | str]:
    """A function that asks a person; `put(question)` gives what they answer."""
    always: set[str] = set()                 # calls that the person allowed for this session

    def ask(question: Question) -> bool | str:
        call = json.dumps([agent.session.entries[0].id, question.name, question.arguments])
        if call in always:
            return True
        answer = put(question).strip()
        if agent.abort.done:
            return "the person stopped the run"
        word = answer.lower()
        if word in ("a", "always"):
            always.add(call)
        elif word not in ("y", "yes"):
            comment = re.sub(r"^no?\b[\s,:]*", "", answer, flags=re.I)
            return f"the person said no{': ' + comment if comment else ''}"
        return True
    return ask


def question_lines(question: Question, shorten: Callable[[str], str]) -> list[str]:
    """What a call would do, each line behind a gutter, and nothing in it that could be hidden."""
    found = [f"{question.name}: may this be done? ({question.reason})"]
    found += ["  | " + line for line in shorten(visible(mask(question.preview))).split("\n")]
    if question.name == "shell" and (odd := LOOK_ALIKE.search(question.preview)):
        found.append(f"  note: letters of other scripts in it: {ascii(odd[0])[1:-1]}")
    return found


def ask_at_terminal(agent: Agent, screen: Screen, question: Question) -> str:
    """What the person types at the question; what was typed before does not count."""
    shorten, answer = fold, "show"
    while answer.strip().lower() in ("s", "show"):
        screen.asked = True
        head, *lines = question_lines(question, shorten)
        screen.say(f"- {head}", BOLD)
        for line in lines:
            screen.say(line, "" if line.startswith("  | ") else RED)
        screen.hush()
        answer, shorten = read_answer(agent), str
    return answer


def read_answer(agent: Agent) -> str:
    """What the person types at the question; Ctrl-C stops the run, the end of input is a no."""
    import signal
    answer = ""
    try:
        with handling(SIGINT=signal.default_int_handler, SIGTERM=terminate, SIGHUP=terminate):
            with contextlib.suppress(ImportError, OSError):
                import termios               # what was typed before the question does not count
                termios.tcflush(sys.stdin, termios.TCIFLUSH)
            if not agent.abort.done:
                print("  allow? [y/N/always/show, or why not] ", end="", file=sys.stderr,
                      flush=True)
                answer = sys.stdin.readline()
    except KeyboardInterrupt:
        agent.stop()
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer


def watch(agent: Agent, task: str, screen: Screen, show: Callable[[Event], None]) -> RunSettled:
    """Runs a task and shows its events; gives the last one."""
    screen.tokens = agent.use_of_budget() * agent.room()
    with screen.waiting() if show == screen.show else contextlib.nullcontext(), \
            stoppable(agent), contextlib.closing(agent.run(task)) as events:
        for event in events:
            show(event)
    if show == screen.show and not screen.live and event.reason in ("stop", "length"):
        print(mask(event.answer), flush=True)
    return event


@contextlib.contextmanager
def stoppable(agent: Agent) -> Iterator[None]:
    """Within, Ctrl-C stops the agent in order, a second one at once. A signal to end stops it in
    order too, and then raises Terminated."""
    import signal
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if agent.abort.done and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        agent.stop()
    with handling(SIGINT=on_signal, SIGTERM=on_signal, SIGHUP=on_signal):
        yield
    if ends := [number for number in received if number != signal.SIGINT]:
        raise Terminated(ends[0])


# ─── Commands ────────────────────────────────────────────────────────────────────────────────────
# What a person types in the chat after a slash: a table of small functions. Each gets the chat and
# the rest of the line. Its docstring is its help. A line with an unknown command is not sent.

def one_of(what: str, text: str, names: Iterable[str]) -> str:
    """The text, if it is one of the names; else UsageError."""
    if text not in names:
        raise UsageError(f"there is no {what} {brief(text, 60)!r}",
                         f"choose one of {', '.join(names)}")
    return text


def ready(provider: Provider) -> Provider:
    """The provider, if it can be used: its key is set. Else UsageError."""
    own = PROVIDERS.get(provider.name)
    if provider.key_env and own and not provider.key() and provider.base_url == own.base_url:
        raise UsageError(f"{provider.name} needs a key and {provider.key_env} is not set",
                         f"set {provider.key_env} in the environment or in .env beside this file")
    return provider


def describe(agent: Agent) -> str:
    """What is set, in a line."""
    sandbox = {"off": "no sandbox", "on": "commands in a sandbox",
               "none": "no sandbox, so commands are asked about",
               "require": "no sandbox, so no commands"}[agent.sandbox]
    return (f"tiny_agent {VERSION}: {agent.provider.name} {agent.provider.model}, "
            f"{agent.mode} mode, {sandbox}, in {agent.workspace.root}")


def age(seconds: float) -> str:
    """How long ago, in a word or two."""
    for length, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            return count_of(int(seconds / length), unit) + " ago"
    return "just now"


def session_in_short(one: Listed) -> str:
    """A session in a line: id, age, length, first words."""
    return (f"{session_id(one.path)}  {age(time.time() - one.modified):14}  "
            f"{count_of(one.messages, 'message'):14}  {one.first}")


def remarks(session: Session, workspace: Workspace) -> list[str]:
    """What a person should know about a session that was loaded."""
    recorded = session.entries[0].data.get("cwd")
    if not recorded or recorded == str(workspace.root):
        return session.notes
    return [*session.notes, f"the session was recorded in another folder, {recorded}"]


def in_words(error: Exception) -> str:
    """What happened and what to do next, in a line."""
    if isinstance(error, AgentError):
        return ": ".join(filter(None, (error.message, error.hint)))
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"


def add_files(agent: Agent, text: str, screen: Screen) -> None:
    """Tells the model, with its next message, the texts of the files that are named with @ here.

    A word that names no file is a word. What a rule forbids to read, or is outside, is left out.
    """
    workspace, added = agent.workspace, set()
    for quoted, word in re.findall(r"""(?<![^\s('"])@(?:"([^"\n]+)"|(\S+))""", text):
        path = quoted or word.rstrip(".,;:!?)'\"")
        try:
            name = workspace.name(real := workspace.resolve(path))
            if not workspace.may_read(name):
                raise ToolError("a rule forbids reading it")
            content = mask(shown(Text(workspace.read_bytes(real), name).text))
        except (ToolError, OSError) as error:
            if os.path.isfile(workspace.root / path):
                screen.say(f"  @{path} is left out: {error}", RED)
            continue
        if name in added:
            continue
        added.add(name)
        part, size = content[:workspace.limit], len(content)
        more = f"\n[the first {len(part):,} of {size:,} characters]" if len(part) < size else ""
        agent.asides.append(f"the file {name}, which the person named with @:\n{part}{more}")
        screen.say(f"  with {name}, {count_of(size, 'character')}"
                   f"{f', of which the first {len(part):,}' if more else ''}", DIM)


# ── Typing

HISTORY = 1000               # messages of earlier chats that can be called back


def line_editor():
    """The module readline; None where there is none, as on Windows."""
    try:
        import readline                      # here, since it writes to the terminal when it loads
        return readline
    except ImportError:
        return None


def input_waits() -> bool:
    """Is there more to read at the terminal already? Known on POSIX systems alone."""
    import select
    return os.name == "posix" and bool(select.select([sys.stdin], [], [], 0.02)[0])


def is_command(line: str) -> bool:
    """Does the line begin with a command's name?"""
    return line.partition(" ")[0] in COMMANDS


def paths_from(workspace: Workspace, start: str) -> list[str]:
    """The paths in the workspace that begin so, folders with a slash at their end."""
    head, _, tail = start.rpartition("/")
    head += "/" * ("/" in start)
    try:
        entries = list(os.scandir(workspace.resolve(head or ".")))
    except (ToolError, OSError):
        return []
    return sorted(head + entry.name + "/" * entry.is_dir() for entry in entries
                  if entry.name.startswith(tail) and (tail or not entry.name.startswith("."))
                  and re.fullmatch(r"\S+", entry.name) and visible(entry.name) == entry.name)


def candidates(chat: "Chat", before: str, word: str) -> list[str]:
    """What Tab can make of a word, by what stands before it in the line."""
    if not before.strip() and word.startswith("/"):
        found = [name + " " for name in COMMANDS]
    elif before.strip() in ARGUMENTS:
        found = [text + " " for text in ARGUMENTS[before.strip()](chat)]
    else:
        mark = "@" * word.startswith("@")
        found = [mark + path for path in paths_from(chat.agent.workspace, word[len(mark):])]
    return [text for text in found if text.startswith(word)]


def session_ids(chat: "Chat") -> list[str]:
    """The short ids of this workspace's sessions."""
    return list(map(session_id, sessions_of(chat.settings.home, chat.agent.workspace.root)))


def asked_ids(chat: "Chat") -> list[str]:
    """The ids of the person's messages on the branch."""
    return [entry.id for entry in chat.agent.session.active_path()
            if isinstance(entry.message, UserMessage)]


ARGUMENTS: dict[str, Callable[["Chat"], Iterable[str]]] = {      # of commands, as far as known
    "/mode": lambda chat: MODES,
    "/provider": lambda chat: PROVIDERS,
    "/why": lambda chat: chat.agent.tools,
    "/resume": session_ids,
    "/rewind": asked_ids,
}
COMMANDS: dict[str, Callable[["Chat", str], None]] = {}


def slash(function: Callable) -> Callable:
    """Puts a function into COMMANDS under its name, without what follows an underscore."""
    COMMANDS["/" + function.__name__.partition("_")[0]] = function
    return function


class Chat:
    """A conversation at the terminal."""

    def __init__(self, agent: Agent, screen: Screen, settings: "Settings"):
        self.agent, self.screen, self.settings = agent, screen, settings
        self.first_provider = agent.provider     # with the address that it was given
        self.leaving = False
        self.readline = line_editor()
        self.history = settings.home / "history"
        self.keeps = not settings.flags.no_session
        self.lines: list[str] = []           # of the message that is being typed
        self.held: str | None = None         # a line that was read and belongs to the next one
        self.remembered = ""                 # the last thing that went into the history
        self.found: list[str] = []           # what Tab offers

    def run(self) -> None:
        """Reads messages until the person leaves."""
        if self.readline:
            self.set_up(self.readline)
        self.screen.say("Type a task, or /help. Ctrl-D leaves, Ctrl-C stops a task.", DIM)
        while not self.leaving:
            with contextlib.suppress(KeyboardInterrupt):       # while another one is answered
                self.one_message()

    def one_message(self) -> None:
        """Reads a message and does what it says."""
        try:
            text = self.read()
        except EOFError:
            self.screen.say()
            self.leaving = True
            return
        except KeyboardInterrupt:
            kept = "; arrow up brings back what you typed" if any(self.lines) else ""
            self.screen.say(f"  (Ctrl-D or /exit leaves{kept})", DIM)
            return
        finally:                             # whether it is sent, given up, or the terminal closed
            self.remember("\n".join(self.lines))
        if text.strip():
            self.take(text.strip())

    def set_up(self, readline: types.ModuleType) -> None:
        """Tab completes; the history is what was typed at prompts, also in earlier chats."""
        libedit = "libedit" in (readline.__doc__ or "")
        for line in ("bind ^I rl_complete",) if libedit else (
                "tab: complete", "set convert-meta off", "set input-meta on",
                "set output-meta on",        # letters of all scripts, whatever the locale
                # Python turns it off, but then a pasted line is obeyed before the next is there
                f"set enable-bracketed-paste {'on' if self.screen.erases else 'off'}"):
            readline.parse_and_bind(line)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self.complete)
        readline.set_auto_history(False)
        lines = []
        with contextlib.suppress(OSError):   # there is none yet, or it cannot be used
            lines = self.history.read_bytes().splitlines(True)
            if len(lines) > 2 * HISTORY and self.keeps:
                self.history.write_bytes(b"".join(lines[-HISTORY:]))
        for line in lines[-HISTORY:]:
            with contextlib.suppress(TypeError, ValueError):     # no text, as JSON
                readline.add_history(json.loads(line))

    def remember(self, text: str) -> None:
        """Puts a text into the history, in memory and in the file: one JSON text a line."""
        text = mask(text)
        if not self.readline or not text.strip() or text == self.remembered:
            return
        self.remembered = text
        with contextlib.suppress(ValueError):          # not a letter of this locale
            self.readline.add_history(text)
        with contextlib.suppress(OSError):             # a chat goes on without its history
            if self.keeps:
                make_folders(self.history.parent)
                with open(self.history, "a", encoding="ascii",
                          opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(json.dumps(text) + "\n")

    def complete(self, word: str, state: int) -> str | None:
        """What readline asks at Tab: candidate after candidate for the word at the cursor."""
        line, start = self.readline.get_line_buffer().encode(), self.readline.get_begidx()
        if not line.strip():
            if state == 0:
                self.readline.insert_text("\t")        # as in a text that is indented
                self.readline.redisplay()
            return None
        if state == 0:
            self.found = candidates(self, line[:start].decode("utf-8", "replace"), word)
        return self.found[state] if state < len(self.found) else None

    def read(self, prompt: str = "") -> str:
        """One message: a line, with what was pasted with it or goes on after a `\\`, or a block.

        A terminal that marks a paste gives it as one line with newlines. From another one its
        lines come all at once; but what waits before there is a prompt was typed ahead.
        """
        self.lines, typed_ahead = [], input_waits()
        agent = self.agent
        first = self.line(prompt or f"{agent.provider.name} {agent.mode} "
                          f"{agent.use_of_budget():.0%}> ")
        if first.startswith('"""'):
            return self.block(first[3:])
        single = typed_ahead or is_command(first) or first.startswith("!")
        while True:
            goes_on = self.lines[-1].endswith("\\")
            if goes_on:
                self.lines[-1] = self.lines[-1][:-1]
            elif single or not input_waits():
                break
            try:
                line = self.line("... ")
            except EOFError:                 # what is there is sent
                self.leaving = not goes_on
                break
            if not goes_on and is_command(line):
                self.held = self.lines.pop()
                break
        return "\n".join(self.lines)

    def block(self, first: str) -> str:
        """The lines up to one of three quotes, or to Ctrl-D; if it was pasted, all in the first."""
        if '"""' in first:
            whole = first.rstrip()
            return whole[:-3] if whole.endswith('"""') else f'"""{first}'
        lines = [first]
        with contextlib.suppress(EOFError):
            for line in iter(lambda: self.line("... "), '"""'):
                lines.append(line)
        return "\n".join(lines)

    def line(self, prompt: str) -> str:
        """One line as it was typed, noted in `lines`, as is one that something cuts short."""
        try:
            text = input(prompt) if self.held is None else self.held
        except BaseException:                # Ctrl-C, a signal, a terminal that has gone
            if self.readline and (begun := self.readline.get_line_buffer()):
                self.lines.append(shown(begun))
            raise
        self.held = None
        self.lines.append(text.encode("utf-8", "replace").decode())
        return self.lines[-1]

    def take(self, text: str) -> None:
        """Obeys a command, or works on a task."""
        name, _, rest = text.partition(" ")
        if text in ("exit", "quit"):
            self.leaving = True
        elif name in COMMANDS and "\n" not in text:
            try:
                COMMANDS[name](self, rest.strip())
            except AgentError as error:
                self.screen.say(in_words(error), RED)
        elif name.startswith("/") and "/" not in name[1:] and "\n" not in text:
            self.screen.say(f"There is no command {name}; /help lists them.", RED)
        elif text.startswith("!") and text[1:].strip() and "\n" not in text:
            self.run_own(text[1:].strip())
        else:
            add_files(self.agent, text, self.screen)
            self.work(text)

    def work(self, text: str) -> None:
        """Works on a task. Stopped by Ctrl-C, it asks: a line typed there is what comes next, and
        the model knows what it was at."""
        with contextlib.suppress(KeyboardInterrupt):
            stopped = watch(self.agent, text, self.screen, self.screen.show).reason == "aborted"
            if stopped and self.held is None and (instead := self.ask_instead().strip()):
                self.take(instead)

    def ask_instead(self) -> str:
        """What the person types in the place of a stopped task, read and kept as at the prompt;
        "" for Ctrl-C and Ctrl-D."""
        try:
            return self.read("What instead? A line goes on with it, nothing stops: ")
        except (EOFError, KeyboardInterrupt):
            kept = "  (arrow up brings back what you typed)" if any(self.lines) else ""
            self.screen.say(kept, DIM)
            return ""
        finally:
            self.remember("\n".join(self.lines))

    def run_own(self, command: str) -> None:
        """Runs a command of the person's own, without rules, questions and the sandbox; what it
        printed is told to the model with the next message."""
        workspace = copy.copy(self.agent.workspace)
        workspace.sandboxed, workspace.abort = False, Abort()
        pieces = workspace.shell(command, 3600)
        with handling(SIGINT=lambda number, frame: workspace.abort.set()), \
                contextlib.closing(pieces):
            try:
                while True:
                    self.screen.stream(next(pieces), PLAIN_STYLE, self.screen.out)
            except StopIteration as end:
                outcome = end.value
        self.agent.workspace.outputs = workspace.outputs
        status, file = outcome.content.partition("\n")[0], outcome.details.get("output_file")
        whole = f"; all of its output is in {file}" if file else ""
        self.screen.say(f"  {status}{whole}; told to the model with your next message", DIM)
        self.agent.asides.append(mask(f"the person ran `{command}`: {outcome.content}"))

    def go_on(self, session: Session) -> None:
        """Leaves the session for another one."""
        self.agent.session.close()
        self.agent.begin(session)

    def resume(self, path: Path) -> list[str]:
        """Goes on with the session of a file; gives what a person should know about it."""
        here = self.agent.session.path
        if here and path.resolve() == here.resolve():
            raise UsageError("you are in that session already", "/resume lists the others")
        session = self.settings.load(path)
        try:
            provider, _ = self.settings.provider(session)
        except AgentError:
            session.close()
            raise
        self.agent.provider = provider
        self.go_on(session)
        return remarks(session, self.agent.workspace)

    def fork(self) -> None:
        """Goes on in a copy of this branch."""
        agent, session = self.agent, self.agent.session
        waiting = agent.asides, agent.steering, agent.follow_ups
        self.go_on(session.fork(None if session.path is None else self.settings.home))
        agent.asides, agent.steering, agent.follow_ups = waiting     # not heard by the copy either

    def providers(self) -> dict[str, Provider]:
        """Who could answer: the known ones, and the one that was given with its address."""
        return {**PROVIDERS, self.first_provider.name: self.first_provider}

    def choose(self, name: str, model: str = "") -> None:
        """Lets this provider answer, with its own model if none is named."""
        known = self.providers()
        self.agent.provider = ready(known[one_of("provider", name, known)].using(model))

    def ask(self, question: str) -> str:
        """What the person types at a question; "" for Ctrl-C and Ctrl-D."""
        try:
            return input(question).strip()
        except (EOFError, KeyboardInterrupt):
            self.screen.say()
            return ""

    def agrees(self, question: str) -> bool:
        return self.ask(f"{question} [y/N] ").lower() in ("y", "yes")

    def pick(self, choices: list[tuple[object, str]]) -> object | None:
        """What the person picks from a numbered list, the last one first; None for nothing."""
        if not choices:
            self.screen.say("There is nothing to choose from.")
            return None
        for number, (_, text) in enumerate(choices, 1):
            self.screen.say(f"  {number:3}  {brief(text, 100)}")
        answer = self.ask("Which one? A number, or nothing to leave it: ")
        if not answer:
            return None
        if not answer.isdecimal() or not 1 <= int(answer) <= len(choices):
            raise UsageError(f"there is no number {brief(answer, 40)!r} in the list")
        return choices[int(answer) - 1][0]

    def ask_about_files(self, files: dict[str, FileBack]) -> str:
        """Shows what a rewind would do to files; c, f or b: conversation, files, or both."""
        for path, file in files.items():
            what = f"cannot be brought back: {file.problem}" if file.problem else \
                "to be removed, it was not there" if file.before is None else \
                f"to get back its {count_of(len(file.before.splitlines()), 'line')}"
            other = "; somebody else has changed it since" if file.foreign else ""
            self.screen.say(f"  {path}: {what}{other}", RED if file.problem else "")
        if all(file.problem for file in files.values()):
            return "c"
        return self.ask("Bring back the (c)onversation only, the (f)iles only, (b)oth, or "
                        "nothing? [c/f/b/N] ").lower()[:1]

    def offer(self, text: str) -> None:
        """Shows a text of the person's and puts it at the next prompt, where that can be."""
        self.screen.say("Your message was:")
        self.screen.say("\n".join("  | " + line for line in fold(text).split("\n")))
        if self.readline:
            def put() -> None:
                self.readline.insert_text(text)
                self.readline.set_startup_hook()
            self.readline.set_startup_hook(put)


@slash
def help_(chat: Chat, rest: str) -> None:
    """/help: what can be typed"""
    for function in COMMANDS.values():
        chat.screen.say("  " + function.__doc__)
    chat.screen.say("""  !COMMAND: run a command yourself; the model is told with your next message
  @PATH in a message: the text of that file goes with it
  A line that ends in \\ goes on in the next. A block between two lines of \"\"\" is one message.
  Tab completes commands and paths; arrow up brings back what you typed, also in earlier chats.""")


@slash
def mode_(chat: Chat, rest: str) -> None:
    """/mode [plan|ask|auto]: what may be done without asking"""
    if rest:
        chat.agent.mode = one_of("mode", rest, MODES)
    for name, meaning in MODES.items():
        chat.screen.say(f"{'*' if name == chat.agent.mode else ' '} {name:5} {meaning}")


@slash
def provider_(chat: Chat, rest: str) -> None:
    """/provider [NAME]: who answers"""
    if rest:
        chat.choose(rest)
    for name, provider in chat.providers().items():
        mark = "*" if name == chat.agent.provider.name else " "
        key = "needs no key" if not provider.key_env else \
            f"{provider.key_env} is {'set' if provider.key() else 'not set'}"
        chat.screen.say(f"{mark} {name:11} {provider.model:28} {key}")


@slash
def model_(chat: Chat, rest: str) -> None:
    """/model [NAME]: which model of the provider answers"""
    if rest:
        chat.agent.provider = chat.agent.provider.using(model=rest)
    chat.screen.say(f"model: {chat.agent.provider.model}")


@slash
def why_(chat: Chat, rest: str) -> None:
    """/why TOOL TARGET: how the rules would decide about a call"""
    name, _, target = rest.partition(" ")
    agent = chat.agent
    decision = decide(one_of("tool", name, agent.tools), {TARGETS.get(name, "path"): target},
                      agent.mode, rules=agent.rules, workspace=agent.workspace,
                      sandbox=agent.sandbox)
    chat.screen.say("\n".join(explain(decision)))


@slash
def status_(chat: Chat, rest: str) -> None:
    """/status: what is set, and where the session lies"""
    agent = chat.agent
    window = agent.provider.window or (agent.provider.base_url and
                                       agent.provider.find_window(Abort()))
    for line in (describe(agent), f"context window: {window or 'not known'}",
                 f"session: {agent.session.file or 'not in a file (yet)'}",
                 f"context: {agent.use_of_budget():.0%} of {agent.room():,} tokens",
                 "last run: " + (totals_in_words(agent.totals) if agent.totals["turns"] else
                                 "none yet")):
        chat.screen.say(line)


@slash
def compact_(chat: Chat, rest: str) -> None:
    """/compact [TEXT]: put a summary in place of the older part, with TEXT kept in mind"""
    with chat.screen.waiting(), stoppable(chat.agent):
        for event in chat.agent.compact(rest):
            chat.screen.show(event)
    if chat.agent.abort.done:
        chat.screen.say("stopped; nothing was compacted", RED)


@slash
def rewind_(chat: Chat, rest: str) -> None:
    """/rewind [ID]: go back to an entry, or to a message you pick, and bring files back"""
    session = chat.agent.session
    entry = session.find(rest) if rest else chat.pick(
        [(entry, entry.message.content) for entry in session.active_path()
         if isinstance(entry.message, UserMessage)])
    if entry is None:
        return
    moment = session.moment(entry)
    files = chat.agent.files_back(moment)
    if any(isinstance(entry.message, ToolResultMessage) and entry.message.tool_name == "shell"
           for entry in session.entries[moment.position:]):
        chat.screen.say("  What shell commands changed since is not covered.", DIM)
    what = chat.ask_about_files(files) if files else "c"
    if what not in ("c", "f", "b"):
        chat.screen.say("Nothing was changed.")
        return
    paths = [path for path, file in files.items() if not file.problem and what in "fb"]
    foreign = [path for path in paths if files[path].foreign]
    if foreign and not chat.agrees("Somebody else has changed these since: "
                                   f"{', '.join(foreign)}. Overwrite them too?"):
        paths = [path for path in paths if path not in foreign]
    for problem in chat.agent.rewind(moment, files, conversation=what in "cb", paths=paths):
        chat.screen.say(problem, RED)
    files_too = f", with {count_of(len(paths), 'file')}" if paths else ""
    chat.screen.say(f"Went back{files_too}. /rewind {session.entries[-1].id} undoes it.")
    if moment.text and what in "cb":
        chat.offer(moment.text)


@slash
def label_(chat: Chat, rest: str) -> None:
    """/label NAME: give the place where you are a name, for /rewind NAME"""
    if not rest:
        raise UsageError("a label needs a name", "/label NAME")
    chat.agent.session.append("label", label=rest)
    chat.screen.say(f"This place is called {rest}; /rewind {rest} leads here.")


@slash
def fork_(chat: Chat, rest: str) -> None:
    """/fork: go on in a new file that holds a copy of this branch"""
    chat.fork()
    chat.screen.say("The branch was copied; from here on you work in "
                    f"{chat.agent.session.file or 'the copy, which has no file yet'}.")


@slash
def new_(chat: Chat, rest: str) -> None:
    """/new: a new session; the old one stays in its file"""
    chat.go_on(chat.settings.new_session(chat.agent.workspace.root))
    chat.screen.say("A new session.")


@slash
def resume_(chat: Chat, rest: str) -> None:
    """/resume [ID]: go on with another session of this workspace"""
    home, here = chat.settings.home, chat.agent.session.path
    if not rest:
        others = [one for one in list_sessions(home, chat.agent.workspace.root)
                  if one.path != here]
        one = chat.pick([(one, session_in_short(one)) for one in others])
        if one is None:
            return
    path = find_session(home, rest) if rest else one.path
    for note in chat.resume(path):
        chat.screen.say(f"warning: {note}", RED)
    chat.screen.say(f"On with the session {path.stem}: "
                    f"{count_of(len(project(chat.agent.session.active_path())), 'message')}.")


@slash
def exit_(chat: Chat, rest: str) -> None:
    """/exit: leave (so do exit, quit and Ctrl-D)"""
    chat.leaving = True


# ─── RPC ─────────────────────────────────────────────────────────────────────────────────────────
# The same agent for an editor or another program: a request a line on stdin; responses, events and
# questions on stdout, a line each, all JSON. A thread reads and answers, also while a run goes on;
# runs are worked on in the main thread, where signals and the time limit of grep work. One lock
# keeps a request and its response together, and every line whole. Left out: two runs at a time.

REQUESTS: dict[str, Callable] = {}
ONLY_IDLE = {"prompt", "compact", "new_session", "resume", "rewind", "fork", "set_model"}
ONLY_RUNNING = {"steer", "follow_up"}


def served(method: Callable) -> Callable:
    """Puts a method of Server into REQUESTS; its parameters are the fields of the request."""
    REQUESTS[method.__name__] = method
    return method


def read_request(line: bytes) -> dict:
    """The request in a line. Raises UsageError."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
        json.dumps(found.get("id"), allow_nan=False)         # it is sent back
        if isinstance(found["type"], str):
            return found
    except (ValueError, AttributeError, KeyError, RecursionError):
        pass
    raise UsageError(f"this is not a request: {brief(line[:200].decode('utf-8', 'replace'), 60)}",
                     'a request is a line with one JSON object, {"type": …, "id": …}')


def own_stdout() -> int:
    """A descriptor of stdout for one writer; what anybody else prints goes to stderr from now on,
    also what a command that inherits descriptor 1 prints."""
    sys.stdout.flush()
    number = sys.stdout.fileno()
    own = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    sys.stdout = sys.stderr
    return own


class Server:
    """Serves one agent to the program at the other end of stdin and stdout."""

    def __init__(self, agent: Agent, screen: Screen, settings: "Settings", out: int):
        self.agent, self.screen, self.out = agent, screen, out
        self.chat = Chat(agent, screen, settings)
        self.lock = threading.RLock()
        self.work: queue.SimpleQueue = queue.SimpleQueue()     # for the main thread; None: the end
        self.running = self.ending = self.unread = False
        self.questions: dict[str, queue.SimpleQueue] = {}      # that are open, by their ids
        agent.approve = asker(agent, self.ask)

    def run(self) -> int:
        """Serves until the input ends. A signal ends it in order, a second one at once."""
        received: list[int] = []

        def on_signal(number: int, frame: object) -> None:
            if received:
                raise Terminated(number)
            received.append(number)
            self.end()
        with handling(SIGINT=on_signal, SIGTERM=on_signal, SIGHUP=on_signal):
            threading.Thread(target=self.read, daemon=True).start()
            for events, request in iter(self.work.get, None):
                self.tell(events, request)
        if received:
            raise Terminated(received[0])
        return 1 if self.unread else 0

    def end(self) -> None:
        """Stops the run, and serving when it has settled; from any thread or a signal handler."""
        self.ending = True
        self.agent.stop()
        self.work.put(None)

    def read(self) -> None:
        """A thread: takes one line after the other. Only LF ends a line, however long it is."""
        try:                # a reader of its own: that of sys.stdin must be free when Python exits
            with open(sys.stdin.fileno(), "rb", closefd=False) as file:
                for line in file:
                    self.take(line)
        except OSError as error:
            self.screen.say(f"the input cannot be read: {error.strerror}", RED)
        finally:
            self.end()

    def take(self, line: bytes) -> None:
        """Does what a line asks for, and answers it."""
        request: dict = {}
        with self.lock:
            try:
                request = read_request(line)
                if request["type"] == "extension_ui_response":
                    self.hear(request)
                elif inspect.isgenerator(data := self.obey(request)):
                    self.start(data, request)
                else:
                    self.respond(request, data)
            except Exception as error:     # whatever went wrong with one, the next one is served
                self.respond(request, error=in_words(error))

    def obey(self, request: dict) -> dict | Generator | None:
        """The data of the response; or events, after which the response is due."""
        name = one_of("request", request["type"], REQUESTS)
        if self.running and name in ONLY_IDLE:
            raise UsageError("a run goes on", "abort it first, or wait for run_settled")
        if not self.running and name in ONLY_RUNNING:
            raise UsageError("no run goes on", "send a prompt")
        method = types.MethodType(REQUESTS[name], self)
        fields = {field: request[field] for field in inspect.signature(method).parameters
                  if field in request}
        return method(**check_arguments(method, fields))

    def start(self, events: Generator, request: dict | None = None) -> None:
        """Hands events to the main thread, and the request that is answered after them."""
        self.running = True
        self.work.put((events, request))

    def tell(self, events: Generator, request: dict | None) -> None:
        """Lets events happen and tells them. With the last one the next request may come."""
        if self.ending:                      # it was accepted when the end was already there
            self.agent.stop()
        data, error = {}, None
        try:
            with contextlib.closing(events):
                for event in events:
                    data = to_json(event)
                    with self.lock:
                        self.running = not isinstance(event, RunSettled)
                        self.write(data)
        except AgentError as problem:
            if request is None:
                raise
            error = in_words(problem)
        if request is not None:
            with self.lock:
                self.running = False
                self.respond(request, data, error or data.get("error"))

    def respond(self, request: dict, data: dict | None = None, error: str | None = None) -> None:
        result = {"data": data or {}} if error is None else {"error": error}
        self.write({"id": request.get("id"), "type": "response",
                    "request_type": request.get("type"), "success": error is None, **result})

    def write(self, value: dict) -> None:
        """Writes a line. If nobody reads it, the work ends."""
        data = memoryview((mask(json.dumps(value, default=str)) + "\n").encode("ascii"))
        with self.lock:
            try:
                while data and not self.unread:
                    data = data[os.write(self.out, data):]
            except OSError as error:
                self.unread = True
                self.end()
                with contextlib.suppress(OSError):
                    self.screen.say(f"the output cannot be written: {error.strerror}", RED)

    def ask(self, question: Question) -> str:
        """What the other end answers to a question; "" if the run is stopped."""
        number, answers = own_id(), queue.SimpleQueue()
        self.questions[number] = answers
        with self.agent.abort.calling(lambda: answers.put("")):
            self.write({"type": "extension_ui_request", "id": number, "payload": {
                "method": "select", "title": visible("\n".join(question_lines(question, fold))),
                "options": ["yes", "no", "always"], "tool": question.name,
                "arguments": question.arguments, "preview": question.preview}})
            answer = answers.get()
        del self.questions[number]
        return answer

    def hear(self, answer: dict) -> None:
        """Takes an answer to a question: a text as at the terminal; true; false or null is no."""
        value = answer.get("value", 0)
        if not isinstance(value, str | bool | None):
            raise UsageError("an answer needs a value", "yes, no, always, or why not")
        question = self.questions.get(str(answer.get("id")))
        if question is None:
            raise UsageError("no question of this id is open")
        question.put(value if isinstance(value, str) else "yes" if value else "no")

    # ── The requests. Each docstring is the help that get_commands gives.

    @served
    def prompt(self, message: str) -> None:
        """work on a task; its events follow the response"""
        self.start(self.agent.run(message))          # run() here, so that an abort counts from now

    @served
    def steer(self, message: str) -> None:
        """say something to the model before its next turn"""
        self.agent.steer(message)

    @served
    def follow_up(self, message: str) -> None:
        """say something when the model is done otherwise"""
        self.agent.follow_up(message)

    @served
    def abort(self) -> None:
        """stop the run; an open question is answered no"""
        self.agent.stop()

    @served
    def compact(self, text: str = "") -> Generator:
        """put a summary in the place of older messages; the response comes when it is done"""
        return self.agent.compact(text)

    @served
    def new_session(self) -> dict:
        """begin a new session"""
        self.chat.go_on(self.chat.settings.new_session(self.agent.workspace.root))
        return {"session": self.agent.session.file}

    @served
    def resume(self, session: str) -> dict:
        """go on with a session: its id, the start of one, or its file"""
        notes = self.chat.resume(find_session(self.chat.settings.home, session))
        return {"session": self.agent.session.file, "notes": notes}

    @served
    def rewind(self, entry_id: str, files: bool = False) -> dict:
        """go back to an entry; with files, also bring back those that nobody else changed"""
        moment = self.agent.session.moment(self.agent.session.find(entry_id))
        changed = self.agent.files_back(moment)
        wanted = [path for path, file in changed.items()
                  if files and not file.problem and not file.foreign]
        problems = self.agent.rewind(moment, changed, paths=wanted)
        left = self.agent.files_back(moment)
        return {"leaf": self.agent.session.leaf, "text": moment.text, "problems": problems,
                "files": [path for path in wanted if path not in left], "left": list(left)}

    @served
    def fork(self) -> dict:
        """go on in a new session that holds a copy of this branch"""
        self.chat.fork()
        return {"session": self.agent.session.file}

    @served
    def set_mode(self, mode: str) -> dict:
        """set what may be done without asking: plan, ask or auto"""
        self.agent.mode = one_of("mode", mode, MODES)
        return self.get_state()

    @served
    def set_model(self, provider: str, model: str) -> dict:
        """set who answers; with an empty model the provider's own"""
        self.chat.choose(provider, model)
        return self.get_state()

    @served
    def get_state(self) -> dict:
        """what is set, and where the session is"""
        agent, session = self.agent, self.agent.session
        return {"session": session.file, "provider": agent.provider.name,
                "model": agent.provider.model, "mode": agent.mode,
                "workspace": str(agent.workspace.root), "running": self.running,
                "leaf": session.leaf, "messages": len(self.get_messages()["messages"]),
                "totals": dict(agent.totals)}

    @served
    def get_messages(self) -> dict:
        """the messages of the branch, each with the id of its entry"""
        return {"messages": [{"entry_id": entry.id, **entry.data["message"]}
                             for entry in self.agent.session.active_path()
                             if entry.type == "message"]}

    @served
    def get_tree(self) -> dict:
        """all entries of the session"""
        session = self.agent.session
        names = {entry_id: label for label, entry_id in session.labels().items()}
        return {"leaf": session.leaf, "entries": [
            {"id": entry.id, "parent_id": entry.parent_id, "type": entry.type,
             "text": brief(in_short(entry) or getattr(entry.message, "content", "")),
             **({"label": names[entry.id]} if entry.id in names else {})}
            for entry in list(session.entries)]}

    @served
    def list_sessions(self) -> dict:
        """the sessions of the workspace, the last one first"""
        found = list_sessions(self.chat.settings.home, self.agent.workspace.root)
        return {"sessions": [one.to_json() for one in found]}

    @served
    def get_commands(self) -> dict:
        """the commands of the chat, and these requests"""
        helps = [function.__doc__.partition(": ") for function in COMMANDS.values()]
        return {"commands": [{"name": name, "help": text} for name, _, text in helps],
                "requests": [{"name": name, "help": method.__doc__,
                              "fields": list(inspect.signature(method).parameters)[1:]}
                             for name, method in REQUESTS.items()]}


# ─── Export and inspection ───────────────────────────────────────────────────────────────────────
# Looking at what is there, without changing it: the tree of a session, the list of sessions, how
# the rules decide. What can be seen is text; pages for a browser are not built yet.

def draw_tree(session: Session) -> list[str]:
    """A session as lines, the active path, marked `*`, straight down; what leaves it, indented.

    Results are left out, unless the tree parts there.
    """
    active = {entry.id for entry in session.active_path()}
    names: dict[str, list[str]] = {}
    for label, entry_id in session.labels().items():
        names.setdefault(entry_id, []).append(label)
    drawn, waiting = [], [(session.entries[0], 0)]
    while waiting:
        entry, column = waiting.pop()
        below = [child for child in session.children(entry.id) if child.type in ON_BRANCH]
        text = in_short(entry)
        if text or len(below) > 1 or entry.id == session.leaf or entry.id in names:
            text = text or {"header": "the beginning"}.get(entry.type, "result")
            marks = "".join(f"  [{label}]" for label in names.get(entry.id, ()))
            here = "  <- you are here" if entry.id == session.leaf else ""
            drawn.append(f"{'*' if entry.id in active else ' '} {entry.id}  {'  ' * column}"
                         f"{brief(text, 72)}{marks}{here}")
        on = next((child for child in below if child.id in active), below[0] if below else None)
        waiting += [(child, column) for child in below if child is on]
        waiting += [(child, column + 1) for child in reversed(below) if child is not on]
    return drawn


@slash
def tree_(chat: Chat, rest: str) -> None:
    """/tree: the session with its branches; `*` marks where you are"""
    chat.screen.say("\n".join(draw_tree(chat.agent.session)))


def bar(part: int, whole: int, width: int = 24) -> str:
    """A bar that is as long as a part of a whole."""
    return "#" * min(width, -(-part * width // max(1, whole)))


def context_in_lines(agent: Agent) -> list[str]:
    """Where the tokens of the next request go, and what a compaction would leave out now."""
    agent.prepare(record=False)
    entries, room, told = agent.session.active_path(), agent.room(), agent.told
    prompt, _, notes = told["system"].partition("\n\nAGENTS.md, ")
    last, visible = visible_part(entries)
    kinds = {"system prompt": len(prompt), "notes": len(notes),
             "tools": len(json.dumps(told["tools"]))}
    parts = {name: size // CHARACTERS_A_TOKEN for name, size in kinds.items()}
    names = {"user": "your messages", "assistant": "the model's messages", "tool_result": "results"}
    messages = project(entries)
    parts["summary"] = size_of(messages[0]) if last else 0
    for message in messages[1 if last else 0:]:
        name = names[message.role]
        parts[name] = parts.get(name, 0) + size_of(message)
    size = estimate(entries, agent.fixed)
    lines = [f"about {size:,} of {room:,} tokens"]
    lines += [f"  {name:21} {part:7,}  {bar(part, room)}" for name, part in parts.items() if part]
    results = sorted((message for message in messages if isinstance(message, ToolResultMessage)),
                     key=size_of, reverse=True)
    if results:
        lines.append("the largest results:")
        lines += [f"  {message.tool_name:21} {size_of(message):7,}  "
                  f"{brief(message.content, 40)}" for message in results[:3]]
    place = find_cut(entries, min(room, size) // 3)
    if place is None:
        return [*lines, "a compaction now would find nothing to leave out"]
    left_out = [entry for entry in entries[len(entries) - len(visible):place] if entry.message]
    return [*lines, f"a compaction now would put a summary in place of "
            f"{count_of(len(left_out), 'message')}, and keep what follows from",
            f"  {entries[place].id}  {brief(in_short(entries[place]), 60)}"]


@slash
def context_(chat: Chat, rest: str) -> None:
    """/context: where the tokens of a request go"""
    chat.screen.say("\n".join(context_in_lines(chat.agent)))


def print_sessions(settings: "Settings") -> int:
    """Prints the sessions of the workspace, one a line, with --json one object each."""
    found = list_sessions(settings.home, settings.folder())
    for one in found:
        print(json.dumps(one.to_json()) if settings.flags.json else
              visible(session_in_short(one)))
    if not found:
        print(f"no session of {settings.folder()} yet", file=sys.stderr)
    return 0


def print_why(settings: "Settings") -> int:
    """Prints how the rules decide about a call; returns 0 for allow, 1 for deny, 3 for ask."""
    name, target = settings.flags.why
    workspace = Workspace(settings.folder())
    one_of("tool", name, workspace.tools())
    decision = decide(name, {TARGETS.get(name, "path"): target}, settings.mode,
                      rules=settings.rules, workspace=workspace, sandbox=settings.sandbox_state())
    if settings.flags.json:
        print(json.dumps({"decision": decision.decision, "reason": decision.reason,
                          "rule": str(decision.rule) if decision.rule else None,
                          "parts": decision.parts}))
    else:
        print(visible("\n".join(explain(decision))))
    return {"allow": 0, "deny": 1, "ask": 3}[decision.decision]


# ─── Settings and main ───────────────────────────────────────────────────────────────────────────
# Flags win over the environment, that over the file .env beside this one. The workspace is never
# asked: what a model can write must not configure the program around it.

SETTINGS = (     # environment variable, flag, metavar, default, help
    ("AGENT_PROVIDER", "-p/--provider", "NAME", "", "who answers: " + ", ".join(PROVIDERS)),
    ("AGENT_MODEL", "-m/--model", "NAME", "", "which of the provider's models"),
    ("AGENT_BASE_URL", "--base-url", "URL", "", "another address for the provider; alone it makes "
     "one called custom, whose key is AGENT_API_KEY"),
    ("AGENT_MODE", "--mode", "MODE", "ask", "plan (only reads), ask, or auto"),
    ("AGENT_WORKSPACE", "-w/--workspace", "DIR", "", "the folder to work in (./workspace)"),
    ("AGENT_BUDGET", "--budget", "TOKENS", "16000", "tokens for a request; a result may be as many "
     "characters"),
    ("AGENT_SANDBOX", "--sandbox", "WHEN", "auto", "for commands: auto, off, or require"),
)
EXIT_STATUS = {"stop": 0, "length": 1, "error": 1, "max_steps": 3, "aborted": 130}


def read_env_file(path: Path) -> dict[str, str]:
    """The settings of a .env file: NAME=VALUE a line. Raises UsageError with the line's number."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        return found
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "mend or remove it") from None
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        value = value.strip()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        quoted = re.fullmatch(r"""(["'])(.*)\1\s*(#.*)?""", value)
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()) \
                or not quoted and value[:1] in ("'", '"') or "\0" in value:
            raise UsageError(f"{path}, line {number} is not NAME=VALUE",
                             "mend the line, or put # in front of it")
        found[name.strip()] = quoted[2] if quoted else re.sub(r"\s+#.*", "", value)
    return found


def whole_number(what: str, text: str) -> int:
    """The text as a number above 0; else UsageError."""
    if not re.fullmatch(r"[0-9]{1,9}", str(text)) or int(text) < 1:
        raise UsageError(f"{what} must be a whole number above 0, not {brief(str(text), 60)!r}")
    return int(text)


def folder_of(text: str) -> Path:
    """The path of a folder, ~ being the person's own; else UsageError."""
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{brief(text, 80)!r} is not a folder: {error}") from None


def rule_of(decision: str, text: str) -> Rule:
    """The rule that --allow, --ask or --deny means: TOOL:PATTERN. Raises UsageError."""
    name, colon, pattern = text.partition(":")
    known = [*Workspace(".").tools(), "*"]
    if not colon or not pattern or name not in known:
        raise UsageError(f"--{decision} {brief(text, 80)!r} is not TOOL:PATTERN", "for example "
                         f"--{decision} 'shell:git log *'; the tools are {', '.join(known)}")
    return Rule(decision, name, pattern)


def ollama_runs() -> bool:
    """Does an Ollama server answer on this machine?"""
    import socket
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 11434), timeout=0.2).close()
        return True
    return False


class Settings:
    """Flags, environment and .env put together; makes the parts of a run. Raises AgentError."""

    def __init__(self, words: list[str]):
        import argparse
        parser = argparse.ArgumentParser(
            prog="tiny_agent.py", usage="%(prog)s [options] [TASK ...]", allow_abbrev=False,
            description="A coding agent. A task runs and exits; without one a chat begins. Piped "
                        "input joins the task, or is it.")
        for variable, flags, metavar, default, text in SETTINGS:
            parser.add_argument(*flags.split("/"), metavar=metavar, help=f"{text} ({variable})")
        parser.add_argument("--max-steps", metavar="N", default="30", help="turns at the most (30)")
        for decision in ("allow", "ask", "deny"):
            parser.add_argument(f"--{decision}", metavar="TOOL:PATTERN", action="append",
                                default=[], help="one more rule; repeatable")
        parser.add_argument("--sandbox-net", action="store_true",
                            help="commands in the sandbox may use the network")
        parser.add_argument("--no-session", action="store_true", help="keep nothing")
        parser.add_argument("--json", action="store_true", help="stdout: one event a line")
        parser.add_argument("--rpc", action="store_true",
                            help="requests on stdin, responses and events on stdout")
        parser.add_argument("-c", "--continue", dest="go_on", action="store_true",
                            help="go on with the last session of this workspace")
        parser.add_argument("-r", "--resume", metavar="ID|FILE", help="go on with this session")
        parser.add_argument("--sessions", action="store_true",
                            help="list the sessions of this workspace")
        parser.add_argument("--why", metavar=("TOOL", "TARGET"), nargs=2,
                            help="print how the rules decide; run nothing")
        parser.add_argument("--version", action="version", version=f"tiny_agent {VERSION}")
        parser.add_argument("task", metavar="TASK", nargs="*", help="what to do")
        dashes = words.index("--") if "--" in words else len(words)
        self.flags = parser.parse_intermixed_args(words[:dashes])
        self.flags.task += words[dashes + 1:]
        for name, value in read_env_file(Path(__file__).resolve().with_name(".env")).items():
            os.environ.setdefault(name, value)
        for provider in (*PROVIDERS.values(), Provider("custom", "", "", "AGENT_API_KEY")):
            provider.key()                   # so that no key that is set is ever shown
        self.home = folder_of(os.environ.get("AGENT_HOME") or "~/.tiny_agent")
        self.mode = one_of("mode", self.get("AGENT_MODE"), MODES)
        self.budget = whole_number("the budget", self.get("AGENT_BUDGET"))
        self.max_steps = whole_number("--max-steps", self.flags.max_steps)
        self.rules = [rule_of(decision, text) for decision in ("allow", "ask", "deny")
                      for text in getattr(self.flags, decision)] + RULES
        self.sandbox = one_of("sandbox setting", self.get("AGENT_SANDBOX"),
                              ("auto", "off", "require"))

    def get(self, variable: str) -> str:
        """A setting: the flag, else the environment, else the default."""
        _, flags, _, default, _ = next(row for row in SETTINGS if row[0] == variable)
        given = getattr(self.flags, flags.split("/")[-1].lstrip("-").replace("-", "_"))
        return given if given is not None else os.environ.get(variable) or default

    def sandbox_state(self) -> str:
        """What decide() gets: on, off, none or require."""
        if self.sandbox == "off":
            return "off"
        return "on" if bubblewrap() else "none" if self.sandbox == "auto" else "require"

    def folder(self) -> Path:
        """The folder to work in, if no session says otherwise."""
        return Path(os.path.realpath(folder_of(self.get("AGENT_WORKSPACE") or "workspace")))

    def workspace(self, session: Session) -> Workspace:
        """The folder that was named, which must be there; else the session's; else the default,
        which is made."""
        named = self.get("AGENT_WORKSPACE")
        recorded = session.entries[0].data.get("cwd") if self.flags.resume and not named else ""
        folder = Path(recorded) if isinstance(recorded, str) and recorded else self.folder()
        try:
            if not named and not recorded:
                folder.mkdir(exist_ok=True)
            os.listdir(folder)
        except (OSError, ValueError) as error:
            raise UsageError(f"the workspace {brief(str(folder))} cannot be used: "
                             f"{getattr(error, 'strerror', error)}",
                             "name a folder that you can read with -w") from None
        workspace = Workspace(folder, limit=self.budget)
        workspace.network = self.flags.sandbox_net
        return workspace

    def provider(self, session: Session) -> tuple[Provider, str]:
        """(who answers, why it is that one)"""
        name, model = self.get("AGENT_PROVIDER"), self.get("AGENT_MODEL")
        base_url = self.get("AGENT_BASE_URL")
        if base_url and not re.fullmatch(
                r"https?://([^/\s[\]]+|\[[0-9a-fA-F:.]+\](:\d+)?)(/\S*)?", base_url):
            raise UsageError(f"the base URL {brief(base_url, 80)!r} is not an address",
                             "it begins with http:// or https:// and ends before /chat/completions")
        last = next((e.message for e in reversed(session.active_path())
                     if isinstance(e.message, AssistantMessage)), AssistantMessage())
        if base_url and not name:
            key_env = "AGENT_API_KEY" if os.environ.get("AGENT_API_KEY") else None
            model = model or (last.model if last.provider == "custom" else "") or "default"
            return Provider("custom", base_url.rstrip("/"), model, key_env), "its address was given"
        if name:
            return ready(PROVIDERS[one_of("provider", name, PROVIDERS)].using(model, base_url)), \
                "it was named"
        if last.provider == "custom" or session.entries[0].data.get("own_address") is True:
            raise UsageError("the session used a server of its own, whose address is not recorded",
                             "give it with --base-url, or choose another provider with -p")
        if last.provider in PROVIDERS:
            return ready(PROVIDERS[last.provider].using(model or last.model)), "the session used it"
        for provider in PROVIDERS.values():
            if provider.key():
                return provider.using(model), f"{provider.key_env} is set"
        if ollama_runs():
            return PROVIDERS["ollama"].using(model), "it runs on this machine"
        if model:
            raise UsageError(f"nobody is there to run the model {brief(model, 60)!r}: no key "
                             "is set and no Ollama runs", "set a key, or name a provider with -p")
        return PROVIDERS["demo"].using(), "no key is set and no Ollama runs"

    def new_session(self, folder: Path) -> Session:
        """A new session of a folder; one without a file if nothing is to be kept."""
        return Session() if self.flags.no_session else Session.new(self.home, folder)

    def session(self) -> Session:
        """The session to go on with, or a new one."""
        if self.flags.resume is not None and self.flags.go_on:
            raise UsageError("-c and -r name two sessions", "give one of them")
        if self.flags.resume is None and not self.flags.go_on:
            return self.new_session(self.folder())
        return self.load(newest_session(self.home, self.folder()) if self.flags.go_on else
                         find_session(self.home, self.flags.resume))

    def load(self, path: Path) -> Session:
        """The session of a file; detached from it if nothing is to be kept. Raises SessionError."""
        session = Session.load(path)
        if self.flags.no_session:
            session.close()
            session.path = None
        return session

    def task(self) -> str:
        """What the words on the command line and the piped input ask for; "" for a chat
        and for --rpc."""
        if self.flags.rpc and (self.flags.task or self.flags.json):
            raise UsageError("--rpc takes no task and no --json", "tasks come as requests on stdin")
        if self.flags.rpc:
            return ""
        words = " ".join(self.flags.task)
        piped = "" if sys.stdin is None or sys.stdin.isatty() else \
            sys.stdin.buffer.read().decode("utf-8", "replace").strip("\n")
        text = "\n\n".join(part for part in (words, piped) if part.strip())
        return text.encode("utf-8", "replace").decode()


def main(words: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:       # closed by who called us
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))
        with contextlib.suppress(AttributeError):
            getattr(sys, name).reconfigure(encoding="utf-8", errors="replace")
    screen = Screen(sys.stdout, sys.stderr)
    try:
        with handling(SIGTERM=terminate, SIGHUP=terminate):
            return run_program(Settings(sys.argv[1:] if words is None else words), screen)
    except AgentError as error:
        screen.say(f"tiny_agent: {error.message}", RED)
        if error.hint:
            screen.say(f"  {error.hint}", RED)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return EXIT_STATUS["aborted"]
    except Terminated as ending:
        return 128 + ending.args[0]
    except OSError as error:                 # the reader has gone, or its disk is full
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                screen.say(f"tiny_agent: {error.strerror}: {error.filename or 'output'}", RED)
        return 1


def run_program(settings: Settings, screen: Screen) -> int:
    """Puts the parts together and runs a task or a chat; returns the exit status."""
    import shutil
    import textwrap
    if settings.flags.why:
        return print_why(settings)
    if settings.flags.sessions:
        return print_sessions(settings)
    task = settings.task()
    out = own_stdout() if settings.flags.rpc else None
    if not task and out is None and (settings.flags.json or not can_ask()):
        raise UsageError("there is no task", "give one as argument or through a pipe; a chat needs "
                         "a terminal, and is not for --json")
    session = settings.session()
    workspace = settings.workspace(session)
    provider, why = settings.provider(session)
    provider.key()                           # so that it is masked from the first message on
    agent = Agent(provider, workspace, mode=settings.mode, rules=settings.rules, session=session,
                  home=None if settings.flags.no_session else settings.home,
                  max_steps=settings.max_steps, budget=settings.budget,
                  sandbox=settings.sandbox_state())
    if can_ask():
        agent.approve = asker(agent, functools.partial(ask_at_terminal, agent, screen))
    for note in remarks(session, workspace):
        screen.say(f"warning: {note}", RED)
    screen.say(describe(agent), DIM)
    if provider.name == "demo":
        keys = ", ".join(p.key_env for p in PROVIDERS.values() if p.key_env)
        text = (f"a scripted model answers ({why}). For a real one set one of {keys} in the "
                "environment or in .env, start Ollama, or use --base-url")
        columns = max(20, min(shutil.get_terminal_size().columns, 100))
        screen.say(textwrap.fill(text, columns, initial_indent="  ", subsequent_indent="  "), DIM)
    if out is not None:
        return Server(agent, screen, settings, out).run()
    if not task:
        Chat(agent, screen, settings).run()
        return 0
    add_files(agent, " ".join(settings.flags.task), screen)
    settled = watch(agent, task, screen, show_json if settings.flags.json else screen.show)
    for line in ending_in_words(settled.reason, settled.error) if settings.flags.json else ():
        screen.say(line, RED)
    return EXIT_STATUS[settled.reason]


if __name__ == "__main__":
    sys.exit(main())
