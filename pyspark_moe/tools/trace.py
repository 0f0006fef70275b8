"""pyspark-moe trace: records which experts a model selects for texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..budget import format_bytes
from ..errors import ConfigError, TraceError
from ..fingerprint import model_fingerprint
from ..model_info import read_model_info
from ..routing_trace import GIB, TraceWriter

_MAX_LINE_BYTES = 32 << 20


def _documents(path: Path) -> Iterator[str]:
    """The texts of a JSON Lines file: its "text", or the contents of its "messages" one after another."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
            try:
                value = json.loads(line.decode("utf-8"))
                text = value["text"] if "text" in value else "\n\n".join(message["content"] for message in value["messages"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise TraceError(f"'{path}', line {number}: neither a text nor messages. Give a file that `pyspark-moe extract` wrote.") from None
            if not isinstance(text, str):
                raise TraceError(f"'{path}', line {number}: its text is no text.")
            yield text


def _texts(corpus: Path | None, text: Path | None) -> Iterator[str]:
    if corpus is not None:
        yield from _documents(corpus)
    if text is not None:
        yield text.read_text(encoding="utf-8", errors="replace")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False), help='JSON Lines with "text" or "messages".')
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A plain text.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The trace that is written.")
@click.option("--hidden", is_flag=True, help="Record the routers' inputs too, in half precision.")
@click.option("--max-gib", default=4.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Size at which the trace ends.")
@click.option("--max-tokens", default=100_000, show_default=True, type=click.IntRange(1), help="Tokens in all.")
@click.option("--context", default=4096, show_default=True, type=click.IntRange(1), help="Tokens of one text; the rest of it is read as another.")
@click.option("--step", default=256, show_default=True, type=click.IntRange(1), help="Tokens computed together; 1 is decoding.")
@click.option("--gpu-layers", default=0, show_default=True, type=click.IntRange(-1), help="Layers on a GPU; -1: all.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. [default: half of the processors]")
@click.option("--force", is_flag=True, help="Replace a trace that is there already.")
def trace(
    model: Path, corpus: Path | None, text: Path | None, out: Path, hidden: bool, max_gib: float, max_tokens: int, context: int, step: int,
    gpu_layers: int, threads: int | None, force: bool,
) -> None:  # fmt: skip
    """Has MODEL read texts and writes which experts every token selected, for `pyspark-moe` tools and the benchmarks.

    The trace has no text and no token, but what a model selects depends on both: treat it like the text.
    """
    if corpus is None and text is None:
        raise ConfigError("There is nothing to read: give --corpus or --text.")
    if out.exists() and not force:
        raise ConfigError(f"'{out}' exists: --force replaces it.")
    from ..routing_recorder import RecordedLlama, Recorder, trace_header  # loads llama.cpp

    info = read_model_info(model)
    header = trace_header(info, hidden=hidden, fingerprint=model_fingerprint(info))
    with TraceWriter(out, header, int(max_gib * GIB)) as writer:
        n_ctx = min(context, info.n_ctx_train or context)
        recorder = Recorder(writer)
        options = {"n_ctx": n_ctx, "n_batch": step, "n_ubatch": step, "n_gpu_layers": gpu_layers, "n_threads": threads, "n_threads_batch": threads}
        with RecordedLlama(model, recorder=recorder, spark=False, verbose=False, **options) as llm:
            with click.progressbar(length=max_tokens, label="Reading", file=sys.stderr) as bar:
                left = max_tokens
                for document in _texts(corpus, text):
                    tokens = llm.tokenize(document.encode("utf-8", errors="replace"))
                    for first in range(0, len(tokens), n_ctx):
                        piece = tokens[first : first + min(n_ctx, left)]
                        llm.read(piece)
                        left -= len(piece)
                        bar.update(len(piece))
                        if left == 0 or writer.is_capped:
                            break
                    if left == 0 or writer.is_capped:
                        break
    capped = ", where --max-gib ended it" if writer.is_capped else ""
    click.echo(f"Wrote {out}: {writer.n_tokens} tokens in {writer.n_steps} steps, {len(header.layers)} layers, {format_bytes(writer.n_bytes)}{capped}.")
