"""pyspark-moe calibrate: a corpus becomes the routing profile of a model."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..command import end_on_sigterm
from ..config import SparkConfig
from ..errors import MeasurementError, NoExpertsError
from ..history.corpus import ShuffledCorpus
from ..measure.calibrate import Counted, check_place, make_profile, partial_path, read_in_child, save_profile, session_tokens
from ..measure.limits import Limits
from ..measure.reading_child import ReadingJob
from ..measure.results import ResultFile
from ..model_info import read_model_info
from ..model_profile import model_profile
from ..routing_profile import ProfileFile, skew, write_profile
from .measuring import file_digest, gpu_layers_default, limit_options, residency_options

_FOREVER_S = 1e9


@click.command()
@click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-m", "--model", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The model, a .gguf file.")
@click.option("--out", required=True, metavar="FILE", help="The profile that is written. auto: where a server with --spark looks for the model's own.")
@click.option("--add", is_flag=True, help="Add to the counts that the profile has already.")
@click.option("--force", is_flag=True, help="Replace a profile of this model.")
@click.option("--tokens", default=100_000, show_default=True, type=click.IntRange(1), help="Read at most so many tokens, of as many sessions as possible.")
@click.option("--seconds", type=float, help="Read at most so long. The result then depends on the machine's speed. [default: no limit]")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the order in which conversations are read.")
@click.option("--context", default=4096, show_default=True, type=click.IntRange(64), help="Tokens of the model's context.")
@click.option("--gpu-layers", type=click.IntRange(-1), help="Layers on a GPU; -1: all. [default: all when there is a GPU]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. [default: chosen]")
@residency_options
@limit_options
def calibrate(
    corpus: Path, model: Path, out: str, add: bool, force: bool, tokens: int, seconds: float | None, seed: int, context: int, gpu_layers: int | None,
    threads: int | None, spark: SparkConfig, limits: Limits, json_file: Path | None,
) -> None:  # fmt: skip
    """Has MODEL read CORPUS, which `pyspark-moe extract` wrote, and writes which experts it used as a routing profile.

    The same corpus, model, seed and limits give the same file, its time aside, whatever --spark-ram is. A calibration that ends early
    leaves what it has in *.partial.spark.csv beside --out. Exit codes: 0 done, 1 failed, 124 time-out, 130 Ctrl-C.
    """
    end_on_sigterm()
    info = read_model_info(model)
    if not info.is_moe:
        raise NoExpertsError(f"'{model}' has no routed experts: there is nothing to calibrate.")
    file = model_profile(info, path=None if out == "auto" else out)
    check_place(file, add=add, replace=force)
    read = ShuffledCorpus(corpus, seed)
    job = ReadingJob(
        corpus=str(corpus.resolve()), model=str(model.resolve()), seed=seed, tokens=tokens, seconds=_FOREVER_S if seconds is None else seconds,
        tokens_per_session=session_tokens(list(read.session_bytes.values()), tokens), n_ctx=min(context, info.n_ctx_train or context),
        n_gpu_layers=gpu_layers_default(gpu_layers), n_threads=threads,
        spark={name: getattr(spark, name) for name in ("ram_gib", "vram_gib", "slots", "force") if getattr(spark, name) is not None},
    )  # fmt: skip
    settings = {"corpus": corpus.name, "corpus_sha256": file_digest(corpus), "model": model.name, "fingerprint": file.fingerprint, "tokens": tokens,
                "seconds": seconds, "seed": seed, "context": job.n_ctx, "gpu_layers": job.n_gpu_layers, "add": add}  # fmt: skip
    click.echo(f"{read.n_conversations} conversations of {len(read.session_bytes)} sessions; at most {job.tokens_per_session} tokens of each.", err=True)
    counted = Counted()
    with ResultFile("calibrate", json_file, settings) as result:
        try:
            _read(job, limits, counted)
            if not counted.tokens:
                raise MeasurementError(f"The model could read nothing of {corpus}: no conversation in it is one that llama.cpp takes.")
        except BaseException:
            if counted.tokens:
                _keep_partial(file, counted)
                result.results.update(_result(counted, partial_path(file.path)))
            raise
        profile = save_profile(file, counted, add=add)
        result.results.update(_result(counted, file.path))
    plain = f", {counted.n_plain} of {counted.n_pieces} pieces without the chat template, which refused them" if counted.n_plain else ""
    click.echo(f"Read {counted.tokens} tokens in {counted.seconds:.1f} s ({counted.ended}){plain}.")
    layers = skew(profile)
    half, n_expert = sum(layer.half for layer in layers), sum(layer.n_expert for layer in layers)
    click.echo(f"Wrote {file.path}: {profile.tokens} tokens; {half} of {n_expert} experts do half of the work.")


def _read(job: ReadingJob, limits: Limits, counted: Counted) -> None:
    click.echo("Loading the model", err=True)
    with click.progressbar(length=1000, label="Reading", file=sys.stderr) as bar:
        read_in_child(job, limits, counted, progress=lambda share: bar.update(int(share * 1000) - bar.pos))


def _keep_partial(file: ProfileFile, counted: Counted) -> None:
    path = partial_path(file.path)
    try:
        write_profile(path, make_profile(file, counted))
    except OSError as e:
        click.echo(f"What was counted could not be kept: {e}", err=True)
        return
    click.echo(f"What was counted until then, {counted.tokens} tokens, is in {path}.", err=True)


def _result(counted: Counted, path: Path) -> dict[str, object]:
    return {"profile": path.name, "tokens": counted.tokens, "pieces": counted.n_pieces, "plain_pieces": counted.n_plain, "seconds": counted.seconds,
            "ended": counted.ended or "early", "uses": {str(layer): int(uses.sum()) for layer, uses in counted.counts.items()},
            "residency": counted.why_residency}  # fmt: skip
