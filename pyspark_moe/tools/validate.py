"""pyspark-moe validate: what a profile and the ring are worth on held-out text."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from ..command import end_on_sigterm
from ..config import SparkConfig
from ..errors import ConfigError, NoExpertsError
from ..history.corpus import ShuffledCorpus
from ..measure.limits import Limits
from ..measure.results import ResultFile
from ..measure.server import OURS
from ..measure.sizes import slots_for_share
from ..measure.validate import ARMS, DEFAULT_ARMS, Setup, Validation, Work, table
from ..model_info import ModelInfo, read_model_info
from .measuring import file_digest, given_profile, limit_options, residency_options, words


@click.command()
@click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-m", "--model", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The model, a .gguf file.")
@click.option("--profile", required=True, metavar="FILE", help="The profile to validate. auto: the model's own. It is read, never written.")
@click.option("--share", type=click.FloatRange(0, 100), metavar="PERCENT", help="Fast slots for so many of the experts. [default: 60, unless a budget is given]")
@residency_options
@click.option("--arms", default=",".join(DEFAULT_ARMS), show_default=True, help=f"Which of {', '.join(ARMS)}, in this order.")
@click.option("--no-reference", is_flag=True, help="Compare the arms' tokens with one another only, not with every expert resident.")
@click.option("--prompts", default=24, show_default=True, type=click.IntRange(1), help="Requests, one for a conversation.")
@click.option("--prompt-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of each, the last ones before an answer.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(2), help="Generated in each request.")
@click.option("--warmup", default=512, show_default=True, type=click.IntRange(0), help="Generated tokens that are reported apart from the steady state.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the order of the conversations.")
@click.option("--server-flags", type=words, default=(), help="For every server: --server-flags='-t 2 -ngl 0'.")
@click.option("--engine", type=words, default=OURS, help="The dflash_server to measure. [default: this one]")
@limit_options
def validate(
    corpus: Path, model: Path, profile: str, share: float | None, spark: SparkConfig, arms: str, no_reference: bool, prompts: int, prompt_tokens: int,
    tokens: int, warmup: int, seed: int, server_flags: tuple[str, ...], engine: tuple[str, ...], limits: Limits, json_file: Path | None,
) -> None:  # fmt: skip
    """Decodes after prompts of a held-out CORPUS with experts placed uniformly, by the profile, and by the profile with the ring.

    Reports hit rate, cold reads, tokens/s and bytes a token after a warm-up, and compares the greedy tokens of all arms and of a
    server with every expert resident. Exit codes: 0 done, 1 failed or tokens differ, 124 time-out, 130 Ctrl-C.
    """
    end_on_sigterm()
    names = _arms(arms)
    info = read_model_info(model)
    if not info.is_moe:
        raise NoExpertsError(f"'{model}' has no routed experts: there is nothing to validate.")
    path = given_profile(info, profile)
    work = Work(prompts, prompt_tokens, tokens, warmup)
    if work.n_warm >= prompts:
        raise ConfigError(f"--warmup {warmup} takes {work.n_warm} of {prompts} requests: give a smaller one, or more --prompts.")
    conversations = ShuffledCorpus(corpus, seed)
    setup = Setup(info, path, _size(info, share, spark), tuple(server_flags), tuple(engine), not no_reference)
    settings = {
        "corpus": corpus.name, "corpus_sha256": file_digest(corpus), "model": model.name, "profile_sha256": file_digest(path), "size": list(setup.size),
        "arms": list(names), "prompts": prompts, "prompt_tokens": prompt_tokens, "tokens": tokens, "warmup": warmup, "seed": seed,
        "server_flags": shlex.join(server_flags),
    }  # fmt: skip
    n_requests = (len(names) + (not no_reference)) * min(prompts, conversations.n_conversations)
    with ResultFile("validate", json_file, settings) as result:
        try:
            with click.progressbar(length=n_requests, label="Decoding", file=sys.stderr) as bar:
                validation = Validation(
                    setup, work, limits, result, say=lambda text: click.echo(("\n" if sys.stderr.isatty() else "") + text, err=True),
                    done=lambda: bar.update(1),
                )  # fmt: skip
                validation.run(iter(conversations), names)
        finally:
            for line in table(result.results.get("arms", {})) if result.results.get("arms") else ():
                click.echo(line)


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ConfigError(f"--arms has {unknown[0]!r}: choose among {', '.join(ARMS)}, with commas between them.")
    return names


def _size(info: ModelInfo, share: float | None, spark: SparkConfig) -> tuple[str, ...]:
    """The flags that size the fast slots of every arm but the reference."""
    if spark.has_budget and share is not None:
        raise ConfigError(f"--share {share:g} and a budget both size the fast slots: give one of them.")
    force = ("--spark-force",) if spark.force else ()
    for flag, value in (("--spark-ram", spark.ram_gib), ("--spark-vram", spark.vram_gib), ("--spark-slots", spark.slots)):
        if value is not None:
            return flag, repr(value), *force
    return "--spark-slots", str(slots_for_share(info.layers, (60 if share is None else share) / 100)), *force
