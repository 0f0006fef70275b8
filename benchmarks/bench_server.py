#!/usr/bin/env python3
"""dflash_server against the stock llama-server of the same sources, with 1 and with 8 clients.

Method: every arm is a server that stays loaded; they take turns within a round, so only one works at a time. A round sends
the same held-out prompts, greedy, a fixed number of tokens, no prompt cache. Answers are streamed; after the
first event the client looks every 2 ms only, so that it takes little processor time from the server. Reported: generated
tokens per second of wall time over all clients, prompts included, the median time to first token, and the server's processor
time for each generated token; ratios are medians over rounds of the ratio within a round. Threads that wait spin, so
processor time says something with --threads 1; then it also does on a machine that others use.

Arms:
  stock            llama-server, unpatched, same sources and flags (make stock)
  off              dflash_server --no-spark
  stock-no-repack  llama-server --no-repack: experts in plain layout, as a store keeps them
  all-fast         dflash_server --spark with a fast slot for every expert
"""
from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import common
from servers import DEMO, DFLASH, ROOT, STOCK, Server, prompts_from

ARMS = {
    "stock": (None, ()),
    "off": (DFLASH, ("--no-spark",)),
    "stock-no-repack": (None, ("--no-repack",)),
    "all-fast": (DFLASH, ("--spark", "--spark-slots", "100000")),
}
METRICS = ("tokens_per_s", "ttft_ms", "cpu_ms_per_token")
# the ratios that are promised: numerator, denominator, at most this far from 1
CLAIMS = (("off", "stock", 0.02), ("all-fast", "stock", 0.02), ("all-fast", "stock-no-repack", 0.02))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--stock", type=lambda path: Path(path).resolve(), default=STOCK, help="the unpatched llama-server")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=8, help="per round")
    parser.add_argument("--tokens", type=int, default=128, help="generated per request")
    parser.add_argument("--prompt-characters", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="server")
    args = parser.parse_args()
    if not args.stock.is_file():
        parser.error(f"'{args.stock}' does not exist: run `make stock`, or give --stock.")

    prompts = prompts_from(ROOT / "tests" / "data" / "heldout.jsonl", args.requests, args.prompt_characters)
    slots = max(args.clients)
    flags = ["-m", args.model, "-t", args.threads, "-np", slots, "-c", 2048 * slots, "--no-cache-prompt", "--cache-ram", 0]
    common.end_on_sigterm()
    load_before = common.load_average()
    paired = {}
    for clients in args.clients:
        with ExitStack() as stack:
            servers = {name: stack.enter_context(Server(ARMS[name][0] or [args.stock], [*flags, *ARMS[name][1]])) for name in args.arms}
            arms = {name: (lambda server=server: server.load(prompts, args.tokens, clients)) for name, server in servers.items()}
            paired[f"{clients} clients"] = common.run_paired(arms, args.rounds)

    results = {}
    for key, rounds in paired.items():
        claims = [
            {"arm": arm, "base": base, "within": within, **{m: rounds.ratio(arm, base, m) for m in METRICS}}
            for arm, base, within in CLAIMS
            if {arm, base} <= set(args.arms)
        ]
        results[key] = {**rounds.summary(args.arms[0]), "claims": claims}
        for claim in claims:
            common.progress(
                f"{key}: {claim['arm']} / {claim['base']}: tokens/s {claim['tokens_per_s']['median']:.3f}, "
                f"time to first token {claim['ttft_ms']['median']:.3f}, processor time a token {claim['cpu_ms_per_token']['median']:.3f}"
            )
    settings = {k: getattr(args, k) for k in ("model", "clients", "requests", "tokens", "prompt_characters", "threads", "arms")}
    common.save(args.name, method=(__doc__ or "").strip(), settings=settings, results=results, rounds=paired, load_before=load_before)


if __name__ == "__main__":
    main()
