"""What a chat server may send, without one."""

import asyncio

import httpx
import pytest

from ctcdraft.data.server import ChatServer, ServerError

NESTED = b"[" * 900 + b"]" * 900
WORDS = b'"message": {"content": "yes"}, "finish_reason": "stop"'
STRANGE = {
    "nested": b'{"choices": ' + b"[" * 9999 + b"]" * 9999 + b"}",
    "nested in the message": b'{"choices": [{"message": {"thinking": ' + NESTED + b'}, "finish_reason": "stop"}]}',
    "a number of 5000 digits": b'{"choices": [{' + WORDS + b'}], "created": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("body", STRANGE.values(), ids=STRANGE)
def test_what_cannot_be_read_is_no_answer_and_asked_for_again(body):
    sent = [body, b'{"choices": [{' + WORDS + b"}]}"]

    async def answers(retries):
        left = iter(sent)
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=next(left)))
        async with httpx.AsyncClient(transport=transport) as client:
            server = ChatServer(client, "http://there/v1", "m", concurrency=1, retries=retries)
            return await server.answer([{"role": "user", "content": "is it?"}])

    assert asyncio.run(answers(1)).message["content"] == "yes"
    with pytest.raises(ServerError, match="no whole answer"):
        asyncio.run(answers(0))
