"""An OpenAI-compatible server of the standard library that runs a real (tiny) base, and fails as it is told.

python tests/helpers/chat_server.py <base folder> <port> [<fault> ...]: each request meets every fault in turn, once,
before it is answered.
"""

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from ctcdraft.data.template import prompt_ids
from ctcdraft.model import Decoder, load_base

ANSWERS = {}  # by base and request, of all servers of this process
FAULTS = ("error", "busy", "half", "nothing", "hangup", "unfinished", "rubbish", "slow")


class Server(ThreadingHTTPServer):
    """`asked` counts requests by content; `refuse` says which contents get a 400, `broken` which a 500."""

    daemon_threads = True

    def __init__(self, base, port=0, faults=(), refuse=(), broken=()):
        super().__init__(("127.0.0.1", port), Handler)
        self.base, self.faults, self.refuse, self.broken = base, faults, refuse, broken
        self.asked, self.lock = Counter(), threading.Lock()
        self.bodies = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = json.dumps([body["messages"], body.get("temperature"), body.get("seed")])
        with self.server.lock:
            seen = self.server.asked[key]
            self.server.asked[key] += 1
            self.server.bodies.append(body)
        if any(word in key for word in self.server.refuse):
            self._send(b'{"error": "too long for me"}', 400)
        elif any(word in key for word in self.server.broken):
            self._fail("error")
        elif seen < len(self.server.faults):
            self._fail(self.server.faults[seen])
        else:
            self._send(self._answer(body))

    def _answer(self, body):
        base, options = self.server.base, {"temperature": body.get("temperature", 0.0), "seed": body.get("seed", 0)}
        with self.server.lock:
            key = base.path, json.dumps(body)
            if key not in ANSWERS:
                torch.set_num_threads(1)
                prompt = prompt_ids(base.tokenizer, body["messages"], None, body.get("chat_template_kwargs", {}))
                ANSWERS[key] = Decoder(base).generate(prompt, body["max_tokens"], **options).tokens
            tokens = ANSWERS[key]
        message = {"role": "assistant", "content": base.tokenizer.decode(tokens, skip_special_tokens=True)}
        reason = "stop" if tokens[-1] in base.eos_ids else "length"
        return json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()

    def _fail(self, fault):
        if fault == "error":
            self._send(b"out of memory", 500)
        elif fault == "busy":
            self._send(b"later", 429, {"Retry-After": "0"})
        elif fault == "half":
            self._send(b'{"choices": [{"message": {"role": "assis', length=4000)
            self.close_connection = True
        elif fault == "nothing":
            self._send(b"")
        elif fault == "hangup":
            self.close_connection = True
        elif fault == "unfinished":
            self._send(b'{"choices": [{"message": {"content": "and then"}, "finish_reason": null}]}')
        elif fault == "rubbish":
            self._send(b'{"choices": []}')
        elif fault == "slow":
            time.sleep(3)
            self.close_connection = True

    def _send(self, data, status=200, headers=None, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def serve(folder, port, *faults):
    Server(load_base(folder), int(port), faults).serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
