"""What a profile and the ring are worth on text that the profile has not seen: the same prompts on servers placed differently.

Arms run one after the other, each a fresh server, so that a machine needs memory for one of them:

    all-resident      every expert in a fast slot: the reference for exactness
    uniform           no profile, the same slots in every layer, experts never change slots
    calibrated        the profile's hottest experts in the slots, and they never change
    calibrated+ring   the same, and the default policy lets experts change slots
    ring              the default policy without a profile
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import MeasurementError, RefusedError
from ..history import Conversation
from ..model_info import ModelInfo
from .decoding import Decoding, first_difference
from .limits import Limits
from .prompts import Prompt, make_prompts
from .results import ResultFile
from .server import OURS, Answer, MeasuredServer

REFERENCE = "all-resident"
# name -> (takes the profile, policy)
ARMS: dict[str, tuple[bool, str]] = {
    "uniform": (False, "static"),
    "calibrated": (True, "static"),
    "calibrated+ring": (True, "frequency"),
    "ring": (False, "frequency"),
}
DEFAULT_ARMS = ("uniform", "calibrated", "calibrated+ring")
_ALL_SLOTS = 1_000_000


@dataclass(frozen=True)
class Work:
    """n_prompts of n_prompt_tokens each, after each of which n_tokens are generated; warm_tokens of them, rounded up to whole
    requests, are the warm-up."""

    n_prompts: int
    n_prompt_tokens: int
    n_tokens: int
    warm_tokens: int

    @property
    def n_warm(self) -> int:
        return -(-self.warm_tokens // self.n_tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens of a context that holds a request."""
        return -(-(self.n_prompt_tokens + self.n_tokens + 8) // 256) * 256


@dataclass(frozen=True)
class Setup:
    """size: flags that size the fast slots. shared: flags of all servers. engine: dflash_server's command."""

    model: ModelInfo
    profile: Path | None
    size: tuple[str, ...]
    shared: tuple[str, ...] = ()
    engine: tuple[str, ...] = OURS
    with_reference: bool = True


class Validation:
    """One run. say: gets a line for each thing that begins; done: is called after each request."""

    def __init__(
        self, setup: Setup, work: Work, limits: Limits, result: ResultFile, *, say: Callable[[str], None], done: Callable[[], None] = lambda: None
    ) -> None:
        self.setup, self.work, self.limits, self.result = setup, work, limits, result
        self._say, self._done = say, done
        self._prompts: list[Prompt] = []
        self.answers: dict[str, list[Answer]] = {}

    def run(self, conversations: Iterator[Conversation], arms: Sequence[str]) -> None:
        """All arms; the result is written after each. Raises MeasurementError at the end when texts differ or there are too few
        prompts, and EngineError, StalledError."""
        if self.setup.with_reference:
            try:
                self._run_arm(REFERENCE, ("--spark-slots", str(_ALL_SLOTS)), conversations)
            except RefusedError as e:
                self.result.results["no_reference"] = str(e)
                self._say(f"Arms are compared with one another only, since not every expert can be resident: {e}")
        for name in arms:
            takes_profile, policy = ARMS[name]
            with private_copy(self.setup.profile if takes_profile else None) as flags:
                self._run_arm(name, (*self.setup.size, "--spark-policy", policy, *flags), conversations)
        different = [name for name, found in self.result.results["arms"].items() if found["differs_at"] is not None]
        self.result.results["exact"] = not different
        if different:
            raise MeasurementError(
                f"Greedy tokens of {', '.join(different)} are not those of {next(iter(self.answers))}: residency must not change them. Please report it."
            )

    def _run_arm(self, name: str, flags: Sequence[str], conversations: Iterator[Conversation]) -> None:
        self._say(f"{name}: loading")
        model = self.setup.model
        args = ["-m", model.path, "-c", self.work.n_ctx, "-np", 1, "--cache-ram", 0, "--ctx-checkpoints", 0, *self.setup.shared, "--spark", *flags]
        decoding = Decoding(len(model.layers) * model.n_expert_used, self.work.n_warm)
        with MeasuredServer(name, self.setup.engine, args, self.limits, is_ours=True) as server:
            if not self._prompts:
                self._prompts = make_prompts(conversations, server, self.work.n_prompts, self.work.n_prompt_tokens)
                self._check_prompts()
            placed = server.counters() or {}
            try:
                decoding.decode(server, self._prompts, self.work.n_tokens, self._done)
            finally:  # what an arm found before it failed is worth keeping
                self._keep(name, decoding, server, placed)

    def _check_prompts(self) -> None:
        n = len(self._prompts)
        self.result.results["prompts"] = {"requests": n, "tokens": sum(map(len, self._prompts))}
        if n <= self.work.n_warm:
            raise MeasurementError(
                f"The corpus gives {n} prompts, and {self.work.n_warm} are the warm-up: nothing is left to measure. Give a larger corpus, or a smaller --warmup."
            )

    def _keep(self, name: str, decoding: Decoding, server: MeasuredServer, placed: dict[str, Any]) -> None:
        base = next(iter(self.answers.values()), decoding.answers)[: len(decoding.answers)]
        self.answers[name] = decoding.answers
        difference = first_difference(base, decoding.answers)
        found = {
            **{key: placed[key] for key in ("n_fast", "n_expert", "fast_bytes") if key in placed},
            "start_s": round(server.start_s, 2),
            "complete": len(decoding.answers) == len(self._prompts),
            "differs_at": None if difference is None else asdict(difference),
            **decoding.as_dict(),
        }
        self.result.results.setdefault("arms", {})[name] = found
        self.result.write()


@contextmanager
def private_copy(profile: Path | None) -> Iterator[tuple[str, ...]]:
    """Flags for a server that may read this profile and must not feed it: it gets a copy, which goes afterwards."""
    if profile is None:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="pyspark-moe-") as folder:  # mode 0700
        copy = Path(folder) / "profile.spark.csv"
        shutil.copyfile(profile, copy)
        yield "--spark-profile", str(copy)


def table(arms: dict[str, dict[str, Any]]) -> list[str]:
    """The arms for people."""
    lines = [f"{'arm':16} {'tok/s':>8} {'hit rate':>9} {'cold':>8} {'MB/token':>9} {'warm-up: hit rate':>18} {'tokens':>7}  greedy tokens"]
    for name, found in arms.items():
        steady, warm = found["steady"], found["warm_up"]
        where = found["differs_at"]
        same = "the same" if where is None else f"DIFFER in request {where['request']}, token {where['token']}"
        cells = [(steady.get("decode_per_s"), "8.1f"), (steady.get("hit_rate"), "9.4f"), (steady.get("cold_rate"), "8.2%"),
                 (steady["bytes_per_token"] / 1e6 if "bytes_per_token" in steady else None, "9.3f"), (warm.get("hit_rate"), "18.4f"),
                 (warm.get("tokens"), "7d")]  # fmt: skip
        text = " ".join("-".rjust(int(form.split(".")[0].rstrip("d"))) if value is None else format(value, form) for value, form in cells)
        lines.append(f"{name:16} {text}  {same}")
    return lines
