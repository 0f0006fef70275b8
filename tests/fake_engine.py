"""A stand-in for dflash_server that answers as told: python fake_engine.py BEHAVIOUR [flags of a server]

serve    answers every request with the tokens 1, 2, 3 ...
other    serve, but without every expert resident the third token differs
slow     serve, a quarter of a second for each request
stall    answers /health and then nothing
first    serve with every expert resident, else stall
sleep    never listens
die      ends at the first completion
refuse   ends at the start with a sentence, as dflash_server does
small    refuses --spark-ram among llama-server's lines, as dflash_server does when it knows the model; else serve
crash    ends at the start with a traceback
full     ends at the start with every expert on the GPU and without a store, as where they do not fit; else serve
cpu-moe  serve, but with --n-cpu-moe the third token differs
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BEHAVIOUR, FLAGS = sys.argv[1], sys.argv[2:]
HAS_STORE = "--no-spark" not in FLAGS
ALL_RESIDENT = "1000000" in FLAGS or not HAS_STORE
uses = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def reply(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        names = ("bytes_read", "bytes_home", "bytes_ahead", "promotions", "steps", "steps_replayed", "reads_home", "reads_ahead")
        total = {"uses": uses, "hits": uses // 2, "misses": uses - uses // 2, "n_fast": 4, "n_expert": 8, "fast_bytes": 1, **dict.fromkeys(names, 0)}
        stats = {"total": total} if HAS_STORE else {"active": False}
        self.reply(stats if self.path == "/spark/stats" else {"status": "ok"})

    def do_POST(self) -> None:
        global uses
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if BEHAVIOUR == "stall" or (BEHAVIOUR == "first" and not ALL_RESIDENT):
            time.sleep(600)
        if self.path == "/apply-template":
            return self.reply({"prompt": " ".join(m["content"] for m in body["messages"])})
        if self.path == "/tokenize":
            return self.reply({"tokens": list(range(len(body["content"].split())))})
        if BEHAVIOUR == "die":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        if BEHAVIOUR == "slow":
            time.sleep(0.25)
        self.send_response(200)
        self.end_headers()
        n = body["n_predict"]
        for i in range(n):
            is_other = (BEHAVIOUR == "other" and not ALL_RESIDENT) or (BEHAVIOUR == "cpu-moe" and "--n-cpu-moe" in FLAGS)
            token = 99 if is_other and i == 2 else i
            uses += 8
            self.wfile.write(b"data: " + json.dumps({"content": "x", "tokens": [token]}).encode() + b"\n\n")
        timings = {"predicted_n": n, "predicted_per_second": 10.0, "prompt_n": len(body["prompt"]), "prompt_per_second": 100.0}
        self.wfile.write(b"data: " + json.dumps({"content": "", "timings": timings}).encode() + b"\n\n0\r\n\r\n")


if __name__ == "__main__":
    if BEHAVIOUR == "sleep":
        time.sleep(600)
    if BEHAVIOUR == "refuse" and ALL_RESIDENT:
        sys.exit("dflash_server: error: --spark-ram 1 is too little.")
    if BEHAVIOUR == "small" and "--spark-ram" in FLAGS:
        sys.exit("I srv load_model: loading\nspark: error: --spark-ram 1 is too small.\nE srv llama_server: exiting due to model loading error")
    if BEHAVIOUR == "crash":
        raise RuntimeError("no such backend")
    if BEHAVIOUR == "full" and not HAS_STORE and "--n-cpu-moe" not in FLAGS:
        sys.exit("loading\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 20000.00 MiB on device 0: cudaMalloc failed: out of memory\nexiting")
    port = int(FLAGS[FLAGS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
