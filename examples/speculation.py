"""Writes a text with a draft model, step by step, and shows what each step gave and cost.

    python examples/speculation.py [TARGET.gguf DRAFT.gguf] [--draft-tokens N]
"""
from __future__ import annotations

import argparse

from pyspark_moe import SparkLlama
from pyspark_moe.demo_model import draft_path, path
from pyspark_moe.speculative import Speculation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[path(), draft_path()], help="default: the demo pair")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    args = parser.parse_args()

    target, draft = args.models
    with SparkLlama(target, n_ctx=1024, verbose=False) as llm, Speculation(llm, draft, n_draft=args.draft_tokens, measure_heads=True) as spec:
        text = [spec.begin(llm.tokenize(args.prompt.encode()))]
        while len(text) < 100 and text[-1] != llm.token_eos():
            drafted = spec.draft()
            written = spec.verify(drafted)  # what the target agrees with, and one token more
            step = spec.accept()
            text += step.tokens
            print(f"{step.n_accepted} of {len(drafted)} in {step.total_ms:5.1f} ms: {llm.detokenize(written)!r}")
        print(f"\n{args.prompt}{llm.detokenize(text).decode(errors='replace')}\n\n{spec.stats()}")


if __name__ == "__main__":
    main()
