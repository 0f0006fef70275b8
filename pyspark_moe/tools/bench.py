"""pyspark-moe bench: what residency costs and wins at several budgets, beside every expert resident and llama-server's own offload."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..command import end_on_sigterm
from ..errors import ConfigError, NoExpertsError
from ..history import Conversation
from ..history.corpus import ShuffledCorpus
from ..measure import bench_arms, device_memory, own_source
from ..measure.bench import Bench, Work
from ..measure.bench_results import table
from ..measure.limits import Limits
from ..measure.results import ResultFile
from ..measure.server import OURS
from ..memory import read_machine_memory
from ..model_info import read_model_info
from .measuring import file_digest, given_profile, gpu_layers_default, limit_options, words

_MOST_BATCH = 2048
_PREFILL_GPU, _PREFILL_CPU = 2048, 512


@click.command()
@click.option("-m", "--model", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The model, a .gguf file.")
@click.option("--budgets", default="60%,40%,20%,10%", show_default=True, metavar="LIST",
              help="What is kept fast: shares of the experts and GiB of memory, as in 60%,40%,8GiB. GiB are GPU memory of the whole process, or RAM for experts on the CPU.")
@click.option("--on", "device", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True, help="auto: the GPU when this build and machine have one.")
@click.option("--corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Prompts from a corpus of `pyspark-moe extract`. [default: this package's source code]")
@click.option("--profile", metavar="FILE", help="Servers with --spark start from this profile, a copy of it. auto: the model's own. [default: none]")
@click.option("--stock-command", type=words, default=(), metavar="COMMAND", help="A llama-server for the offload arms. [default: dflash_server --no-spark]")
@click.option("--no-all-resident", is_flag=True, help="Leave out --no-spark with everything in one place, for a model that is too large for it.")
@click.option("--no-offload", is_flag=True, help="Leave out llama-server's own offload: --n-cpu-moe at the same memory, on the CPU the mapped file.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Each arm once in each.")
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1), help="For decoding, in each round.")
@click.option("--prompt-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of these.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(2), help="Generated in these.")
@click.option("--prefills", default=2, show_default=True, type=click.IntRange(1), help="Long prompts, in each round.")
@click.option("--prefill-tokens", type=click.IntRange(1), help=f"Of these; up to {_MOST_BATCH}, they are one micro-batch. [default: {_PREFILL_GPU}, on the CPU {_PREFILL_CPU}]")
@click.option("--warmup", default=512, show_default=True, type=click.IntRange(0), help="Tokens that servers with --spark generate before they are measured.")
@click.option("--context", type=click.IntRange(1), help="Tokens of the context. [default: what requests need]")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the order of the prompts.")
@click.option("--together/--one-at-a-time", "together", default=None,
              help="Keep all servers loaded, or start each again in every round. [default: together where memory surely allows]")
@click.option("--server-flags", type=words, default=(), help="For every server: --server-flags='-t 8 -ctk q8_0'.")
@click.option("--spark-flags", type=words, default=(), help="For servers with --spark only: --spark-flags='--spark-policy static'.")
@click.option("--engine", type=words, default=OURS, help="The dflash_server to measure. [default: this one]")
@limit_options
def bench(
    model: Path, budgets: str, device: str, corpus: Path | None, profile: str | None, stock_command: tuple[str, ...], no_all_resident: bool, no_offload: bool,
    rounds: int, requests: int, prompt_tokens: int, tokens: int, prefills: int, prefill_tokens: int | None, warmup: int, context: int | None, seed: int,
    together: bool | None, server_flags: tuple[str, ...], spark_flags: tuple[str, ...], engine: tuple[str, ...], limits: Limits, json_file: Path | None,
) -> None:  # fmt: skip
    """Measures decoding, prefill and time to first token with every expert resident, at each budget, and with llama-server's own offload.

    Greedy tokens of all arms with --spark are compared, and on a GPU with all-resident too; the table says which arms need not agree. No profile is
    fed and no agent history is read. Exit codes: 0 done, 1 failed or tokens differ, 124 time-out, 130 Ctrl-C.
    """
    end_on_sigterm()
    info = read_model_info(model)
    if not info.is_moe:
        raise NoExpertsError(f"'{model}' has no routed experts: there is nothing to compare.")
    found_budgets = bench_arms.parse_budgets(budgets)
    has_gpu = device != "cpu" and gpu_layers_default(None) != 0
    on_gpu = has_gpu or device == "gpu"
    if on_gpu and not has_gpu and tuple(engine) == OURS:
        raise ConfigError("--on gpu: this build or machine has no GPU that can be used; `pyspark-moe doctor` says what they have. Use --on cpu.")
    n_prefill = prefill_tokens or min(_PREFILL_GPU if on_gpu else _PREFILL_CPU, max(1, info.n_ctx_train // 2))
    work = Work(rounds, requests, prompt_tokens, tokens, prefills, n_prefill, -(-warmup // tokens))
    if max(context or 0, work.n_ctx) > info.n_ctx_train > 0:
        raise ConfigError(f"The requests need a context of {max(context or 0, work.n_ctx)} tokens, and '{model.name}' was made for {info.n_ctx_train}: give fewer.")
    if context is not None and context < work.n_ctx:
        raise ConfigError(f"--context {context} does not hold the requests: give {work.n_ctx} or more, or fewer tokens.")
    path = given_profile(info, profile) if profile else None
    setup = bench_arms.Setup(
        info, found_budgets, on_gpu, context or work.n_ctx, min(n_prefill, _MOST_BATCH), tuple(engine), tuple(stock_command), tuple(server_flags),
        tuple(spark_flags), not no_all_resident, not no_offload,
    )  # fmt: skip
    arms = bench_arms.make_arms(setup)
    if together is None:
        together = bench_arms.fit_together(setup, arms, read_machine_memory().available_bytes, device_memory.memory_free() if on_gpu else None)
    settings = {
        "model": model.name, "model_bytes": info.file_bytes, "budgets": [b.label for b in found_budgets], "on": "gpu" if on_gpu else "cpu",
        "prompts": own_source.NAME if corpus is None else corpus.name, "prompts_sha256": own_source.digest() if corpus is None else file_digest(corpus),
        "profile_sha256": file_digest(path) if path else None, "stock_command": [Path(word).name for word in stock_command], "rounds": rounds,
        "requests": requests, "prompt_tokens": prompt_tokens, "tokens": tokens, "prefills": prefills, "prefill_tokens": n_prefill, "warmup": warmup,
        "context": setup.n_ctx, "micro_batch": setup.n_batch, "seed": seed, "loaded": "together" if together else "one at a time",
        "server_flags": shlex.join(server_flags), "spark_flags": shlex.join(spark_flags),
    }  # fmt: skip
    n_prompts, conversations = _conversations(corpus, seed)
    click.echo(f"{len(arms)} arms, {'loaded together' if together else 'one at a time'}, on the {'GPU' if on_gpu else 'CPU'}: {', '.join(arm.name for arm in arms)}", err=True)
    if n_prompts < rounds * requests + work.n_warm:
        click.echo(f"There are {n_prompts} prompts for {rounds * requests + work.n_warm} requests: some are used again.", err=True)
    with ResultFile("bench", json_file, settings) as result:
        try:
            with click.progressbar(length=work.n_asked(arms, together), label="Requests", file=sys.stderr) as bar:
                Bench(
                    setup, work, limits, result, profile=path, is_together=together,
                    say=lambda text: click.echo(("\n" if sys.stderr.isatty() else "") + text, err=True), done=lambda: bar.update(1),
                ).run(conversations)  # fmt: skip
        finally:
            for line in table(result.results) if result.results.get("arms") else ():
                click.echo(line)


def _conversations(corpus: Path | None, seed: int) -> tuple[int, Iterator[Conversation]]:
    """(how many, they)."""
    if corpus is None:
        found = own_source.conversations(seed)
        return len(found), iter(found)
    shuffled = ShuffledCorpus(corpus, seed)
    return shuffled.n_conversations, iter(shuffled)
