"""Drafting from Python: the text is the target's own, with SparkLlama and step by step, at any residency; statistics; life cycles."""
from __future__ import annotations

import gc
import json
import pickle
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyspark_moe
from pyspark_moe import SparkConfig, SparkLlama, errors
from pyspark_moe._native import prepare_llama_cpp
from pyspark_moe.speculative import Sampling, Speculation, SpeculationStats

llama_cpp = prepare_llama_cpp()
DATA = Path(pyspark_moe.__file__).parent / "data"
TARGET, DRAFT = DATA / "target-Q4_K_M.gguf", DATA / "draft-q8_0.gguf"
COMMON = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
RESIDENCIES = {"resident": SparkConfig(mode="on"), "slots": SparkConfig(slots=16), "chaos": SparkConfig(slots=6, policy="chaos")}
PROMPT = "def add(a, b):\n"


def held_out(per_domain: int, n_characters: int = 500) -> list[str]:
    """Beginnings of documents that the pair was not trained on, the same number from each domain."""
    by_domain: dict[str, list[str]] = defaultdict(list)
    for line in (Path(__file__).parents[1] / "data/heldout.jsonl").read_text().splitlines():
        document = json.loads(line)
        by_domain[document["domain"]].append(document["text"][:n_characters])
    return [text for texts in by_domain.values() for text in texts[:per_domain]]


def make(**kwargs: object) -> SparkLlama:
    return SparkLlama(kwargs.pop("path", TARGET), **(COMMON | {"spark": False} | kwargs))


def write(llm: SparkLlama, prompt: str = PROMPT, n: int = 64, **kwargs: object) -> str:
    """From an empty memory: a prompt that is computed behind another's beginning is rounded in other batches, with and without a draft."""
    llm.reset()
    return llm(prompt, **({"max_tokens": n, "temperature": 0} | kwargs))["choices"][0]["text"]


def tokens_of(llm: SparkLlama, prompt: str) -> list[int]:
    return llm.tokenize(prompt.encode())


def alone(llm: SparkLlama, prompt: list[int], n: int) -> list[int]:
    """Greedy tokens without a draft, to the end of n tokens whatever they are; from an empty memory, as Speculation.begin()."""
    llm.reset()
    out = []
    for token in llm.generate(prompt, temp=0.0):
        out.append(token)
        if len(out) == n:
            return out
    raise AssertionError("generate() ended by itself")


def stepwise(spec: Speculation, prompt: list[int], n: int, sampling: Sampling | None = None) -> list[int]:
    text = [spec.begin(prompt, sampling)]
    while len(text) < n:
        text += spec.step().tokens
    return text[:n]


@pytest.fixture(scope="module")
def target() -> Iterator[SparkLlama]:
    with make() as llm:
        yield llm


# ---- the text is the text

@pytest.mark.parametrize(("residency", "n_draft", "n_threads"), [("resident", 7, 1), ("slots", 7, 2), ("slots", 3, 1), ("chaos", 4, 1)])
def test_steps_write_the_targets_own_tokens(residency: str, n_draft: int, n_threads: int) -> None:
    prompts = held_out(2)
    with make(spark=RESIDENCIES[residency], n_threads=n_threads, n_threads_batch=n_threads) as llm:
        prompts_tokens = [tokens_of(llm, prompt) for prompt in prompts]
        expected = [alone(llm, prompt, 48) for prompt in prompts_tokens]
        with Speculation(llm, DRAFT, n_draft=n_draft) as spec:
            assert [stepwise(spec, prompt, 48) for prompt in prompts_tokens] == expected
            stats = spec.stats()
        assert stats.is_exact and stats.n_accepted > 80
        assert [alone(llm, prompts_tokens[0], 48)] == expected[:1]  # the target is what it was


@pytest.mark.parametrize(("residency", "flash_attn"), [("resident", False), ("slots", False), ("slots", True), ("chaos", True)])
def test_a_spark_llama_with_a_draft_writes_the_text_without(residency: str, flash_attn: bool) -> None:
    prompts = held_out(2)
    with make(spark=RESIDENCIES[residency], flash_attn=flash_attn) as llm:
        expected = [write(llm, prompt) for prompt in prompts]
    with make(spark=RESIDENCIES[residency], flash_attn=flash_attn, draft=DRAFT, draft_tokens=6) as llm:
        assert [write(llm, prompt) for prompt in prompts] == expected
        stats = llm.draft_stats()
        assert stats.is_exact and stats.n_accepted > 80 and llm.scores.shape[0] == llm.n_batch  # no logits of every token


def test_a_seed_gives_the_same_random_text_with_and_without_a_draft(target: SparkLlama) -> None:
    prompt = tokens_of(target, "The history of the")
    sampling = Sampling(temperature=0.8, seed=7, top_k=40, top_p=0.95, min_p=0.05, penalty_repeat=1.1)
    with Speculation(target, DRAFT) as spec:
        expected = [spec.begin(prompt, sampling)]
        while len(expected) < 60:
            spec.verify([])
            expected += spec.accept().tokens
        assert spec.stats().n_steps == 0
        assert stepwise(spec, prompt, 60, sampling) == expected and spec.stats().n_accepted > 5
        assert stepwise(spec, prompt, 60, Sampling(temperature=0.8, seed=8)) != expected
    expected_text = write(target, "import", temperature=0.7, seed=3)
    with make(draft=DRAFT) as llm:
        assert write(llm, "import", temperature=0.7, seed=3) == expected_text and llm.draft_stats().n_accepted > 5


def test_past_the_sliding_window() -> None:
    """The window is 512 tokens; its cache goes round while the text is written."""
    prompts = [prompt for prompt in held_out(12, 4000) if len(prompt) == 4000][:3]
    options = {"n_ctx": 2048, "swa_full": False, "n_ubatch": 64}
    with make(**options) as llm:
        expected = [write(llm, prompt, 96) for prompt in prompts]
        llm.reset()
    with make(**options, draft=DRAFT, draft_tokens=7) as llm:
        for prompt, text in zip(prompts, expected):
            llm.reset()  # a window that has gone on cannot go back to a common beginning
            llm._ctx.kv_cache_clear()
            assert write(llm, prompt, 96) == text
        assert llm.draft_stats().n_accepted > 30


def test_to_the_end_of_the_context() -> None:
    with make(n_ctx=256) as llm:
        prompt = tokens_of(llm, PROMPT)
        n = 256 - len(prompt)
        expected = alone(llm, prompt, n)
        with Speculation(llm, DRAFT) as spec:
            text = [spec.begin(prompt)]
            while spec.n_past < 256:
                text += spec.step().tokens
            assert text[:n] == expected and len(text) == n + 1
            assert spec.draft() == []
            with pytest.raises(errors.StateError, match="full"):
                spec.verify([])
        full = llm(PROMPT, max_tokens=None, temperature=0)
    with make(n_ctx=256, draft=DRAFT) as llm:
        drafted = llm(PROMPT, max_tokens=None, temperature=0)
        assert drafted["choices"] == full["choices"] and drafted["usage"] == full["usage"]


def session(llm: SparkLlama) -> list[object]:
    """Completions of many kinds; each begins with what the one before has left in memory."""
    prompt, other = held_out(1)[1], held_out(1)[3]
    text = llm(prompt, max_tokens=64, temperature=0)["choices"][0]["text"]
    answers: list[object] = [text, llm.n_tokens]
    answers += ["".join(part["choices"][0]["text"] for part in llm(prompt, max_tokens=64, temperature=0, stream=True)), llm.n_tokens]
    answers += [llm(prompt, max_tokens=64, temperature=0, stop=[text[30:33]])["choices"], llm.n_tokens]
    for n, _ in enumerate(llm(prompt, max_tokens=64, temperature=0, stream=True)):
        if n == 5:
            break  # abandoned
    answers += [llm.n_tokens, llm(prompt + text[:60], max_tokens=32, temperature=0)["choices"], llm.n_tokens]
    for message in ("hello", "hello there", other):
        answers += [llm.create_chat_completion([{"role": "user", "content": message}], max_tokens=24, temperature=0)["choices"], llm.n_tokens]
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "[" [0-9]+ ("," [0-9]+)* "]"', verbose=False)
    answers += [llm("numbers: ", max_tokens=24, temperature=0, grammar=grammar)["choices"], llm.n_tokens]
    answers += [llm("numbers: ", max_tokens=24, temperature=1.2, seed=5, repeat_penalty=1.2)["choices"], llm.n_tokens]
    answers += [llm(prompt, max_tokens=1, temperature=0)["choices"], llm.n_tokens, llm(prompt, max_tokens=40, temperature=0)["choices"]]
    return answers


@pytest.mark.parametrize("residency", ["resident", "slots"])
def test_a_session_is_the_session_without_a_draft(residency: str) -> None:
    with make(spark=RESIDENCIES[residency]) as llm:
        expected = session(llm)
    with make(spark=RESIDENCIES[residency], draft=DRAFT, draft_tokens=5) as llm:
        assert session(llm) == expected
        assert llm.draft_stats().n_accepted > 30


def test_log_probabilities_of_drafted_tokens() -> None:
    def answer(**kwargs: object) -> dict:
        with make(logits_all=True, **kwargs) as llm:
            return llm(PROMPT, max_tokens=32, temperature=0, logprobs=3)["choices"][0]

    expected, drafted = answer(), answer(draft=DRAFT)
    assert drafted == expected and len(drafted["logprobs"]["token_logprobs"]) == 32


def test_states_and_caches(target: SparkLlama) -> None:
    prompt = tokens_of(target, PROMPT)
    expected = alone(target, prompt, 40)
    with make(draft=DRAFT) as llm:
        llm.eval(prompt)
        state = llm.save_state()
        assert write(llm, "class B:\n") == write(target, "class B:\n")
        llm.load_state(state)
        assert alone(llm, prompt, 40) == expected
        llm.set_cache(llama_cpp.LlamaRAMCache())
        texts = {p: write(target, p) for p in (PROMPT, "class C:\n")}
        for _ in range(2):
            assert {p: write(llm, p) for p in texts} == texts


def test_plain_drafts_and_pickled_copies(target: SparkLlama, tmp_path: Path) -> None:
    twin = shutil.copy(TARGET, tmp_path / "twin.gguf")
    expected = write(target)
    with make(draft=twin, draft_tokens=3) as llm:
        assert write(llm) == expected
        stats = llm.draft_stats()
        assert stats.n_steps > 5 and stats.n_drafted - 3 < stats.n_accepted  # it agrees with itself, to the last token that was asked for
        with pickle.loads(pickle.dumps(llm)) as copy:
            assert write(copy) == expected and copy.draft_stats().n_accepted == stats.n_accepted


def test_tokens_that_nobody_drafted(target: SparkLlama) -> None:
    """verify() takes anyone's tokens: the right ones are kept, wrong ones cost nothing but time."""
    prompt = tokens_of(target, PROMPT)
    expected = alone(target, prompt, 20)
    with Speculation(target, DRAFT) as spec:
        assert spec.begin(np.asarray(prompt, dtype=np.intc)) == expected[0]
        assert spec.verify(expected[1:5]) == expected[1:6]
        step = spec.accept(3)
        assert step.tokens == tuple(expected[1:4]) and (step.n_drafted, step.n_accepted) == (4, 3)
        wrong = (expected[4] + 1) % target.n_vocab()
        assert spec.verify([wrong, wrong]) == expected[4:5]
        assert spec.accept(0).tokens == ()
        assert spec.verify([expected[4], wrong]) == expected[4:6]
        assert spec.accept().n_accepted == 1
        assert spec.n_past == len(prompt) + 5


def test_the_target_may_be_used_between_texts(target: SparkLlama) -> None:
    prompt = tokens_of(target, PROMPT)
    expected = alone(target, prompt, 30)
    with Speculation(target, DRAFT) as spec:
        assert stepwise(spec, prompt, 30) == expected
        assert write(target, "import os", 8)
        for step in (spec.draft, spec.step, lambda: spec.verify([]), spec.accept):
            with pytest.raises(errors.StateError, match="used for something else"):
                step()
        with pytest.raises(errors.InvalidArgumentError):
            spec.begin([])
        with pytest.raises(errors.StateError, match="begin a text first"):
            spec.draft()
        assert stepwise(spec, prompt, 30) == expected
        assert alone(target, prompt, 30) == expected


# ---- figures

def test_figures_add_up(target: SparkLlama) -> None:
    with Speculation(target, DRAFT, n_draft=5) as spec:
        assert spec.stats().tokens_per_step is None and str(spec.stats()) == "no draft was verified"
        spec.begin(tokens_of(target, held_out(1)[1]))
        steps = [spec.step() for _ in range(30)]
        stats = spec.stats()
    drafted = [step for step in steps if step.n_drafted]
    assert stats.n_steps == len(drafted) and stats.n_drafted == sum(s.n_drafted for s in steps) and stats.n_accepted == sum(s.n_accepted for s in steps)
    assert sum(len(s.tokens) for s in drafted) == stats.n_steps * stats.tokens_per_step
    assert stats.drafted_at == (len(drafted),) * 5 and sum(stats.accepted_at) == stats.n_accepted
    shares = stats.acceptance_by_depth
    assert list(shares) == sorted(shares, reverse=True) and 0 < shares[0] <= 1
    for name in ("draft_ms", "verify_ms", "features_ms", "sampling_ms", "other_ms"):
        assert getattr(stats, name) == pytest.approx(sum(getattr(s, name) for s in drafted), rel=0.2, abs=0.5)
    assert all(s.verify_ms > 0 and s.draft_ms > 0 for s in drafted)
    assert json.loads(json.dumps(stats.as_dict()))["tokens_per_step"] == stats.tokens_per_step and "tokens a step" in str(stats)


def test_heads_can_be_timed_apart(target: SparkLlama) -> None:
    prompt = tokens_of(target, PROMPT)
    with Speculation(target, DRAFT) as spec:
        expected = stepwise(spec, prompt, 40)
        assert spec.step().heads_ms is None and spec.stats().heads_ms is None
    with Speculation(target, DRAFT, measure_heads=True) as spec:
        assert stepwise(spec, prompt, 40) == expected
        step, stats = spec.step(), spec.stats()
        assert 0 < step.heads_ms < step.draft_ms and 0 < stats.heads_ms < stats.draft_ms and "(its heads " in str(stats)


def test_a_spark_llama_counts_too() -> None:
    with make(draft=DRAFT, draft_tokens=5) as llm:
        write(llm, n=60)
        stats: SpeculationStats = llm.draft_stats()
        assert stats.n_steps > 10 and stats.drafted_at[0] == stats.n_steps and stats.sampling_ms == 0 < stats.other_ms
        assert stats.n_steps + stats.n_accepted == 59  # and the first token came from the prompt
    with pytest.raises(errors.StateError):
        llm.draft_stats()


# ---- life cycles and mistakes

def test_closing_in_any_order() -> None:
    llm = make(spark=SparkConfig(slots=8))
    spec = Speculation(llm, DRAFT)
    text = stepwise(spec, tokens_of(llm, PROMPT), 10)
    with pytest.raises(errors.StateError, match="has a draft already"):
        Speculation(llm, DRAFT)
    spec.close()
    spec.close()
    again = Speculation(llm, DRAFT)
    assert stepwise(again, tokens_of(llm, PROMPT), 10) == text
    llm.close()  # the target first
    for call in (spec.stats, again.stats, again.draft, lambda: again.begin([1]), lambda: again.n_past):
        with pytest.raises(errors.StateError, match="closed"):
            call()
    again.close()
    llm.close()


def test_freed_without_close() -> None:
    llm = make()
    spec = Speculation(llm, DRAFT)
    handle = spec._handle
    target_alive = weakref.ref(llm)
    del llm
    gc.collect()
    assert target_alive() is not None and spec.begin([1, 2, 3]) >= 0  # the text keeps its target
    del spec
    gc.collect()
    assert target_alive() is None and handle is not None
    with pytest.raises(errors.StateError):
        handle.stats()

    with_draft = make(draft=DRAFT)
    handle = with_draft._draft._handle
    with_draft.cycle = [with_draft]  # collected in an order that nobody chose
    del with_draft
    gc.collect()
    with pytest.raises(errors.StateError):
        handle.stats()


def test_the_context_goes_first() -> None:
    """Whatever frees llama_cpp's context frees the draft before."""
    llm = make(draft=DRAFT)
    write(llm, n=8)
    llm._model.close()
    with pytest.raises(errors.StateError, match="closed"):
        llm.draft_stats()
    llm.close()


def test_mistakes_say_what_to_do(target: SparkLlama, tmp_path: Path) -> None:
    cases: list[tuple[dict, type[Exception], str]] = [
        ({"draft": TARGET}, errors.DraftError, "no next-token"),
        ({"draft": tmp_path / "absent.gguf"}, errors.DraftError, "cannot be read"),
        ({"draft": DRAFT, "draft_tokens": 0}, errors.ConfigError, "1 or more"),
        ({"draft": DRAFT, "draft_tokens": 64}, errors.InvalidArgumentError, "allows 1 to 63"),
        ({"draft": DRAFT, "embedding": True}, errors.ConfigError, "embedding=True"),
        ({"draft": DRAFT, "draft_model": lambda ids: ids}, errors.ConfigError, "draft= and draft_model="),
        ({"path": DRAFT, "draft": TARGET}, errors.SparkError, ""),
    ]
    for kwargs, kind, text in cases:
        with pytest.raises(kind, match=f"(?s){text}"):
            make(**kwargs)
    with pytest.raises(errors.StateError, match="draft=FILE"):
        target.draft_stats()
    with pytest.raises(errors.DraftError, match="next-token"):
        Speculation(target)
    with make(draft=DRAFT) as drafting, pytest.raises(errors.StateError, match="draft of its own"):
        Speculation(drafting, DRAFT)
    for field, value in (("temperature", -1.0), ("temperature", float("nan")), ("seed", -1), ("top_k", -1), ("top_p", 1.1), ("min_p", -0.1), ("penalty_repeat", 0.0)):
        with pytest.raises(errors.ConfigError, match=field):
            Sampling(**{field: value})
    with Speculation(target, DRAFT) as spec:
        with pytest.raises(errors.StateError, match="begin a text first"):
            spec.draft()
        for prompt, text in (([], "empty"), ([-1], "token -1"), ([8192], "8192"), ([1] * 1024, "1024 tokens"), (["a"], "integers"), ([2**40], "integers")):
            with pytest.raises(ValueError, match=text):
                spec.begin(prompt)
        with pytest.raises(errors.InvalidArgumentError, match="grammar"):
            spec.begin([1], Sampling(grammar="root ::= ("))
        spec.begin([1])
        with pytest.raises(errors.StateError, match="nothing was verified"):
            spec.accept()
        with pytest.raises(errors.InvalidArgumentError, match="to verify"):
            spec.verify([1] * 64)
        spec.verify([])
        for n_keep in (-1, 2):
            with pytest.raises(errors.InvalidArgumentError):
                spec.accept(n_keep)
        assert len(spec.accept().tokens) == 1
