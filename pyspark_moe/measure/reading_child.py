"""The process that reads a corpus on a model and reports which experts it used; calibrate.py starts it.

Its job is a JSON object on stdin, its reports are JSON objects on stdout, one a line:

    {"loaded": "why residency is on or off"}
    {"share": 0.25, "tokens": 512, "pieces": 3, "plain": 0, "counts": {"1": [9, 0, ...], ...}}   "counts" now and then
    {"ended": "all of it", "share": 1.0, ...}                                                   the last one
    {"error": "a sentence for the user"}

It ends when its stdin ends, so it does not outlive who started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bootstrap import Reader, ReadingLimits, read_conversations
from ..config import SparkConfig
from ..errors import SparkError
from ..history.corpus import ShuffledCorpus

_REPORT_EVERY_S, _COUNTS_EVERY_S = 0.2, 2.0
# Fixed, since batch shapes change rounding and with it, now and then, an expert.
N_BATCH = 512


@dataclass(frozen=True)
class ReadingJob:
    """corpus, model: files. tokens, seconds: limits of the reading. tokens_per_session: so that many sessions are seen.
    n_ctx: of the context. n_gpu_layers, n_threads: as in llama.cpp, None: its default. spark: fields of SparkConfig."""

    corpus: str
    model: str
    seed: int
    tokens: int
    seconds: float
    tokens_per_session: int
    n_ctx: int
    n_gpu_layers: int
    n_threads: int | None
    spark: dict[str, Any]


class CountingReader:
    """A Reader that says after each step how far it is. report(n_tokens): what was computed so far."""

    def __init__(self, reader: Reader, report: Callable[[int, int, int], None]) -> None:
        self._reader, self._report = reader, report
        self.n_tokens = self.n_pieces = self.n_plain = 0
        self._left = 0

    def begin_chat(self, messages: str, n_max: int) -> tuple[int, bool]:
        self._left, is_plain = self._reader.begin_chat(messages, n_max)
        self.n_pieces += 1
        self.n_plain += is_plain
        return self._left, is_plain

    def step(self) -> int:
        before, self._left = self._left, self._reader.step()
        self.n_tokens += before - self._left
        self._report(self.n_tokens, self.n_pieces, self.n_plain)
        return self._left


def run(job: ReadingJob, send: Callable[[dict[str, Any]], None]) -> None:
    """Does the job. Raises SparkError."""
    from ..prefill import Prefill  # loads llama.cpp
    from ..llm import SparkLlama

    corpus = ShuffledCorpus(Path(job.corpus), job.seed)
    spark = SparkConfig(mode="on", profile="none", history="none", **job.spark)
    threads = {} if job.n_threads is None else {"n_threads": job.n_threads, "n_threads_batch": job.n_threads}
    options = {"n_ctx": job.n_ctx, "n_batch": N_BATCH, "n_ubatch": N_BATCH, "n_gpu_layers": job.n_gpu_layers, **threads}
    with SparkLlama(job.model, spark=spark, verbose=False, **options) as llm:
        llm.spark.reset_stats()
        send({"loaded": llm.spark.why})
        layers = llm.spark.layers
        begin = last_report = last_counts = time.monotonic()

        def counts() -> dict[str, list[int]]:
            return {str(layer): llm.spark.counts(layer).tolist() for layer in layers}

        def report(n_tokens: int, n_pieces: int, n_plain: int) -> None:
            nonlocal last_report, last_counts
            now = time.monotonic()
            if now - last_report < _REPORT_EVERY_S:
                return
            share = min(1.0, max(n_tokens / job.tokens, (now - begin) / job.seconds))
            message: dict[str, Any] = {"share": share, "tokens": n_tokens, "pieces": n_pieces, "plain": n_plain}
            if now - last_counts >= _COUNTS_EVERY_S:
                message["counts"], last_counts = counts(), now
            send(message)
            last_report = now

        with Prefill(ctypes.cast(llm.ctx, ctypes.c_void_p).value, N_BATCH) as prefill:
            limits = ReadingLimits(job.tokens, job.seconds, job.tokens_per_session)
            done = read_conversations(corpus, CountingReader(prefill, report), limits)
        send({"ended": done.ended, "share": 1.0, "tokens": done.n_tokens, "pieces": done.n_pieces, "plain": done.n_plain,
              "seconds": round(done.seconds, 3), "counts": counts()})  # fmt: skip


def job_text(job: ReadingJob) -> bytes:
    """The job as it is sent, a line."""
    return json.dumps(asdict(job)).encode() + b"\n"


def main() -> int:
    """0: done, 1: the last report says why not."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs into the log

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    job = ReadingJob(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    try:
        run(job, send)
    except SparkError as e:
        send({"error": str(e)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
