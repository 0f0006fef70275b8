#!/usr/bin/env python3
"""What knowing the hot experts is worth: a profile, the ring, restarts, and a history of agent sessions, on held-out text.

Method: real servers over HTTP, greedy, one client; a fresh process for every arm, with `--share` of each layer's experts in fast
slots. Counters are read after a request's first token and at its end, so prompts are not in them. Parts:

  validate   `pyspark-moe calibrate` on the training corpus, then `pyspark-moe validate` on the held-out one: all-resident,
             uniform, calibrated, calibrated+ring, ring; hit rate, cold reads and speed after a warm-up, equal tokens
  restarts   one profile over several starts of a server that answers requests about the training corpus. Before each start
             the start-up is measured: servers on a copy of the profile answer the same held-out prompts, so that what is
             measured never feeds what it measures
  bootstrap  first starts with a folder of Claude Code's and Codex's sessions, and without; same prompts as in restarts
  bound      the held-out corpus as a routing trace, replayed in the simulator with the same slots: the ring, LRU, and Belady,
             which knows the future and which no policy that brings missed experts can beat

A start-up is the first --start-tokens generated tokens after short prompts, several prompts a start, and --repeats starts with
other prompts; rates are means over them. "with_prompts" counts all tokens since the start instead, prompts included, at the end of
each request. The ring learns while it is measured, so start-ups are measured with it and with the
policy static too, where only the placement counts. `floor` is a start without profile whose experts never move, `settled`
the same prompts on a server that has answered others before. "closed" is how far a start-up's rate is from the floor to
settled. The result is written after every step and has "ended" until then; --time-limit-s ends it with exit code 124.
"""
from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import placement_corpora

from pyspark_moe.demo_model import path as demo_path
from pyspark_moe.errors import SparkError, StalledError
from pyspark_moe.history.corpus import ShuffledCorpus
from pyspark_moe.measure.decoding import Decoding
from pyspark_moe.measure.limits import Limits
from pyspark_moe.measure.prompts import Prompt, make_prompts
from pyspark_moe.measure.server import OURS, MeasuredServer
from pyspark_moe.measure.sizes import slots_for_share
from pyspark_moe.measure.validate import private_copy
from pyspark_moe.model_info import read_model_info
from pyspark_moe.placement import make_plan
from pyspark_moe.routing_profile import read_profile
from pyspark_moe.routing_trace import read_trace
from pyspark_moe.simulator import Belady, Lru, Policy, Ram, simulate

TOOL = (sys.executable, "-m", "pyspark_moe.tools.cli")
PARTS = ("validate", "restarts", "bootstrap", "bound")
POLICIES = ("frequency", "static")
FIRST = (25, 50, 100, 200)  # tokens
SETTLE_TOKENS = 256  # of a replay, before its rate counts
CLOSING_S = 15.0
NOTHING = {"uses": 0, "hits": 0}  # the counters of a server that has served nothing
SLACK = 6  # tokens of a request that counters may miss: the first one, and those until they are read


def rate_of_first(curve: Sequence[Mapping[str, float]], n: float) -> float | None:
    """Hit rate of the first n tokens of a curve, the interval that holds the last of them in part; None for a shorter curve."""
    hits = hits_of_first(curve, n)
    return None if hits is None else hits / n


def hits_of_first(curve: Sequence[Mapping[str, float]], n: float) -> float | None:
    """The same times n. A curve that is at most one token shorter, as counters may be, is long enough."""
    tokens = hits = 0.0
    for point in curve:
        part = min(point["n"], n - tokens)
        tokens, hits = tokens + part, hits + part * point["hit_rate"]
    return hits * n / tokens if 0 < n < tokens + 1 else None if n else 0.0


def mean_curve(curves: Sequence[Sequence[Mapping[str, float]]], step: int = 10) -> list[dict[str, float]]:
    """Hit rate in every `step` tokens, mean over curves as far as all of them go."""
    points: list[dict[str, float]] = []
    for n in range(step, int(min(curve[-1]["tokens"] for curve in curves)) + 1, step):
        ends = [(hits_of_first(curve, n - step), hits_of_first(curve, n)) for curve in curves]
        points.append({"tokens": n, "hit_rate": round(statistics.mean((b - a) / step for a, b in ends if a is not None and b is not None), 4)})
    return points


def cumulated(totals: Sequence[Mapping[str, Any]], uses_per_token: int) -> list[tuple[float, float]]:
    """(tokens, hit rate) since the first reading of the counters, at every later one."""
    spans = [(total["uses"] - totals[0]["uses"], total["hits"] - totals[0]["hits"]) for total in totals[1:]]
    return [(uses / uses_per_token, hits / uses) for uses, hits in spans]


def mean_by_tokens(each: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Tokens, rounded -> hit rate, both means over starts."""
    return {f"{statistics.mean(n for n, _ in after):.0f}": statistics.mean(rate for _, rate in after) for after in zip(*each)}


def closed(rate: float, floor: float, settled: float) -> float | None:
    """How far from the floor to settled a rate is; None where these are one."""
    return (rate - floor) / (settled - floor) if settled - floor > 1e-3 else None


def gaps(bare: Mapping[str, float], learned: Mapping[str, float], floor: Mapping[str, float], settled: float | Mapping[str, float]) -> dict[str, Any]:
    """Start-ups without and with what was learned, by number of first tokens. The same tokens are in all of them, so entries
    belong together by their order."""
    found = {}
    ends = settled.values() if isinstance(settled, Mapping) else [settled] * len(bare)
    for (n, rate), better, low, high in zip(bare.items(), learned.values(), floor.values(), ends):
        shares = closed(rate, low, high), closed(better, low, high)
        found[n] = {
            "floor": low, "bare": rate, "learned": better, "settled": high, "closed_bare": shares[0], "closed_learned": shares[1],
            "learned / bare": shares[1] / shares[0] if shares[0] and shares[1] is not None and shares[0] > 0 else None,
        }  # fmt: skip
    return found


class Bench:
    """One run; results are in `results`, and in a file after every step."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.model = read_model_info(args.model)
        self.layers = self.model.layers
        self.uses_per_token = len(self.layers) * self.model.n_expert_used
        self.slots = slots_for_share(self.layers, args.share / 100)
        self.limits = Limits(args.time_limit_s - CLOSING_S)
        self.text = placement_corpora.make_text(args.model, folder, args.topics)
        self.results: dict[str, Any] = {"ended": "still running", "text": self.text.kind, "slots_per_layer": self.slots, "exact": True}
        self.started = datetime.datetime.now(datetime.timezone.utc)
        self.load_before = common.load_average()
        self._start_ups: dict[tuple[str, str], dict[str, Any]] = {}
        self._answers: dict[int, list[Any]] = {}
        self._prompts: tuple[list[Prompt], list[Prompt]] | None = None

    def save(self) -> Path:
        names = ("model", "share", "prompts", "prompt_tokens", "tokens", "warmup", "start_prompts", "start_prompt_tokens", "start_tokens", "repeats", "starts",
                 "traffic", "calibrate_tokens", "history_tokens", "history_seconds", "topics", "server_flags")  # fmt: skip
        return common.save(
            self.args.name, method=(__doc__ or "").strip(), settings={name: getattr(self.args, name) for name in names}, results=self.results, rounds={},
            load_before=self.load_before, folder=self.args.out, commit_text=self.args.commit, started=self.started,
        )  # fmt: skip

    # ---- servers and what they are asked

    @contextmanager
    def server(self, name: str, policy: str, *flags: object) -> Iterator[MeasuredServer]:
        common.progress(f"{name}, {policy}, {self.limits.left_s:.0f} s left")
        n_ctx = -(-(max(self.args.prompt_tokens, self.args.start_prompt_tokens) + max(self.args.tokens, self.args.start_tokens) + 8) // 256) * 256
        args = ["-m", self.args.model, "-c", n_ctx, "-np", 1, "--cache-ram", 0, "--ctx-checkpoints", 0, *self.args.server_flags, "--spark"]
        with MeasuredServer(name, OURS, [*args, "--spark-slots", self.slots, "--spark-policy", policy, *flags], self.limits, is_ours=True) as server:
            if self._prompts is None:
                corpora = (self.text.heldout, self.text.train)
                self._prompts = tuple(make_prompts(ShuffledCorpus(c), server, 1000, self.args.prompt_tokens) for c in corpora)  # type: ignore[assignment]
            yield server

    def prompts(self, which: int) -> list[Prompt]:
        """0: held-out ones, 1: of the training corpus. After the first server has started."""
        assert self._prompts is not None
        return self._prompts[which]

    def start_prompts(self, repeat: int) -> list[Prompt]:
        """Short prompts of one start, other ones for each repeat as long as there are."""
        heldout, n = self.prompts(0), self.args.start_prompts
        return [heldout[(repeat * n + i) % len(heldout)][-self.args.start_prompt_tokens :] for i in range(n)]

    def decode(self, server: MeasuredServer, prompts: Iterable[Prompt], n: int, done: Callable[[], None] = lambda: None) -> Decoding:
        """n tokens after each prompt; all of it has a curve. done: called after each."""
        prompts = list(prompts)
        decoding = Decoding(self.uses_per_token, len(prompts))
        decoding.decode(server, prompts, n, done)
        return decoding

    def start_up(self, key: str, policy: str, flags: Callable[[int], Any], *, settle: bool = False) -> dict[str, Any]:
        """The first tokens of `repeats` fresh servers. flags: a context manager that gives those of a repeat. settle: each then answers other prompts, and
        the first ones again."""
        a = self.args
        curves, settled, starts, with_prompts, settled_with_prompts = [], [], [], [], []
        for repeat in range(a.repeats):
            with flags(repeat) as more, self.server(key, policy, *more) as server:
                first = self.start_prompts(repeat)
                n = -(-a.start_tokens // len(first)) + SLACK
                totals = [NOTHING]
                decoding = self.decode(server, first, n, lambda: totals.append(server.counters() or {}))
                self.compare(repeat, decoding)
                curves.append(decoding.curve)
                with_prompts.append(cumulated(totals, self.uses_per_token))
                starts.append(round(server.start_s, 2))
                if settle:
                    others = [prompt for prompt in self.prompts(0) if prompt[-a.start_prompt_tokens :] not in first]
                    self.decode(server, others[: a.traffic], a.tokens)
                    totals = [server.counters() or {}]
                    settled.append(self.decode(server, first, n, lambda: totals.append(server.counters() or {})).as_dict()["warm_up"]["hit_rate"])
                    settled_with_prompts.append(cumulated(totals, self.uses_per_token))
        each = {str(k): [rate_of_first(curve, k) for curve in curves] for k in FIRST}
        found: dict[str, Any] = {
            "first": {k: statistics.mean(values) for k, values in each.items() if all(values)}, "each": each,  # type: ignore[type-var]
            "with_prompts": mean_by_tokens(with_prompts), "curve": mean_curve(curves), "start_s": starts,
        }  # fmt: skip
        if settled:
            found |= {"settled": statistics.mean(settled), "settled_each": settled, "settled_with_prompts": mean_by_tokens(settled_with_prompts)}
        self._start_ups[key, policy] = found
        return found

    def compare(self, repeat: int, decoding: Decoding) -> None:
        """Answers to the same prompts must be the same, whatever is placed how."""
        answers = [answer.content for answer in decoding.answers]
        if self._answers.setdefault(repeat, answers) != answers:
            self.results["exact"] = False

    def without_profile(self, policy: str) -> dict[str, Any]:
        """The start-up that knows nothing; measured once. With the ring it is followed until it has settled."""
        return self._start_ups.get(("no profile", policy)) or self.start_up("no profile", policy, lambda _: private_copy(None), settle=policy == "frequency")

    # ---- the parts

    def run(self, parts: Sequence[str]) -> int:
        """All parts; the exit code. A part that fails is noted and costs itself only."""
        failed = {}
        try:
            for part in parts:
                try:
                    getattr(self, part)()
                except StalledError:
                    raise
                except (SparkError, subprocess.CalledProcessError) as e:
                    failed[part] = str(e)
                    common.progress(f"{part}: {e}")
                self.save()
            self.results["ended"] = "complete"
        except (StalledError, subprocess.TimeoutExpired) as e:
            self.results["ended"] = f"time-out: {e}"
            common.progress(str(e))
            return 124
        except BaseException as e:
            self.results["ended"] = f"interrupted: {type(e).__name__}"
            raise
        finally:
            if failed:
                self.results["failed"] = failed
            self.save()
        return 1 if failed or not self.results["exact"] else 0

    def tool(self, name: str, *words: object, limits: bool = True) -> dict[str, Any]:
        """Runs `pyspark-moe`; gives its result, also what it had when it failed, as results[name]."""
        result = self.folder / f"{name}.json"
        left = self.limits.left_s
        if left <= CLOSING_S:
            raise self.limits.stalled(f"pyspark-moe {name}")
        options = ["--timeout", f"{left - 5:.0f}", "--json", result] if limits else []
        common.progress(f"pyspark-moe {name}")
        try:
            done = subprocess.run([*TOOL, name, *map(str, [*words, *options])], stdout=sys.stderr, timeout=left + 5)
        finally:
            if result.exists():
                self.results[name] = {k: v for k, v in json.loads(result.read_text()).items() if k in ("partial", "ended", "settings", "results")}
        if done.returncode == 124:
            raise self.limits.stalled(f"pyspark-moe {name}")
        done.check_returncode()
        return self.results.get(name, {})

    def validate(self) -> None:
        a, profile = self.args, self.folder / "calibrated.spark.csv"
        self.tool("calibrate", self.text.train, "-m", a.model, "--out", profile, "--tokens", a.calibrate_tokens)
        self.save()
        self.tool("validate", self.text.heldout, "-m", a.model, "--profile", profile, "--share", a.share, "--prompts", a.prompts, "--prompt-tokens", a.prompt_tokens,
                  "--tokens", a.tokens, "--warmup", a.warmup, "--arms", "uniform,calibrated,calibrated+ring,ring",
                  f"--server-flags={shlex.join(a.server_flags)}")  # fmt: skip
        profile.unlink()

    def restarts(self) -> None:
        a, profile = self.args, self.folder / "restarts.spark.csv"
        found: dict[str, Any] = {"starts": [], "policies": list(POLICIES)}
        self.results["restarts"] = found
        for number in range(a.starts):
            known = profile if number else None
            start_ups = {p: self.start_up(f"start {number + 1}", p, lambda _: private_copy(known)) if known else self.without_profile(p) for p in POLICIES}
            with self.server(f"start {number + 1}: traffic", "frequency", "--spark-profile", profile, "--spark-history", "none") as server:
                train = self.prompts(1)
                self.decode(server, [train[(number * a.traffic + i) % len(train)] for i in range(a.traffic)], a.tokens)
            saved = read_profile(profile)  # the server has ended
            totals = {"tokens": saved.tokens, "uses": saved.uses, "starts": saved.starts} if saved else {"tokens": 0, "uses": 0, "starts": 0}
            found["starts"].append({"start_up": start_ups, "profile_afterwards": totals})
            self.save()
        tokens = [start["profile_afterwards"]["tokens"] for start in found["starts"]]
        found["totals_strictly_grow"] = all(b > a for a, b in zip([0, *tokens], tokens))
        last = max(found["starts"][0]["start_up"]["static"]["first"], key=int)
        found["rates"] = {p: [start["start_up"][p]["first"][last] for start in found["starts"]] for p in POLICIES}
        found["rates_of_first"] = int(last)

    def bootstrap(self) -> None:
        a = self.args
        read: list[dict[str, Any]] = []

        @contextmanager
        def with_history(repeat: int) -> Iterator[tuple[object, ...]]:
            profile = self.folder / f"bootstrap-{len(read)}.spark.csv"
            yield ("--spark-profile", profile, "--spark-history", self.text.history, "--spark-history-tokens", a.history_tokens,
                   "--spark-history-seconds", a.history_seconds)  # fmt: skip
            saved = read_profile(profile)
            read.append(dict(saved.sources) if saved else {})

        found: dict[str, Any] = {}
        self.results["bootstrap"] = found
        for policy in POLICIES:
            found[policy] = {"bare": self.without_profile(policy), "history": self.start_up("history", policy, with_history, settle=policy == "frequency")}
            self.save()
        found["tokens_by_source"] = read
        for key, kind, settled in (("gaps", "first", "settled"), ("gaps_with_prompts", "with_prompts", "settled_with_prompts")):
            floor, end = found["static"]["bare"][kind], found["frequency"]["bare"][settled]
            found[key] = {p: gaps(found[p]["bare"][kind], found[p]["history"][kind], floor, end) for p in POLICIES}

    def bound(self) -> None:
        trace = self.folder / "heldout.trace"
        layers = [] if self.args.gpu_layers is None else ["--gpu-layers", self.args.gpu_layers]
        self.tool("trace", self.args.model, "--corpus", self.text.heldout, "--out", trace, "--max-tokens", self.args.trace_tokens, *layers, limits=False)
        routing = read_trace(trace).routing.in_steps_of(1)
        plan = make_plan(self.layers, [min(self.slots, layer.n_expert) for layer in self.layers])
        found: dict[str, Any] = {"tokens": routing.n_tokens, "settle_tokens": SETTLE_TOKENS}
        policies: dict[str, Policy] = {"ring": Ram(), "lru": Lru(), "belady": Belady()}
        for name, policy in policies.items():
            done = simulate(routing, plan, policy, [layer.expert_bytes for layer in self.layers])
            found[name] = {"cold_rate": 1 - done.hit_rate_after(SETTLE_TOKENS), "hit_rate": done.hit_rate_after(SETTLE_TOKENS),
                           "over_time": [round(float(x), 4) for x in done.over_time]}  # fmt: skip
        self.results["bound"] = found


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """What was found, for people."""
    for name, arm in results.get("validate", {}).get("results", {}).get("arms", {}).items():
        steady = arm["steady"]
        yield f"validate   {name:16} hit rate {steady.get('hit_rate', float('nan')):.4f}  cold {steady.get('cold_rate', float('nan')):.2%}  {steady['decode_per_s']:.1f} tok/s"
    for name, found in results.get("bound", {}).items():
        if isinstance(found, Mapping):
            yield f"bound      {name:16} hit rate {found['hit_rate']:.4f}  cold {found['cold_rate']:.2%}"
    for number, start in enumerate(results.get("restarts", {}).get("starts", []), 1):
        text = "  ".join(f"{p}: " + ", ".join(f"{n}: {rate:.4f}" for n, rate in start["start_up"][p]["first"].items()) for p in POLICIES)
        yield f"start {number}    first tokens {text}  profile afterwards: {start['profile_afterwards']['tokens']} tokens"
    for key, what in (("gaps", "generated"), ("gaps_with_prompts", "with prompts")):
        for policy, found in results.get("bootstrap", {}).get(key, {}).items():
            for n, gap in found.items():
                text = "  ".join(f"{name} {value:.4f}" for name, value in gap.items() if value is not None)
                yield f"bootstrap  {policy}, first {n} {what}: {text}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_path(), help="a .gguf file; default: the demo model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--share", type=float, default=60, help="percent of the experts in fast slots, default 60")
    parser.add_argument("--prompts", type=int, default=11, help="of validate, default 11")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of validate and of traffic, default 256")
    parser.add_argument("--tokens", type=int, default=128, help="generated in each of those, default 128")
    parser.add_argument("--warmup", type=int, default=512, help="tokens of validate, default 512")
    parser.add_argument("--start-prompts", type=int, default=4, help="of a start-up, default 4")
    parser.add_argument("--start-prompt-tokens", type=int, default=32, help="of each, default 32")
    parser.add_argument("--start-tokens", type=int, default=200, help="generated in all of them, default 200")
    parser.add_argument("--repeats", type=int, default=3, help="starts, each with other prompts, that a start-up is a mean of, default 3")
    parser.add_argument("--starts", type=int, default=4, help="of the restarted server, default 4")
    parser.add_argument("--traffic", type=int, default=4, help="requests of each of them, and before a server has settled, default 4")
    parser.add_argument("--calibrate-tokens", type=int, default=30_000)
    parser.add_argument("--history-tokens", type=int, default=30_000)
    parser.add_argument("--history-seconds", type=float, default=45)
    parser.add_argument("--trace-tokens", type=int, default=8000, help="of bound, default 8000")
    parser.add_argument("--gpu-layers", type=int, help="of bound, where residency is off, -1: all; default: 0")
    parser.add_argument("--topics", type=int, default=4, help="of a model of scripts/make_synthetic_moe.py, default 4")
    parser.add_argument("--server-flags", type=shlex.split, default=[], help="for every server: --server-flags='-ngl 99'")
    parser.add_argument("--time-limit-s", type=float, default=1800, help="all of it, default 1800")
    parser.add_argument("--name", default="placement", help="what the result file is called")
    parser.add_argument("--out", type=Path, help="folder for the result, default benchmarks/results/<machine>")
    parser.add_argument("--commit", help="what the result says, for a copy of the checkout without git")
    args = parser.parse_args()
    if args.time_limit_s <= 2 * CLOSING_S or min(args.start_prompts, args.repeats, args.starts, args.traffic) < 1:
        parser.error(f"--time-limit-s must be more than {2 * CLOSING_S:g}, and numbers of prompts, starts and requests at least 1.")
    args.model = args.model.resolve()
    return args


def main() -> None:
    args = parse_args()
    common.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="bench-placement-") as folder:
        bench = Bench(args, Path(folder))
        code = bench.run(args.parts)
    for line in table(bench.results):
        print(line)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
