"""pyspark-moe profile: what a routing profile says, profiles put together, and one begun anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import reduce
from pathlib import Path

import click

from ..errors import ProfileError
from ..model_info import read_model_info
from ..model_profile import model_profile
from ..profile_plot import plot_profile
from ..routing_profile import SUFFIX, RoutingProfile, merge_profiles, profile_time, read_profile, reset_profile, skew, write_profile
from .help_text import WholeSentences

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


@click.group(cls=WholeSentences)
def profile() -> None:
    """Shows, merges and resets the profile of a model: which experts its traffic uses."""


def _find(file: Path) -> tuple[Path, str | None]:
    """The profile that `file` is, or the one of the model that it is and then the model's fingerprint."""
    if not file.is_file():
        raise ProfileError(f"'{file}' {'is not a file' if file.exists() else 'does not exist'}: give a profile (*{SUFFIX}) or a model (*.gguf).")
    try:
        with file.open("rb") as opened:
            is_model = opened.read(4) == b"GGUF"
    except OSError as e:
        raise ProfileError(f"'{file}' cannot be read: {e.strerror}.") from e
    if not is_model:
        return file, None
    found = model_profile(read_model_info(file))
    return found.path, found.fingerprint


def _read(path: Path, fingerprint: str | None = None) -> RoutingProfile:
    try:
        found = read_profile(path)
        if found is not None and fingerprint is not None and found.fingerprint != fingerprint:
            raise ProfileError("it is of another model, or of another version of this one")
    except ProfileError as e:
        raise ProfileError(f"'{path}' is not a usable routing profile: {e}.") from None
    except OSError as e:
        raise ProfileError(f"'{path}' cannot be read: {e.strerror}.") from e
    if found is None:
        raise ProfileError(f"There is no profile yet: '{path}' does not exist. A server with --spark makes it.")
    return found


def _check_replaceable(path: Path) -> None:
    """Whatever else a person may name by mistake, only profiles are moved or replaced."""
    if not path.name.endswith(SUFFIX):
        _read(path)


def _age(updated: datetime, now: datetime) -> str:
    seconds = (now - updated).total_seconds()
    if seconds < 0:
        return "in the future: is the clock right?"
    return next((f"{seconds / size:.0f} {unit} ago" for size, unit in _UNITS if seconds >= 2 * size), "just now")


def _table(found: RoutingProfile) -> Iterator[str]:
    def row(name: object, n_expert: int, half: int, ninety: int) -> str:
        return f"{name:>7}{n_expert:>10}{half:>12}{100 * half / n_expert:>6.0f} %{ninety:>12}{100 * ninety / n_expert:>6.0f} %"

    layers = skew(found)
    yield f"{'block':>7}{'experts':>10}{'half of uses by':>20}{'90 % of uses by':>20}"
    yield from (row(layer.layer, layer.n_expert, layer.half, layer.ninety) for layer in layers)
    if layers:
        yield row("all", *(sum(values) for values in zip(*((layer.n_expert, layer.half, layer.ninety) for layer in layers))))


@profile.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), help="Also write a heat map to this file (PNG, SVG, PDF by its suffix).")
def show(file: Path, plot: Path | None) -> None:
    """Shows how few experts do most of the work, layer by layer.

    FILE is a profile, or a model whose profile is then looked for.
    """
    path, fingerprint = _find(file)
    found = _read(path, fingerprint)
    sources = ", ".join(f"{name} {tokens:,}" for name, tokens in found.sources.items())
    lines = [
        ("profile", str(path)),
        ("model", found.fingerprint),
        ("updated", f"{found.updated} ({_age(profile_time(found), datetime.now(timezone.utc))})"),
        ("tokens", f"{found.tokens:,}" + (f" ({sources})" if sources else "")),
        ("uses", f"{found.uses:,}, of which {sum(float(counts.sum()) for counts in found.counts.values()):,.0f} still count"),
        ("starts", f"{found.starts:,}"),
    ]
    for name, text in lines:
        click.echo(f"{name:<10}{text}")
    click.echo()
    for line in _table(found):
        click.echo(line)
    if plot is not None:
        try:
            plot_profile(found, plot, path.name.removesuffix(SUFFIX))
        except ImportError:
            raise click.ClickException("--plot needs matplotlib: pip install 'pyspark-moe[plot]'.") from None
        except (OSError, ValueError) as e:
            raise click.ClickException(f"'{plot}' cannot be drawn: {(getattr(e, 'strerror', None) or str(e)).rstrip('.')}.") from e
        click.echo(f"\nheat map: {plot}")


def _merged(files: Sequence[Path]) -> RoutingProfile:
    found = [_read(*_find(file)) for file in files]
    for file, other in zip(files[1:], found[1:]):
        if (other.fingerprint, other.shape) != (found[0].fingerprint, found[0].shape):
            raise ProfileError(
                f"'{files[0]}' and '{file}' are of different models ({found[0].fingerprint[:16]} and {other.fingerprint[:16]}): "
                "only profiles of the same model can be merged."
            )
    return reduce(merge_profiles, found)


@profile.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file that is written.")
@click.option("--force", is_flag=True, help="Replace the output when it exists.")
def merge(files: tuple[Path, ...], output: Path, force: bool) -> None:
    """Adds the counts of two or more profiles of the same model, for example of two machines.

    FILES are profiles or models. A server that writes one of them meanwhile is not waited for: merge into another file, or
    stop it first.
    """
    if len(files) < 2:
        raise click.UsageError("give two or more profiles")
    if output.exists():
        if not force:
            raise click.ClickException(f"'{output}' exists: name another file, or add --force to replace it.")
        _check_replaceable(output)
    written = write_profile(output, _merged(files))
    click.echo(f"{output}: {written.tokens:,} tokens of {len(files)} profiles")


@profile.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(file: Path, yes: bool) -> None:
    """Lets a model begin without a profile, also one that is damaged.

    The old profile is renamed, not deleted: rename it back to undo this, or delete it. FILE is a profile or a model.
    """
    path, _ = _find(file)
    if not path.exists():
        click.echo(f"There is no profile: '{path}' does not exist.")
        return
    _check_replaceable(path)
    if not yes:
        click.confirm(f"Begin without '{path}'?", abort=True)
    click.echo(f"It is now '{reset_profile(path)}'.")
