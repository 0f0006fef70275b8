"""Where the experts are: generates text with a third of the demo model's experts in memory, then shows each layer.

    python examples/residency.py [MODEL.gguf] [--slots N]
"""
from __future__ import annotations

import argparse

from pyspark_moe import SparkConfig, SparkLlama
from pyspark_moe.demo_model import path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(path()), help="default: the demo model")
    parser.add_argument("--slots", type=int, default=10, help="fast slots in every layer")
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()

    with SparkLlama(args.model, n_ctx=1024, spark=SparkConfig(slots=args.slots), verbose=False) as llm:
        for part in llm(args.prompt, max_tokens=args.tokens, temperature=0, stream=True):
            print(part["choices"][0]["text"], end="", flush=True)
        print(f"\n\n{llm.spark.why}")
        print("layer  hits   misses  read MB  hottest experts (* in a fast slot)")
        for layer, stats in zip(llm.spark.layers, llm.spark.layer_stats()):
            slots, counts = llm.spark.residency(layer), llm.spark.counts(layer)
            hottest = " ".join(f"{e}{'*' if slots[e] >= 0 else ''}" for e in counts.argsort()[::-1][:8])
            print(f"{layer:5}  {stats.hits:5}  {stats.misses:6}  {stats.bytes_read / 1e6:7.1f}  {hottest}")


if __name__ == "__main__":
    main()
