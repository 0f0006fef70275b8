"""Which experts a model's traffic uses, kept in `<model>.gguf.spark.csv`. The only reader and writer of that file.

Values and pure functions first, then the file: a bad one is set aside and never steers anything, a good one is replaced as
a whole or not at all, and two servers that share a model add to each other's counts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from .errors import ProfileError, ProfileWriteError
from .shared_file import LONGEST_ADDITION, locked, read_regular_file, replace_file, set_aside

FORMAT_VERSION = 1
SUFFIX = ".spark.csv"
MAX_BYTES = 16 * 2**20  # of a file; a model of 100 layers of 512 experts needs 2 MiB
MAX_LINES = 2**19
MAX_COUNT = 1e18
MAX_TOTAL = 2**62
# What a start leaves of the counts of the starts before it: about five starts are remembered, half of a start's weight is
# gone after three. See docs/decisions/0040-routing-profile.md.
RESTART_DECAY = 0.8
NEVER = "1970-01-01T00:00:00Z"

_FIRST_LINE = "# pyspark_moe routing profile"
_COLUMNS = "layer,expert,count"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_KEYS = ("version", "fingerprint", "layers", "tokens", "uses", "starts", "tokens at last start", "updated", "sources")
_MAX_HEADER_LINES = 64
_HEADER_LINE = re.compile(r"# ?([a-z ]{1,32}): ?(.{0,65536})")
_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
_TIME_TEXT = re.compile(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z")
_WHOLE = re.compile(r"[0-9]{1,19}")
_LAYER = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_ROW = re.compile(r"([0-9]{1,6}),([0-9]{1,6}),([0-9]{1,19}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?)")
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def _parse_time(text: str) -> datetime:
    try:
        if _TIME_TEXT.fullmatch(text):
            return datetime.fromisoformat(text[:-1]).replace(tzinfo=timezone.utc)  # strptime would import on its first use, which may be at exit
    except ValueError:
        pass  # February 30
    raise ProfileError(f"{text[:80]!r} is not a time such as {NEVER}")


@dataclass(frozen=True, eq=False)
class RoutingProfile:
    """Uses of each expert of one model. Always valid: the constructor raises ProfileError for what cannot be.

    fingerprint      of the model, see fingerprint.model_fingerprint
    counts           block number -> uses with decay, float64 [n_expert], read-only
    tokens           tokens seen over the profile's whole life, never decayed
    uses             (layer, expert) uses over its whole life, never decayed
    starts           server starts that fed it, the present one included
    updated          time of the last write, ISO 8601 in UTC
    sources          "traffic", "history", "corpus" -> tokens; together they are `tokens`
    tokens_at_start  `tokens` when the last start began: a start that fed nothing is not counted and fades nothing
    """

    fingerprint: str
    counts: Mapping[int, np.ndarray]
    tokens: int = 0
    uses: int = 0
    starts: int = 0
    updated: str = NEVER
    sources: Mapping[str, int] = field(default_factory=dict)
    tokens_at_start: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.fingerprint):
            raise ProfileError(f"the fingerprint {self.fingerprint[:80]!r} is not one")
        totals = {"tokens": self.tokens, "uses": self.uses, "starts": self.starts, **self.sources}
        for name, total in totals.items():
            if not _NAME.fullmatch(name) or not 0 <= total <= MAX_TOTAL:
                raise ProfileError(f"{name[:80]!r} is {total}, which is not a total from 0 to {MAX_TOTAL}")
        if self.tokens != min(sum(self.sources.values()), MAX_TOTAL) or not 0 <= self.tokens_at_start <= self.tokens:
            raise ProfileError(f"its totals of tokens do not agree: {self.tokens}, {self.tokens_at_start} at the last start, {dict(self.sources)}")
        _parse_time(self.updated)
        counts = {}
        for layer, given in sorted(self.counts.items()):
            values = np.array(given, dtype=np.float64)
            if layer < 0 or values.ndim != 1 or not len(values) or not np.all((values >= 0) & (values <= MAX_COUNT)):
                raise ProfileError(f"the counts of layer {layer} are not numbers from 0 to {MAX_COUNT:g}, one for each expert")
            values.setflags(write=False)
            counts[int(layer)] = values
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingProfile) and format_profile(self) == format_profile(other)

    @property
    def shape(self) -> dict[int, int]:
        """Block number -> number of experts."""
        return {layer: len(values) for layer, values in self.counts.items()}

    @property
    def is_empty(self) -> bool:
        """True when no expert has any use, so that nothing can be placed by it."""
        return not any(values.any() for values in self.counts.values())


@dataclass(frozen=True)
class LayerSkew:
    """How few experts of a layer do most of its work: `half` and `ninety` experts take 50 % and 90 % of its `uses`."""

    layer: int
    n_expert: int
    half: int
    ninety: int
    uses: float


def empty_profile(fingerprint: str, shape: Mapping[int, int]) -> RoutingProfile:
    """A profile without uses. `shape`: block number -> number of experts."""
    return RoutingProfile(fingerprint, {layer: np.zeros(n) for layer, n in shape.items()})


def _total(*parts: int) -> int:
    return min(sum(map(int, parts)), MAX_TOTAL)


def _sum_counts(a: Mapping[int, np.ndarray], b: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    return {layer: np.minimum(values + b[layer], MAX_COUNT) if layer in b else values for layer, values in a.items()}


def add_counts(profile: RoutingProfile, counts: Mapping[int, np.ndarray], n_tokens: int, source: str = "traffic") -> RoutingProfile:
    """The profile after `n_tokens` more tokens. `counts`: block number -> new uses of each expert [n_expert]; a block that
    is missing had none. Raises ProfileError for counts that are not uses of this model's experts."""
    for layer, values in counts.items():
        values = np.asarray(values, dtype=np.float64)
        if values.shape != (profile.shape.get(layer, -1),) or not np.all((values >= 0) & np.isfinite(values)):
            raise ProfileError(f"the new counts of layer {layer}, of shape {values.shape}, are not uses of this model's experts")
    if n_tokens < 0:
        raise ProfileError(f"{n_tokens} tokens cannot have been seen")
    new_uses = sum(float(np.sum(values, dtype=np.float64)) for values in counts.values())
    return replace(
        profile,
        counts=_sum_counts(profile.counts, {layer: np.asarray(values, dtype=np.float64) for layer, values in counts.items()}),
        tokens=_total(profile.tokens, n_tokens),
        uses=_total(profile.uses, round(min(new_uses, MAX_TOTAL))),
        sources={**profile.sources, source: _total(profile.sources.get(source, 0), n_tokens)},
    )


def decay(profile: RoutingProfile, factor: float) -> RoutingProfile:
    """All counts times `factor`, 0 to 1; totals stay. Raises ProfileError for another factor."""
    if not 0 <= factor <= 1:
        raise ProfileError(f"a decay of {factor} is not between 0 and 1")
    return replace(profile, counts={layer: values * factor for layer, values in profile.counts.items()})


def begin_start(profile: RoutingProfile) -> RoutingProfile:
    """The profile at the start of a server: one more start, and older counts fade. Unchanged when the start before fed
    nothing, so a server that is restarted twenty times without work forgets nothing."""
    if profile.tokens == profile.tokens_at_start:
        return profile
    return replace(decay(profile, RESTART_DECAY), starts=_total(profile.starts, 1), tokens_at_start=profile.tokens)


def merge_profiles(a: RoutingProfile, b: RoutingProfile) -> RoutingProfile:
    """What one profile would have become that saw the traffic of both. Commutative. Raises ProfileError for profiles of
    different models."""
    if a.fingerprint != b.fingerprint or a.shape != b.shape:
        raise ProfileError(f"profiles of different models cannot be merged: {a.fingerprint[:16]} and {b.fingerprint[:16]}")
    return replace(
        a,
        counts=_sum_counts(a.counts, b.counts),
        tokens=_total(a.tokens, b.tokens),
        uses=_total(a.uses, b.uses),
        starts=_total(a.starts, b.starts),
        updated=max(a.updated, b.updated),
        sources={name: _total(a.sources.get(name, 0), b.sources.get(name, 0)) for name in {*a.sources, *b.sources}},
        tokens_at_start=_total(a.tokens_at_start, b.tokens_at_start),
    )


def profile_time(profile: RoutingProfile) -> datetime:
    """When it was last written, in UTC."""
    return _parse_time(profile.updated)


def skew(profile: RoutingProfile) -> tuple[LayerSkew, ...]:
    """For each layer, how many experts take half and 90 % of its uses; 0 and 0 for a layer without uses."""
    layers = []
    for layer, values in profile.counts.items():
        cumulated = np.cumsum(np.sort(values)[::-1])
        total = float(cumulated[-1])
        half, ninety = (int(np.searchsorted(cumulated, share * total)) + 1 if total else 0 for share in (0.5, 0.9))
        layers.append(LayerSkew(layer, len(values), half, ninety, total))
    return tuple(layers)


def format_profile(profile: RoutingProfile) -> bytes:
    """The profile as the text of its file."""
    values = (
        FORMAT_VERSION,
        profile.fingerprint,
        " ".join(f"{layer}x{n}" for layer, n in profile.shape.items()),
        profile.tokens,
        profile.uses,
        profile.starts,
        profile.tokens_at_start,
        profile.updated,
        " ".join(f"{name}={tokens}" for name, tokens in profile.sources.items()),
    )
    lines = [_FIRST_LINE, *(f"# {key}: {value}" for key, value in zip(_KEYS, values)), _COLUMNS]
    for layer, counts in profile.counts.items():
        lines += [f"{layer},{expert},{count!r}" for expert, count in enumerate(counts.tolist())]
    return ("\n".join(lines) + "\n").encode("ascii")


def _whole(header: Mapping[str, str], key: str) -> int:
    if not _WHOLE.fullmatch(header[key]):
        raise ProfileError(f"its {key!r} is {header[key][:40]!r}, not a whole number")
    return int(header[key])


def _parse_header(lines: list[str]) -> dict[str, str]:
    """Fields of the header; comments that a person added are passed over."""
    header: dict[str, str] = {}
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match and match[1] in _KEYS:
            if match[1] in header:
                raise ProfileError(f"its header says {match[1]!r} twice")
            header[match[1]] = match[2]
    if "version" in header and _whole(header, "version") != FORMAT_VERSION:
        newer = "was written by a newer version of pyspark_moe" if _whole(header, "version") > FORMAT_VERSION else "has an unknown format"
        raise ProfileError(f"it {newer} (format {header['version']}; this one reads {FORMAT_VERSION})")
    missing = [key for key in _KEYS if key not in header]
    if missing:
        raise ProfileError(f"its header does not say {missing[0]!r}")
    return header


def _parse_shape(text: str, n_rows: int) -> dict[int, int]:
    """The numbers of experts that the header claims; they add up to the rows that are there before memory is taken for them."""
    shape: dict[int, int] = {}
    for item in text.split():
        match = _LAYER.fullmatch(item)
        if not match or int(match[1]) in shape or int(match[2]) == 0:
            raise ProfileError(f"its list of layers has {item[:40]!r}")
        shape[int(match[1])] = int(match[2])
    if sum(shape.values()) != n_rows:
        raise ProfileError(f"it has {n_rows} rows where its layers have {sum(shape.values())} experts")
    return shape


def parse_profile(data: bytes) -> RoutingProfile:
    """Reads the text of a profile file, strictly. Raises ProfileError with what is wrong, as the end of a sentence."""
    if not data.startswith(_FIRST_LINE.encode()):
        raise ProfileError("it does not begin like a routing profile" if data else "it is empty")
    if not data.endswith(b"\n"):
        raise ProfileError("its last line is cut off")
    if data.startswith(_FIRST_LINE.encode() + b"\r"):
        raise ProfileError("it has the line ends of another system")
    if data.count(b"\n") > MAX_LINES:
        raise ProfileError(f"it has more than {MAX_LINES} lines")
    try:
        lines = data[:-1].decode("ascii").split("\n")
    except UnicodeDecodeError as e:
        raise ProfileError(f"byte {e.start} is not text") from None
    n_header = next((i for i, line in enumerate(lines[:_MAX_HEADER_LINES]) if not line.startswith("#")), len(lines))
    if n_header > _MAX_HEADER_LINES:
        raise ProfileError(f"its header has more than {_MAX_HEADER_LINES} lines")
    header = _parse_header(lines[1:n_header])
    if n_header == len(lines) or lines[n_header] != _COLUMNS:
        raise ProfileError(f"line {n_header + 1} should be {_COLUMNS!r}")
    shape = _parse_shape(header["layers"], len(lines) - n_header - 1)
    counts = {layer: np.full(n, np.nan) for layer, n in shape.items()}
    for number, line in enumerate(lines[n_header + 1 :], n_header + 2):
        match = _ROW.fullmatch(line)
        if not match:
            raise ProfileError(f"line {number} is {line[:60]!r}, not a layer, an expert and a count of 0 or more")
        layer, expert, count = int(match[1]), int(match[2]), float(match[3])
        if expert >= shape.get(layer, 0):
            raise ProfileError(f"line {number} names expert {expert} of layer {layer}, which the model does not have")
        if counts[layer][expert] == counts[layer][expert]:
            raise ProfileError(f"line {number} names expert {expert} of layer {layer} again")
        if count > MAX_COUNT:
            raise ProfileError(f"line {number} has the count {match[3]}; {MAX_COUNT:g} is the most")
        counts[layer][expert] = count
    sources: dict[str, int] = {}
    for item in header["sources"].split():
        name, _, tokens = item.partition("=")
        if name in sources or not _NAME.fullmatch(name) or not _WHOLE.fullmatch(tokens):
            raise ProfileError(f"its list of sources has {item[:40]!r}")
        sources[name] = int(tokens)
    return RoutingProfile(
        fingerprint=header["fingerprint"],
        counts=counts,
        tokens=_whole(header, "tokens"),
        uses=_whole(header, "uses"),
        starts=_whole(header, "starts"),
        updated=header["updated"],
        sources=sources,
        tokens_at_start=_whole(header, "tokens at last start"),
    )


def begins_like_profile(data: bytes) -> bool:
    """Whether a file with this content is a profile, if perhaps a damaged one: it begins like one, or ends before that can be told."""
    first = _FIRST_LINE.encode()
    return data.startswith(first) or first.startswith(data)


def profile_path(model_path: Path, cache_folder: Path) -> Path:
    """Where the profile of a model is: beside its real file, the first of a split model, whatever links lead there. In
    `cache_folder`/pyspark_moe/profiles where that folder cannot be written or the name would be too long."""
    split = _SPLIT.fullmatch(model_path.name)
    if split:
        first = model_path.with_name(f"{split[1]}-00001-of-{split[2]}.gguf")
        model_path = first if first.exists() else model_path
    real = Path(os.path.realpath(model_path))
    fits = len(os.fsencode(real.name + SUFFIX)) + LONGEST_ADDITION <= 255
    if fits and os.access(real.parent, os.W_OK | os.X_OK):
        return real.with_name(real.name + SUFFIX)
    name = os.fsencode(real.name)[:128].decode(errors="replace")
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    return cache_folder / "pyspark_moe" / "profiles" / f"{name}-{digest}{SUFFIX}"


def read_profile(path: Path) -> RoutingProfile | None:
    """Reads a profile file; None when there is none. Nothing but a regular file of bounded size is opened. Raises
    ProfileError for a file that is not a usable profile, OSError where the system refuses to read it."""
    try:
        data = read_regular_file(path, MAX_BYTES)
    except ValueError as e:
        raise ProfileError(str(e)) from None
    return None if data is None else parse_profile(data)


def write_profile(path: Path, profile: RoutingProfile) -> RoutingProfile:
    """Replaces or makes a profile file with the time of now, atomically; gives back what was written. Raises
    ProfileWriteError, and then the old file is untouched."""
    try:
        with locked(path) as held:
            return _write(path, profile, held)
    except OSError as e:
        raise _not_saved(path, e) from e


def reset_profile(path: Path) -> Path:
    """Sets a profile file aside, good or bad, and gives back its new path. A server that serves the model goes on and begins
    a new one with what it counts from now on. Raises ProfileWriteError."""
    try:
        with locked(path):
            return set_aside(path)
    except OSError as e:
        raise ProfileWriteError(f"The routing profile '{path}' cannot be set aside: {_reason(e)}.") from e


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).rstrip(".")


def _not_saved(path: Path, error: OSError) -> ProfileWriteError:
    if isinstance(error, ProfileWriteError):
        return error
    return ProfileWriteError(f"The routing profile '{path}' is not saved: {_reason(error)}. What it had on disk is unchanged.")


def _write(path: Path, profile: RoutingProfile, is_locked: bool) -> RoutingProfile:
    profile = replace(profile, updated=datetime.now(timezone.utc).strftime(_TIME))
    replace_file(path, format_profile(profile), is_locked)
    return profile


@dataclass
class ProfileFile:
    """The profile file of one model, shared with every other server of that model. May be used from any thread.

    path         see profile_path; its folder is made when it does not exist
    fingerprint  of the model; a file with another one is set aside
    shape        block number -> number of experts, of the model
    warning      what the last call had to set aside or could not do, as a sentence; None: all was well
    """

    path: Path
    fingerprint: str
    shape: Mapping[int, int]
    warning: str | None = field(default=None, init=False)

    def load(self) -> tuple[RoutingProfile | None, str | None]:
        """The profile on disk, None when there is none that can be used, and then a warning if there was a file. A bad
        file is renamed, so that it can be looked at; where that is not possible it stays and is ignored."""
        profile = None
        self.warning = None
        try:
            try:
                return self._read(), None
            except ProfileError:  # another server may have replaced it by now: look again, with the lock
                with locked(self.path):
                    profile, _ = self._read_or_set_aside()
        except OSError as e:
            self.warning = f"The routing profile '{self.path}' cannot be read and is ignored: {_reason(e)}."
        return profile, self.warning

    def begin(self) -> RoutingProfile | None:
        """The profile for a server that starts, None as in load(): one more start, and counts of earlier ones fade by
        RESTART_DECAY. Never raises for what is on disk; a start that cannot be saved is said in `warning`."""
        profile: RoutingProfile | None = None
        try:
            self._make_folder()
            with locked(self.path) as held:
                profile, _ = self._read_or_set_aside()
                if profile is not None and (started := begin_start(profile)) is not profile:
                    profile = started  # also when it cannot be saved
                    profile = _write(self.path, started, held)
        except OSError as e:
            self.warning = f"The start is not saved in the routing profile '{self.path}': {_reason(e)}."
        return profile

    def add(self, counts: Mapping[int, np.ndarray], n_tokens: int, source: str = "traffic") -> RoutingProfile:
        """Adds new uses to whatever is on disk now and gives back the sum; writes nothing when there are none.

        counts, n_tokens, source: as for add_counts. Raises ProfileError for counts that are not this model's,
        ProfileWriteError (an OSError) when they cannot be saved: the file is the old one then, and the caller keeps them
        for the next time.
        """
        delta = add_counts(empty_profile(self.fingerprint, self.shape), counts, n_tokens, source)
        try:
            self._make_folder()
            with locked(self.path) as held:
                old, in_the_way = self._read_or_set_aside()
                if in_the_way:
                    raise ProfileWriteError(str(self.warning))
                if old is None:  # a corpus is no start of a server
                    old = replace(empty_profile(self.fingerprint, self.shape), starts=0 if source == "corpus" else 1)
                if n_tokens == 0 and delta.is_empty:
                    return old
                return _write(self.path, add_counts(old, counts, n_tokens, source), held)
        except OSError as e:
            raise _not_saved(self.path, e) from e

    def _make_folder(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _read(self) -> RoutingProfile | None:
        profile = read_profile(self.path)
        if profile is not None and profile.fingerprint != self.fingerprint:
            raise ProfileError("it is of another model, or of another version of this one")
        if profile is not None and profile.shape != dict(self.shape):
            raise ProfileError("its layers and experts are not those of this model")
        return profile

    def _read_or_set_aside(self) -> tuple[RoutingProfile | None, bool]:
        """The profile, and whether a bad file is still in its place. Call it with the lock. Raises OSError."""
        self.warning = None
        try:
            return self._read(), False
        except ProfileError as e:
            what = f"The routing profile '{self.path}' cannot be used: {e}."
        try:
            aside = set_aside(self.path)
        except OSError as e:
            self.warning = f"{what} It cannot be set aside ({_reason(e)}), so it stays and is ignored."
            return None, True
        self.warning = f"{what} It is now '{aside}', and a new one begins."
        return None, False
