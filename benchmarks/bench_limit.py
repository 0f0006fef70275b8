#!/usr/bin/env python3
"""A mixture of experts larger than the memory of its process: --spark-ram against llama.cpp's own memory mapping.

Method: a synthetic model (made here when it is missing), at least three times larger than the memory limit of the control
group that each server runs in, page cache included. One server at a time; before each start the model's pages are dropped
from the cache. After a prompt and some tokens to settle, greedy tokens are timed by llama-server itself
(predicted_per_second). Rounds alternate the arms. A mapping depends on the read-ahead of the device, which is in the
settings: measure it as the machine has it and with the kernel's usual 128 KiB (--read-ahead-kib 128).

Arms:
  mmap   the stock llama-server with its default mapping and --no-repack (repacked experts are copied to memory of the
         process, which the limit does not hold)
  spark  dflash_server --spark-ram, under the same limit
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
from memory_limit import MemoryLimit
from servers import DFLASH, ROOT, STOCK, Server, prompts_from

GIB = 2**30
PROMISED = 3.0
# 6.9 GiB; the hottest 60 % of a layer's experts take 93 % of the routing, and 64 topics use different ones
MODEL = ROOT / "build" / "bench" / "limit.gguf"
MODEL_ARGS = ("--preset", "bench-6gib", "--topics", "64", "--affinity", "0.6")


def make_model(path: Path) -> None:
    """Writes the synthetic model, minutes; complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    subprocess.run([sys.executable, ROOT / "scripts" / "make_synthetic_moe.py", "model", *MODEL_ARGS, "--out", unfinished], check=True)
    unfinished.rename(path)


def drop_cache(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead_file(path: Path) -> Path | None:
    """Where the kernel keeps the read-ahead of the device that holds a file; None where it does not say."""
    device = path.stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    candidates = (folder / "queue" / "read_ahead_kb", folder.parent / "queue" / "read_ahead_kb")
    return next((c for c in candidates if c.exists()), None)


@contextmanager
def read_ahead(path: Path, kib: int | None) -> Iterator[int | None]:
    """Sets the read-ahead of the model's device in KiB while measuring, None: leaves it; gives what is in effect."""
    file = read_ahead_file(path)
    if file is None:
        if kib is not None:
            raise OSError(f"the read-ahead of the device of '{path}' cannot be set here: leave --read-ahead-kib out.")
        yield None
        return
    before = file.read_text()
    if kib is not None:
        file.write_text(str(kib))
    try:
        yield int(file.read_text())
    finally:
        if kib is not None:
            file.write_text(before)


def measure(program: Sequence[str], flags: Sequence[Any], limit_bytes: int, args: argparse.Namespace, prompt: str) -> dict[str, float]:
    """One server under the limit: tokens/s of decoding, time to first token of the prompt, peak memory of the group."""
    drop_cache(args.model)
    with MemoryLimit(limit_bytes) as limit, Server(program, flags, enter=limit.enter) as server:
        first = server.complete(prompt, args.settle)
        before = server.get("/spark/stats")
        answer = server.complete(prompt[: len(prompt) // 2], args.tokens)
        metrics = {"tokens_per_s": answer.decode_per_s, "ttft_ms": 1000 * first.first_s, "peak_gib": (limit.peak_bytes() or 0) / GIB}
        after = server.get("/spark/stats")
        if before and after and "total" in after:
            uses = after["total"]["uses"] - before["total"]["uses"]
            metrics["hit_rate"] = (after["total"]["hits"] - before["total"]["hits"]) / uses
            metrics["read_mb_per_token"] = (after["total"]["bytes_read"] - before["total"]["bytes_read"]) / 1e6 / answer.n_tokens
        return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="one GGUF file; the default one is made when it is missing")
    parser.add_argument("--limit-gib", type=float, default=2.0, help="memory limit of the control group")
    parser.add_argument("--spark-ram", type=float, default=1.5, help="GiB")
    parser.add_argument("--stock", type=lambda path: Path(path).resolve(), default=STOCK)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=int, default=8, help="tokens generated before the timed ones")
    parser.add_argument("--tokens", type=int, default=24, help="timed")
    parser.add_argument("--prompt-characters", type=int, default=60)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--read-ahead-kib", type=int, help="of the model's device, while measuring; default: as it is")
    parser.add_argument("--spark-flags", nargs=argparse.REMAINDER, default=[], help="more flags for dflash_server")
    args = parser.parse_args()
    if not args.stock.is_file():
        parser.error(f"'{args.stock}' does not exist: run `make stock`, or give --stock.")
    if args.model == MODEL and not MODEL.exists():
        make_model(MODEL)
    size = args.model.stat().st_size
    if size < 3 * args.limit_gib * GIB:
        parser.error(f"the model has {size / GIB:.2f} GiB, less than three times the limit of {args.limit_gib:g} GiB.")

    limit_bytes = int(args.limit_gib * GIB)
    (prompt,) = prompts_from(ROOT / "tests" / "data" / "heldout.jsonl", 1, args.prompt_characters)
    flags = ["-m", args.model, "-t", args.threads, "-np", 1, "-c", args.context, "-b", 128, "-ub", 128, "--no-warmup", "--cache-ram", 0]
    arms: dict[str, Callable[[], common.Metrics]] = {
        "mmap": lambda: measure([str(args.stock)], [*flags, "--no-repack"], limit_bytes, args, prompt),
        "spark": lambda: measure(DFLASH, [*flags, "--spark", "--spark-ram", args.spark_ram, *args.spark_flags], limit_bytes, args, prompt),
    }
    common.end_on_sigterm()
    load_before = common.load_average()
    shared = ("tokens_per_s", "ttft_ms", "peak_gib")
    with read_ahead(args.model, args.read_ahead_kib) as read_ahead_kib:
        rounds = common.run_paired(arms, args.rounds, warmup=0)
    ratios = {m: rounds.ratio("spark", "mmap", m) for m in shared}
    medians = {arm: {m: rounds.median(arm, m) for m in rounds.rounds[0][arm]} for arm in arms}
    results = {"rounds": args.rounds, "medians": medians, "spark / mmap": ratios, "promised": PROMISED}
    common.progress(f"spark / mmap: tokens/s {ratios['tokens_per_s']['median']:.2f} (promised {PROMISED:g})")
    settings = {k: getattr(args, k) for k in ("model", "limit_gib", "spark_ram", "settle", "tokens", "prompt_characters", "context", "threads", "spark_flags")}
    settings["read_ahead_kib"] = read_ahead_kib
    settings["model_gib"] = round(size / GIB, 2)
    settings["model_args"] = MODEL_ARGS if args.model == MODEL else None
    common.save("limit", method=(__doc__ or "").strip(), settings=settings, results=results, rounds={"limit": rounds}, load_before=load_before)


if __name__ == "__main__":
    main()
