"""What a chat server may send, without one."""

import asyncio

import httpx
import pytest

from ctcdraft.data.server import ChatServer, Refusal, ServerError

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


def asked(reply, url="http://there/v1", model="m"):
    """What a server says, whose every response is that, and the addresses that were asked."""
    seen = []

    def respond(request):
        seen.append(str(request.url))
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, json=reply)

    async def answer():
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
            server = ChatServer(client, url, model, concurrency=1, retries=0)
            return await server.answer([{"role": "user", "content": "is it?"}])

    return asyncio.run(answer()), seen


def choice(reason, **said):
    return {"choices": [{"message": {"content": "yes", **said}, "finish_reason": reason}]}


@pytest.mark.parametrize("reason", ["stop", "eos_token", "stop_sequence", "end_turn", "length", "model_length"])
def test_servers_have_several_words_for_an_end(reason):
    (answer, _) = asked(choice(reason))
    assert (answer.message["content"], answer.cut) == ("yes", "length" in reason)


@pytest.mark.parametrize("body", [choice("content_filter"), choice("stop", content=None, refusal="content_filter")])
def test_an_answer_that_is_withheld_is_a_refusal_and_not_asked_for_again(body):
    with pytest.raises(Refusal, match=r"the answer is withheld \(content_filter\)"):
        asked(body)


def test_a_url_may_be_that_of_the_requests_and_a_redirect_says_where_to():
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"):
        assert asked(choice("stop"), url)[1] == ["http://h:1/v1/chat/completions"]
    with pytest.raises(ServerError, match="refuses: 307 https://h/v1"):
        asked(httpx.Response(307, headers={"location": "https://h/v1"}))
