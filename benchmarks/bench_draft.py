#!/usr/bin/env python3
"""What a draft is worth: no draft, a fixed number of verified tokens, and the number that is chosen, at several residencies.

Method: for each residency every arm is a server that stays loaded; they take turns within a round, so only one works at a time. A round
sends the same held-out prompts of every domain, greedy, a fixed number of tokens, no prompt cache. Reported: generated tokens
per second of the server's own decoding time by domain and over all (harmonic mean), tokens a step, and milliseconds of a step by
part; ratios are medians over rounds of the ratio within a round. Texts of arms that verify exactly must be those without a draft,
or the run fails. The widths that are chosen go on from round to round, as a server's do.

Arms:
  none       no draft
  upstream   as llama-server drafts by itself: three tokens, rounded in groups (its text may differ; how often is reported)
  fixed      --verify-width 3
  all        every token of the draft's block
  auto       --verify-width auto, the default
"""
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from servers import DEMO, DFLASH, ROOT, Server

DRAFT = ROOT / "pyspark_moe" / "data" / "draft-q8_0.gguf"
ARMS: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "upstream": ("--no-exact-verify", "--verify-width", "3"),
    "fixed": ("--verify-width", "3"),
    "all": ("--verify-width", "63"),
    "auto": ("--verify-width", "auto"),
}
MAY_DIFFER = ("upstream",)


def read_prompts(path: Path, per_domain: int, characters: int) -> dict[str, list[str]]:
    """The first characters of the first documents of every domain that are long enough."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        texts = found.setdefault(document["domain"], [])
        if len(document["text"]) >= characters and len(texts) < per_domain:
            texts.append(document["text"][:characters])
    return found


class Arm:
    """A server and what it wrote."""

    def __init__(self, name: str, server: Server, prompts: dict[str, list[str]], n_tokens: int) -> None:
        self.name, self.server, self.prompts, self.n_tokens = name, server, prompts, n_tokens
        self.texts: list[str] = []

    def round(self) -> dict[str, float]:
        """tokens_per_s over all prompts, and by domain."""
        self.texts, rates = [], {}
        for domain, prompts in self.prompts.items():
            answers = [self.server.complete(prompt, self.n_tokens) for prompt in prompts]
            self.texts += [answer.text for answer in answers]
            rates[domain] = [answer.decode_per_s for answer in answers]
        every = [rate for domain in rates.values() for rate in domain]
        return {"tokens_per_s": statistics.harmonic_mean(every), **{f"tokens_per_s_{d}": statistics.harmonic_mean(r) for d, r in rates.items()}}

    def figures(self) -> dict[str, Any] | None:
        """Of all rounds and the warm-up."""
        draft = (self.server.get("/spark/stats") or {}).get("draft")
        if draft is None or not draft["drafts"]:
            return None
        ms = {part: value and value / draft["steps"] for part, value in draft["ms"].items()}
        by_depth = [a / d for a, d in zip(draft["accepted_at"], draft["drafted_at"])]
        return {"tokens_per_step": 1 + draft["accepted"] / draft["drafts"], "ms_per_step": ms, "accepted_by_depth": by_depth,
                "verify_width": draft["verify_width"], "graphs": draft["graphs"]}  # fmt: skip


def measure(args: argparse.Namespace, residency: Sequence[str], prompts: dict[str, list[str]]) -> tuple[common.Paired, dict[str, Any]]:
    flags = ["-m", args.model, "-t", args.threads, "-np", 1, "-c", 4096, "--cache-ram", 0, *residency, *args.server_flags.split()]
    with ExitStack() as stack:
        arms = {}
        for name in args.arms:
            draft = ARMS[name]
            more = [] if draft is None else ["--draft", args.draft, *draft]
            arms[name] = Arm(name, stack.enter_context(Server(DFLASH, [*flags, *more])), prompts, args.tokens)
        paired = common.run_paired({name: arm.round for name, arm in arms.items()}, args.rounds)
        base = arms[args.arms[0]].texts
        equal = {name: statistics.mean(a == b for a, b in zip(arm.texts, base)) for name, arm in arms.items()}
        for name, share in equal.items():
            if share < 1 and name not in MAY_DIFFER and not args.may_differ:
                raise SystemExit(f"{name}: {100 * share:.0f} % of the texts are those of {args.arms[0]}; all must be.")
        result = {**paired.summary(args.arms[0]), "equal_texts": equal, "draft": {name: arm.figures() for name, arm in arms.items()}}
    return paired, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="the first is what the others are compared with")
    parser.add_argument("--slots", nargs="*", type=int, default=[19, 6], help="fast slots in every layer, beside every expert resident")
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "data" / "heldout.jsonl", help='JSON Lines with "domain" and "text"')
    parser.add_argument("--prompts", type=int, default=2, help="of each domain")
    parser.add_argument("--prompt-characters", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--server-flags", default="", help="more flags for every arm, e.g. '-ngl 99'")
    parser.add_argument("--may-differ", action="store_true", help="texts need not be equal: on devices that round verified tokens in groups")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--commit", help="for a copy of the checkout without git")
    args = parser.parse_args()
    prompts = read_prompts(args.corpus, args.prompts, args.prompt_characters)
    common.end_on_sigterm()
    load_before = common.load_average()
    rounds, results = {}, {}
    for slots in [None, *args.slots]:
        name = "resident" if slots is None else f"{slots} slots"
        common.progress(name)
        rounds[name], results[name] = measure(args, ["--no-spark"] if slots is None else ["--spark", "--spark-slots", slots], prompts)
        for arm in args.arms:
            ratio = rounds[name].ratio(arm, args.arms[0], "tokens_per_s")["median"]
            common.progress(f"  {arm}: {rounds[name].median(arm, 'tokens_per_s'):.0f} tokens/s, {ratio:.3f} of {args.arms[0]}, equal texts {results[name]['equal_texts'][arm]:.2f}")
    settings = {k: getattr(args, k) for k in ("model", "draft", "arms", "slots", "prompts", "prompt_characters", "tokens", "threads", "server_flags")}
    common.save("draft", method=(__doc__ or "").strip(), settings=settings, results=results, rounds=rounds, load_before=load_before,
                folder=args.out, commit_text=args.commit)  # fmt: skip


if __name__ == "__main__":
    main()
