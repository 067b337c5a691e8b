"""Answers from any OpenAI-compatible server: chat completions, with concurrency, timeouts and retries."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from .messages import Message, for_server, read_turn
from .secrets import masked
from .sources import RowError

PASSING = {408, 409, 425, 429}  # and 5xx: the same request may succeed in a moment
REFUSING = {400, 413, 422}  # it never will; of others (401, 404 ...) that is up to who runs the server
ENDED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "tool_calls", "function_call")  # finish reasons
CUT = ("length", "model_length", "max_tokens")
LONGEST_WAIT = 30.0  # seconds between two tries
FEWEST_FAILURES = 4  # in a row, and as many as may be asked at once: then the server is dead


class ServerError(Exception):
    """Why a server gave no answer, after every try that made sense. It goes into files, so it keeps no secret."""

    def __init__(self, reason: str) -> None:
        super().__init__(masked(reason))


class Refusal(ServerError):
    """The server will not answer this request, whenever it is asked."""


class Answer(NamedTuple):
    """message: in the form of data/messages.py; cut: it ended for want of tokens, not by itself; unread: what else the
    server said in it."""

    message: Message
    cut: bool
    unread: Sequence[str] = ()


class ChatServer:
    """A server under `url` (as its clients get it, mostly ending in /v1).

    model: its name there; None takes the first that the server lists. retries: tries after the first, with
    doubling waits of half a second up to 30. When as many requests as may run at once have failed in a row, all tries
    included, the rest fail without being sent.
    """

    def __init__(
        self, client: httpx.AsyncClient, url: str, model: str | None, *, concurrency: int, retries: int
    ) -> None:
        url = url.rstrip("/").removesuffix("/chat/completions")
        self.url = url + ("" if urlsplit(url).path.strip("/") else "/v1")
        self.model, self.retries, self._client = model, retries, client
        self._slots = asyncio.Semaphore(concurrency)
        self._failures, self._most_failures = 0, max(FEWEST_FAILURES, concurrency)

    async def answer(self, messages: list[Message], *, tools: list[Any] | None = None, **options: Any) -> Answer:
        """The next assistant turn. options: fields of the request (max_tokens, temperature, seed ...).

        Raises Refusal when the server refuses the request, another ServerError when it fails at every try.
        """
        async with self._slots:
            if self._failures >= self._most_failures:
                raise ServerError(f"{self.url} failed {self._failures} requests in a row")
            try:
                if self.model is None:
                    self.model = await self._tried("GET", "/models", None, lambda found: str(found["data"][0]["id"]))
                sent = [for_server(message) for message in messages]
                body = {"model": self.model, "messages": sent, **({"tools": tools} if tools else {}), **options}
                found = await self._tried("POST", "/chat/completions", body, _answer)
            except ServerError as error:
                self._failures = 0 if isinstance(error, Refusal) else self._failures + 1  # a refusal is an answer
                raise
            self._failures = 0
            return found

    async def _tried(self, method: str, path: str, body: Any, read: Any) -> Any:
        for attempt in range(self.retries + 1):
            wait = min(LONGEST_WAIT, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                response = await self._client.request(method, self.url + path, json=body)
                if response.status_code < 300:
                    return read(response.json())
                reason = f"{response.status_code} {response.headers.get('location') or response.text[:200]}"
                if response.status_code < 500 and response.status_code not in PASSING:
                    kind = Refusal if response.status_code in REFUSING else ServerError
                    raise kind(f"{self.url} refuses: {reason}")
                with suppress(ValueError):  # a date, which some servers give
                    wait = max(wait, min(LONGEST_WAIT, float(response.headers.get("retry-after", 0))))
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__} {error}".strip()
            except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
                reason = f"no whole answer ({type(error).__name__} {error})"
            if attempt < self.retries:
                await asyncio.sleep(wait)
        raise ServerError(f"{self.url} failed {self.retries + 1} times, the last time: {' '.join(reason.split())}")


def _answer(found: Any) -> Answer:
    choice = found["choices"][0]
    said, reason = choice["message"], choice["finish_reason"]
    if said.get("refusal") or reason == "content_filter":
        raise Refusal(f"the answer is withheld ({said.get('refusal') or reason})")
    if reason not in ENDED + CUT:
        raise KeyError(f"finish_reason {reason}")
    unread: list[str] = []
    try:
        (message,) = read_turn({**said, "role": "assistant"}, "the answer", unread)
    except RowError as error:
        raise Refusal(str(error)) from error  # the model's own words, which it would say again
    return Answer(message, reason in CUT, unread)
