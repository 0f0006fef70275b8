"""A chat in the terminal; the reply streams, and each turn ends with its hit rate. Ctrl-D ends.

    python examples/chat.py [MODEL.gguf] [--ram GiB]
"""
from __future__ import annotations

import argparse

from pyspark_moe import SparkConfig, SparkError, SparkLlama
from pyspark_moe.demo_model import path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(path()), help="default: the demo model, which knows nothing")
    parser.add_argument("--ram", type=float, help="GiB for expert weights; default: chosen from the memory available")
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()

    try:
        llm = SparkLlama(args.model, n_ctx=args.context, spark=SparkConfig(ram_gib=args.ram), verbose=False)
    except SparkError as e:
        parser.exit(1, f"{e}\n")
    with llm:
        messages: list[dict[str, str]] = []
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                return
            llm.spark.reset_stats()
            reply = ""
            for part in llm.create_chat_completion(messages, max_tokens=256, stream=True):
                piece = part["choices"][0]["delta"].get("content") or ""
                print(piece, end="", flush=True)
                reply += piece
            messages.append({"role": "assistant", "content": reply})
            hit_rate = llm.spark.stats().hit_rate
            print(f"\n[{'residency off' if hit_rate is None else f'{hit_rate:.0%} hits'}]")


if __name__ == "__main__":
    main()
