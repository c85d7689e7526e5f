"""The adapter judged before the engine: does it load, answer, refuse and let go as it should?

A smoke run says nothing about the specification. It finds what would turn every case of
the suite red for one reason, and says what to mend in the adapter.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mone_ref import config
from mone_ref.backend import Backend, Generation, Scores, Unavailable, capable
from mone_ref.errors import Phase
from mone_ref.suite import adapter_mistakes, errormap, optional_methods
from mone_ref.suite.attempt import Attempt
from mone_ref.suite.bench import Bench
from mone_ref.suite.cases import PLAIN
from mone_ref.suite.compare import compare, form_flaw, value_flaw
from mone_ref.suite.decoding import STEPS, Followed, follow
from mone_ref.suite.edits import Edit
from mone_ref.suite.errormap import group
from mone_ref.suite.golden import Golden, GoldenPrompt
from mone_ref.suite.guard import Failed, Failure
from mone_ref.suite.options import OptionError
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.printable import printable
from mone_ref.suite.run import Run, Settings, described
from mone_ref.suite.teacher import Teacher
from mone_ref.suite.text import excerpt

FIXTURES = ("olmoe-approx", "qwen3-approx", "mixtral-approx")
"""One of each family; the first whose plain control loads is used."""

LATER = "the suite will judge that"
UNAVAILABLE = (
    "nothing is left to judge of an engine without OLMoE, Qwen3-MoE and Mixtral",
    "what has its plain model must load or be refused: Unavailable is not for substitution",
)
EVIDENCE = 8
"""Lines shown of what an engine said."""


@dataclass(frozen=True)
class Check:
    """One line: what was checked and found, and what to mend where that is wrong."""

    name: str
    found: str
    mend: tuple[str, ...] = ()
    evidence: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is nothing to mend."""
        return not self.mend


def run(settings: Settings, backend: Backend, root: Path) -> Iterator[Check]:
    """Every check, as it is made; the first that nothing can follow is the last.

    Raises a ``ValueError`` for settings that cannot be used, as ``Run`` does.
    """
    check_settings(settings)
    try:
        info = described(backend, settings.call_limit)
    except OptionError as error:
        yield Check("describe", str(error), ("describe() tells what BackendInfo asks for",))
        return
    dtypes = ", ".join(info.compute)
    yield Check("describe", f"{info.name} {info.version} on {info.device}: {dtypes}")
    suite = Run(settings, backend, root)
    try:
        yield from checks(suite)
    except Unavailable as unavailable:
        yield Check("load", f"not available: {unavailable.reason}", UNAVAILABLE)
    left_open = suite.harness.close()
    if left_open:
        yield failed("close", left_open, ("Backend.close() must not fail",))


def checks(suite: Run) -> Iterator[Check]:
    """What an engine does that has described itself. Raises ``Unavailable`` as ``load`` does."""
    bench = suite.harness.bench
    fixture = chosen_fixture(bench, suite.dtypes[0])
    for dtype in suite.dtypes:
        answers = list(plain(bench, fixture + PLAIN, dtype))
        yield from answers
        if answers[0].passed:
            yield substituted(bench, fixture, dtype)
    yield from refusals(bench, fixture, suite.dtypes[0])
    yield from optional(bench, fixture, suite.dtypes[0])
    yield from layers(suite)


def check_settings(settings: Settings) -> None:
    """Options that mean nothing here. Raises ``OptionError``."""
    given = {
        "--case": settings.patterns,
        "--fixtures": settings.fixtures,
        "--report": settings.report,
        "--markdown": settings.markdown,
        "--write-expectations": settings.write_expectations,
    }
    for flag, value in given.items():
        if value:
            raise OptionError(f"--smoke runs no case of the suite: leave {flag} out")


def chosen_fixture(bench: Bench, dtype: str) -> str:
    """The first fixture whose plain control loads, or the first of all."""
    return next((name for name in FIXTURES if loads(bench, name + PLAIN, dtype)), FIXTURES[0])


def loads(bench: Bench, fixture: str, dtype: str) -> bool:
    """Whether a fixture is loaded and answered; an engine need not have its architecture."""
    try:
        return not bench.attempt(fixture, dtype).failure
    except Unavailable:
        return False


# -- answers


def plain(bench: Bench, fixture: str, dtype: str) -> Iterator[Check]:
    """A checkpoint without substitution: it loads, answers in order, and is let go."""
    attempt = bench.attempt(fixture, dtype)
    name = f"plain {dtype}"
    if attempt.failure:
        yield failed(name, attempt.failure, mend_failure(attempt.failure, fixture))
        return
    found, mend = answered(bench, attempt, fixture, dtype)
    yield Check(name, f"{fixture}: {found}", mend)
    if not mend:
        yield Check(f"order {dtype}", *ordered(bench, attempt, fixture, dtype))
    if attempt.closing:
        mends = ("Session.close() must not fail, whatever happened before",)
        yield failed(f"close {dtype}", attempt.closing, mends)


def substituted(bench: Bench, fixture: str, dtype: str) -> Check:
    """A substituted checkpoint loads and answers with numbers; which, the suite will judge."""
    attempt = bench.attempt(fixture, dtype)
    name = f"substituted {dtype}"
    if attempt.failure:
        return failed(name, attempt.failure, mend_failure(attempt.failure, fixture))
    if attempt.flaw:
        mends = ("the plain model answers: look for what the engine leaves unfilled here",)
        return Check(name, f"{fixture}: {attempt.flaw}", mends)
    judgement = bench.judge_attempt(attempt, fixture, dtype)
    count = len(bench.golden(fixture).prompts)
    if judgement.outcome is Outcome.OK:
        return Check(name, f"{fixture}: {count} prompts within budget")
    return Check(name, f"{fixture}: {judgement.found} ({LATER})")


def answered(
    bench: Bench, attempt: Attempt, fixture: str, dtype: str
) -> tuple[str, tuple[str, ...]]:
    """What the answers to single prompts are, and what to mend."""
    golden, compute = bench.golden(fixture), bench.info.compute[dtype]
    answers = attempt.answers["alone"]
    for index, (scores, prompt) in enumerate(zip(answers, golden.prompts, strict=True)):
        flaw = flaw_of(scores, prompt)
        if flaw:
            mend = adapter_mistakes.of_form(scores, prompt)
            mends = (mend or "score() returns finite log-probabilities, [T, V] for every prompt",)
            return f"prompt {index}: {flaw}", mends
    pairs = zip(answers, golden.prompts, strict=True)
    compared = [compare(scores, prompt, compute) for scores, prompt in pairs]
    if not any(comparison.flaw for comparison in compared):
        return f"{len(answers)} prompts within budget", ()
    mistake = adapter_mistakes.of_values(answers, golden, compute)
    worst = max(compared, key=lambda comparison: comparison.ratio)
    if mistake:
        return worst.flaw, (mistake,)
    agreeing = min(one.numbers.argmax if one.numbers else 0.0 for one in compared)
    if agreeing < 0.5:
        found = f"{worst.flaw}; the likeliest id agrees for {agreeing:.0%} of a prompt's tokens"
        return found, ("probably the adapter: look at ids, rows and columns that it hands over",)
    return f"{worst.flaw} ({LATER})", ()


def flaw_of(scores: Scores, prompt: GoldenPrompt) -> str:
    """What makes an answer no answer, before any number is held to a budget."""
    flaw = form_flaw(scores, len(prompt.ids))
    if flaw or scores.ids is not None:
        return flaw
    return value_flaw(scores.logprobs, prompt.logprobs[: len(scores.logprobs)])


def ordered(
    bench: Bench, attempt: Attempt, fixture: str, dtype: str
) -> tuple[str, tuple[str, ...]]:
    """Whether a batch gives the answers of single prompts, in their order."""
    golden, compute = bench.golden(fixture), bench.info.compute[dtype]
    alone = [len(scores.logprobs) for scores in attempt.answers["alone"]]
    for order in ("together", "reversed"):
        answers = attempt.answers[order]
        rows = [len(scores.logprobs) if scores.logprobs.ndim else 0 for scores in answers]
        if rows != alone:
            found = f"prompts {order}: {rows} rows, expected {alone}"
            return found, ("score() returns one Scores per prompt, in the order of the prompts",)
        for index, prompt in enumerate(golden.prompts):
            single = compare(attempt.answers["alone"][index], prompt, compute)
            batched = compare(answers[index], prompt, compute)
            if batched.flaw and not single.flaw:
                found = f"prompts {order}: prompt {index}: {batched.flaw}"
                return found, ("right alone, wrong in a batch: look at padding and positions",)
    return f"{len(alone)} prompts together and reversed, as alone", ()


# -- refusals


def refusals(bench: Bench, fixture: str, dtype: str) -> Iterator[Check]:
    """Two broken checkpoints: the suite must be able to tell their refusals from accidents."""
    accepted = []
    whole = bench.attempt(fixture, dtype).failure
    always = whole.first_line if whole else None
    for what, code, edits in broken(bench, fixture):
        attempt = bench.attempt(fixture, dtype, edits)
        if attempt.failure is None:
            accepted.append(what)
            yield Check(what, f"accepted ({LATER})")
        elif attempt.failure.first_line == always:
            mends = ("the whole checkpoint fails with the same words, so this is no refusal",)
            yield failed(what, attempt.failure, mends)
        else:
            yield refused(what, code, attempt.failure)
    if len(accepted) == 2:
        mends = ("load() must let the engine's exceptions out; does it catch them?",)
        yield Check("refusals", "nothing was refused", mends)


def broken(bench: Bench, fixture: str) -> Iterator[tuple[str, str, Sequence[Edit]]]:
    """What is broken, the code of the refusal that is due, and how to break it."""
    yield "truncated file", "CHECKPOINT", [{"cut_file": {"file": "model.safetensors", "bytes": 64}}]
    constant = next(iter(constants(bench.checkpoint(fixture))))
    yield "missing constant", "MISSING_CONSTANT", [{"remove_tensor": constant}]


def constants(checkpoint: Path) -> Iterator[str]:
    """Names of the constants of a checkpoint."""
    for layer in config.read(checkpoint).substitution.layers.values():
        yield from layer.constants.values()


def refused(what: str, code: str, failure: Failure) -> Check:
    """Whether the error map knows what a refusal said; else the line that it lacks."""
    if failure.kind in (Failed.CRASHED, Failed.TIMEOUT):
        return failed(what, failure, ("a broken checkpoint must be refused, not end the run",))
    if failure.codes:
        codes = ", ".join(failure.codes)
        fits = code in {group(found) for found in failure.codes}
        return Check(what, f"refused with {codes}" + ("" if fits else f", not {code} ({LATER})"))
    found = f"no refusal that the error map knows: {told(failure)}"
    return Check(what, found, unknown(code, failure), failure.evidence)


def unknown(code: str, failure: Failure) -> tuple[str, ...]:
    """What to do about words that no error map knows."""
    suggested = errormap.suggest(code, failure.evidence)
    if not suggested:
        return ("the engine gives no reason: raise Refused with one, and a code",)
    return (
        "if that is a refusal, one line for the error map (--error-map, or Backend.error_map):",
        *suggested,
    )


# -- what is optional


def optional(bench: Bench, fixture: str, dtype: str) -> Iterator[Check]:
    """Every optional method that the session declares, called once."""
    with bench.open(fixture, [fixture], dtype) as opened:
        session = opened.session
        if isinstance(session, Failure):
            return  # ``substituted`` has told it
        asked = optional_methods.Asked(
            session, bench.golden(fixture).ids, bench.checkpoint(fixture)
        )
        offered = (*optional_methods.CALLS, "generate")
        absent = [name for name in offered if not capable(session, name)]
        for name, (phase, call) in optional_methods.CALLS.items():
            if name not in absent:
                yield called(name, bench.engine.guard.call(phase, partial(call, asked)))
    if "generate" not in absent:
        yield decoded(bench, fixture + PLAIN, dtype)
    if absent:
        yield Check("not declared", ", ".join(f"{name}()" for name in absent))


def decoded(bench: Bench, fixture: str, dtype: str) -> Check:
    """Whether a plain model's own tokens and their scores belong together."""
    name, prompts = f"decode {dtype}", bench.golden(fixture).ids
    try:
        with bench.open_to_decode(fixture, prompts, STEPS, dtype) as opened:
            if isinstance(opened.session, Failure):
                return failed(name, opened.session, mend_failure(opened.session, fixture))
            made = bench.engine.continuations(opened.session, prompts, STEPS)
    except Unavailable as unavailable:
        return Check(name, f"not available: {unavailable.reason}")
    if isinstance(made, Failure):
        return failed(name, made, ("generate() returns a list of Generation, one per prompt",))
    teacher = bench.teacher(fixture, dtype)
    for order, given in made.items():
        for index, (prompt, generation) in enumerate(zip(prompts, given, strict=True)):
            followed = follow(f"prompt {index}, {order}", prompt, generation, teacher)
            if followed.comparison.flaw:
                found = f"{fixture}: {followed.place}: {followed.comparison.flaw}"
                return Check(name, found, (mend_decoding(prompt, generation, followed, teacher),))
    return Check(name, f"{fixture}: {STEPS} tokens after each of {len(prompts)} prompts, as scored")


def mend_decoding(
    prompt: Sequence[int], generation: Generation, followed: Followed, teacher: Teacher
) -> str:
    """What to do about tokens or rows that are not those of greedy decoding."""
    rows = followed.lesson.rows if followed.lesson else None
    if rows is None:
        known = adapter_mistakes.of_continuation(generation, prompt, STEPS)
        return known or "generate() returns so many tokens, and a row of scores for each"
    told = Golden((rows,), (teacher.compute,))
    known = adapter_mistakes.of_values([generation.scores], told, teacher.compute)
    return known or (
        "row s holds what token s was chosen from, token s is its likeliest, and the next pass "
        "is given that token"
    )


def called(name: str, given: str | Failure) -> Check:
    """What came of one optional method. Only a reload may be refused."""
    method = f"{name}()"
    if isinstance(given, str):
        return Check(method, given)
    if name == "reload" and given.kind is Failed.REFUSED:
        return refused(method, "UNSUPPORTED", given)
    mends = (f"{method} is overridden, so it is taken as offered: mend it, or leave it out",)
    return failed(method, given, mends)


def layers(suite: Run) -> Iterator[Check]:
    """Where layers are offered, one case for every method of theirs."""
    if not capable(suite.backend, "build_layer"):
        yield Check("not declared", "build_layer()")
        return
    firsts = {case.layer.call: case for case in reversed(suite.cases) if case.layer}
    for call, case in sorted(firsts.items()):
        result = suite.harness.run(case, suite.dtypes[0])
        broken = result.outcome in (Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMEOUT)
        later = "" if broken or not result.outcome.failed else f" ({LATER})"
        mends = ("build_layer() and the methods of its session take what LayerSpec says",)
        found = f"{case.id}: {result.outcome}: {result.found}{later}"
        yield Check(f"layer {call}()", found, mends if broken else (), result.evidence)


# -- words


def told(failure: Failure) -> str:
    """A failure in one line."""
    return f"{failure.kind} at {failure.call}: {failure.first_line}"


def failed(name: str, failure: Failure, mend: tuple[str, ...]) -> Check:
    """A call that had to succeed."""
    return Check(name, told(failure), mend, failure.evidence)


def mend_failure(failure: Failure, fixture: str) -> tuple[str, ...]:
    """What to do about a checkpoint that does not load, or is not answered."""
    if failure.kind is Failed.TIMEOUT:
        return ("--call-limit SECONDS gives the engine more time",)
    if failure.kind is Failed.REFUSED:
        return (f"{fixture} conforms: nothing can be judged of an engine that refuses it",)
    if failure.call is Phase.LOAD:
        return ("load() takes a directory and LoadOptions, and returns a Session",)
    return ("score() takes lists of token ids and returns a list of Scores, one per prompt",)


def lines(check: Check, repeat: Sequence[str]) -> Iterator[str]:
    """A check for people; where something is to mend, with what was said and how to repeat it."""
    yield f"{'ok' if check.passed else 'FAIL':4}  {check.name:22} {check.found}"
    if check.passed:
        return
    more = "\n" in check.evidence  # than the line above
    for key, texts in (
        ("said", excerpt(check.evidence, EVIDENCE) if more else ()),
        ("mend", check.mend),
        ("repeat", [shlex.join(repeat)]),
    ):
        for number, text in enumerate(texts):
            yield f"      {'' if number else key:7} {text}"


def closing(checks: Sequence[Check], settings: Settings) -> str:
    """The last line: no verdict, since no case was run."""
    wrong = sum(not check.passed for check in checks)
    if wrong:
        return f"smoke  {wrong} of {len(checks)} checks failed: mend the adapter, then repeat"
    judge = shlex.join(["mone-ref", "conform", *settings.chosen_by()])
    return f"smoke  {len(checks)} checks, none failed; the engine is judged by: {judge}"


def tell(settings: Settings, backend: Backend, root: Path, write: Callable[[str], object]) -> bool:
    """Run every check and write its lines as it is made; whether all passed."""
    repeat = ["mone-ref", "conform", "--smoke", *settings.chosen_by()]
    repeat += [f"--dtype={dtype}" for dtype in settings.dtypes]
    checks = []
    for check in run(settings, backend, root):
        checks.append(check)
        write(printable("\n".join(lines(check, repeat))))
    write(printable(closing(checks, settings)))
    return all(check.passed for check in checks)
