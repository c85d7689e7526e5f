"""The smoke run: what each mistake of an adapter is told, and that right adapters pass."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import fake_adapters as adapters
import fake_engines as fakes
import pytest
import torch
from patience import HANG

from mone_ref.backends.reference import ReferenceBackend
from mone_ref.suite import errormap, smoke
from mone_ref.suite.bench import Bench, Options
from mone_ref.suite.options import OptionError
from mone_ref.suite.run import Settings, described

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FIXTURE = "olmoe-approx"
PLAIN = "olmoe-approx-plain"


def bench(kind, error_map=errormap.ErrorMap()) -> Bench:
    engine = kind()
    return Bench(engine, engine.describe(), ROOT, Options(error_map=error_map))


def plain(kind) -> list[smoke.Check]:
    return list(smoke.plain(bench(kind), PLAIN, "float32"))


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        (adapters.ReturnsLogits, "these are unnormalised logits: return torch.log_softmax"),
        (adapters.ReturnsProbabilities, "these are probabilities: return their logarithm"),
        (adapters.TurnsTheSign, "these are negative log-probabilities: turn the sign"),
        (adapters.ForgetsTheDtype, "right for bfloat16, not for float32: hand options.dtype to"),
        (adapters.OneRowLate, "one row late: row t holds what comes after token t, not before"),
        (adapters.NothingBeforeTheFirst, "row t holds what comes after token t: an engine has"),
        (adapters.DropsTheFirstRow, "one row early: keep the first row, and leave out the last"),
        (adapters.LateLogits, "these are unnormalised logits: return torch.log_softmax(logits, "),
        (adapters.LateLogits, "dim=-1); one row late: row t holds what comes after token t"),
        (adapters.PutsATokenInFront, "one row too many: token ids go to the engine as they are"),
        (adapters.KeepsTheBatch, "a batch dimension stands in front: one Scores per prompt"),
        (adapters.Transposes, "the answer is transposed: rows are tokens"),
        (
            adapters.PadsTheVocabulary,
            "the vocabulary is padded: cut the answer to the config's 128",
        ),
        (adapters.ForgetsTheIds, "top-n answers need their ids as well"),
        (adapters.MixesColumns, "probably the adapter: look at ids, rows and columns"),
        (fakes.SwapsTokens, "probably the adapter: look at ids, rows and columns"),
        (fakes.AnswersNaN, "score() returns finite log-probabilities, [T, V] for every prompt"),
        (fakes.RefusesEverything, f"{PLAIN} conforms: nothing can be judged of an engine that"),
        (adapters.LoadsNothing, "load() takes a directory and LoadOptions, and returns a Session"),
        (fakes.AnswersNothing, "score() takes lists of token ids and returns a list of Scores"),
    ],
)
def test_a_mistake_in_an_answer_is_named(kind, mend):
    (check,) = plain(kind)
    assert check.name == "plain float32"
    assert not check.passed
    assert mend in " ".join(check.mend)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (adapters.ReturnsArrays, "returned logprobs as ndarray, expected a torch.Tensor"),
        (adapters.ReturnsLists, "returned logprobs as list, expected a torch.Tensor"),
        (adapters.ReturnsBareTensors, "score() returned Tensor, not Scores"),
        (adapters.ReturnsATuple, "score() returned tuple for 1 prompts"),
        (adapters.IdsOfAnotherKind, "the ids are no integer tensor but torch.float32"),
        (adapters.LoadsNothing, "load() returned NoneType, not a Session"),
    ],
)
def test_a_wrong_type_is_one_clear_line(kind, found):
    (check,) = plain(kind)
    assert found in check.found
    assert "\n" not in check.found


@pytest.mark.parametrize(
    "kind",
    [
        fakes.Honest,
        fakes.ScoresPromptsOnly,
        fakes.ReturnsTop20,
        fakes.ReusesItsBuffer,
        adapters.NarrowIds,
        adapters.WideAnswersWithGradients,
    ],
)
def test_what_the_interface_allows_passes(kind):
    checks = plain(kind)
    assert [check.found for check in checks] == [
        f"{PLAIN}: 5 prompts within budget",
        "5 prompts together and reversed, as alone",
    ]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize(
    ("kind", "found", "mend"),
    [
        (
            fakes.SwapsPrompts,
            "prompts together: [40, 2, 7, 11, 16] rows, expected [16, 11, 7, 2, 40]",
            "score() returns one Scores per prompt, in the order of the prompts",
        ),
        (
            adapters.ForgetsPositionsInABatch,
            "prompts together: prompt 0: token",
            "right alone, wrong in a batch: look at padding and positions",
        ),
    ],
)
def test_order_is_judged_where_single_answers_are_right(kind, found, mend):
    alone, order = plain(kind)
    assert alone.passed
    assert order.name == "order float32"
    assert found in order.found
    assert order.mend == (mend,)


def test_a_session_that_cannot_be_closed():
    checks = plain(fakes.CannotLetGo)
    assert [check.passed for check in checks] == [True, True, False]
    assert checks[-1].mend == ("Session.close() must not fail, whatever happened before",)
    assert "RuntimeError: still busy" in checks[-1].found


def test_numbers_of_a_substituted_model_are_left_to_the_suite():
    check = smoke.substituted(bench(adapters.LosesConstants), FIXTURE, "float32")
    assert check.passed
    assert "over 3 x its budget" in check.found
    assert check.found.endswith("(the suite will judge that)")


def test_a_substituted_model_that_answers_nan_is_none():
    check = smoke.substituted(bench(fakes.AnswersNaN), FIXTURE, "float32")
    assert not check.passed
    assert "the answer holds NaN or infinity" in check.found


# -- refusals


def refusals(kind, error_map=errormap.ErrorMap()) -> dict[str, smoke.Check]:
    checks = smoke.refusals(bench(kind, error_map), FIXTURE, "float32")
    return {check.name: check for check in checks}


def test_words_that_no_map_knows_come_with_the_lines_that_would():
    checks = refusals(adapters.WrapsItsErrors)
    missing = checks["missing constant"]
    assert not missing.passed
    assert missing.mend[1:] == (
        r"MISSING_CONSTANT = ['builtins\.RuntimeError: engine core \d+ failed']",
        r"MISSING_CONSTANT = ['''builtins\.ValueError: it's cut at \d+: .*''']",
    )
    # Pasted, they do what they promise.
    pasted = errormap.parse(tomllib.loads(missing.mend[2]))
    assert refusals(adapters.WrapsItsErrors, pasted)["missing constant"].passed


def test_a_refusal_for_another_reason_is_recognised_all_the_same():
    checks = refusals(fakes.RefusesForAnotherReason)
    assert checks["truncated file"].passed
    assert checks["truncated file"].found == (
        "refused with UPDATE/unknown-name, not CHECKPOINT (the suite will judge that)"
    )


def test_words_that_the_whole_checkpoint_draws_too_are_no_refusal():
    check = refusals(adapters.Coloured)["truncated file"]
    assert check.mend == ("the whole checkpoint fails with the same words, so this is no refusal",)


def test_what_an_engine_says_does_not_reach_the_terminal_as_a_command():
    told: list[str] = []
    settings = Settings("x", dtypes=("float32",))
    assert not smoke.tell(settings, adapters.Coloured(), ROOT, told.append)
    assert any("cannot load red weights" in line for line in told)
    assert not any("\x1b" in line for line in told)


def test_a_refusal_without_a_word():
    (mend,) = refusals(adapters.HidesTheReason)["missing constant"].mend
    assert mend == "the engine gives no reason: raise Refused with one, and a code"


def test_nothing_refused_is_a_mistake_of_the_adapter_one_thing_is_the_suites():
    checks = refusals(adapters.CatchesEverything)
    assert [check.passed for check in checks.values()] == [True, True, False]
    assert checks["refusals"].mend == (
        "load() must let the engine's exceptions out; does it catch them?",
    )


def test_a_crash_is_no_refusal():
    assert refusals(fakes.Leaves)["truncated file"].mend == (
        "a broken checkpoint must be refused, not end the run",
    )


@pytest.mark.parametrize(
    "line",
    [
        "a.B: it's '''quoted'''",
        "a.B: 7 of /a/b-c.d: [x]",
        "a.B: tab\tand \x7f",
        "a.B: quote at the end'",
    ],
)
def test_a_suggested_pattern_is_toml_and_finds_its_line(line):
    (text,) = errormap.suggest("CHECKPOINT", line)
    assert errormap.parse(tomllib.loads(text)).find(line) == "CHECKPOINT"


# -- what is optional


def optional(kind) -> dict[str, smoke.Check]:
    checks = smoke.optional(bench(kind), FIXTURE, "float32")
    return {check.name: check for check in checks}


def test_everything_that_is_declared_is_called_once():
    checks = optional(adapters.PromisesTooMuch)
    assert {name: check.passed for name, check in checks.items()} == dict.fromkeys(
        ("expert_rows()", "trace()", "update()", "reload()", "decode float32"), False
    )
    assert (
        "returned [6, 5], expected a dict of layer index to rows" in checks["expert_rows()"].found
    )
    assert "expected per prompt a dict of layers.{L}.NAME to tensors" in checks["trace()"].found
    assert "5 tokens, expected 4" in checks["decode float32"].found
    assert checks["update()"].mend == (
        "update() is overridden, so it is taken as offered: mend it, or leave it out",
    )
    assert "AttributeError" in checks["reload()"].found


def test_what_is_offered_and_right_passes_and_what_is_not_is_named():
    checks = optional(adapters.Generates)
    assert checks["decode float32"].found == (
        f"{PLAIN}: 4 tokens after each of 5 prompts, as scored"
    )
    assert checks["expert_rows()"].found == "rows per layer: {0: 6, 1: 5}"
    assert checks["reload()"].found == "refused with UNSUPPORTED/layerwise-reload"
    assert checks["not declared"].found == "trace()"
    assert all(check.passed for check in checks.values())


@pytest.mark.parametrize(
    ("kind", "found", "mend"),
    [
        (adapters.GeneratesThePromptToo, "20 tokens, expected 4", "the prompt's own tokens stand"),
        (adapters.ScoresThePromptToo, "19 rows", "rows of the prompt stand in front: return one"),
        (adapters.EndsAtAnEnd, "1 tokens, expected 4", "it ends early: go on behind a token that"),
        (adapters.GeneratesOneNumber, "shape [], expected 4 rows", "a row of scores for each"),
        (adapters.GeneratesWithLogits, "rms error 3", "these are unnormalised logits: return"),
        (adapters.SamplesTokens, "not greedy", "row s holds what token s was chosen from, token s"),
    ],
)
def test_a_mistake_in_generate_is_named(kind, found, mend):
    check = optional(kind)["decode float32"]
    assert not check.passed
    assert found in check.found
    assert mend in check.mend[0]


# -- describe()


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"version": 3}, "describe(): version is 3, expected a text"),
        ({"device": torch.device("cpu")}, "describe(): device is device(type='cpu'), expected a"),
        ({"compute": ["float32"]}, "describe(): compute is ['float32'], expected a mapping"),
        ({"compute": {torch.float32: "float32"}}, "compute is {torch.float32: 'float32'}"),
        ({"features": ["lora"]}, "describe(): features is ['lora'], expected a set of texts"),
        ({"components": {"torch": 2}}, "components is {'torch': 2}, expected a mapping of texts"),
        ({"workarounds": "eager"}, "describe(): workarounds is 'eager', expected a tuple of texts"),
    ],
)
def test_a_description_of_wrong_types_is_one_clear_line(changes, flaw):
    class Odd(adapters.Misdescribed):
        pass

    Odd.changes = changes
    with pytest.raises(OptionError) as caught:
        described(Odd())
    assert flaw in str(caught.value)


# -- whole runs


def test_a_whole_run_of_the_reference_passes_every_check():
    told: list[str] = []
    assert smoke.tell(
        Settings("reference", dtypes=("float32",)), ReferenceBackend(), ROOT, told.append
    )
    assert all(line.startswith("ok ") for line in told[:-1])
    names = [line[6:28].strip() for line in told[:-1]]
    assert "describe" in names
    assert {name for name in names if name.startswith("layer")} == {
        "layer expert_rows()",
        "layer forward()",
        "layer forward_routed()",
        "layer rewrite_routes()",
    }
    assert told[-1] == (
        f"smoke  {len(told) - 1} checks, none failed; "
        "the engine is judged by: mone-ref conform --backend=reference"
    )


def test_a_backend_that_cannot_close_or_describe_itself():
    checks = list(smoke.run(Settings("x", dtypes=("float32",)), adapters.CannotEnd(), ROOT))
    assert [check.name for check in checks if not check.passed] == ["close"]
    (check,) = smoke.run(Settings("x"), adapters.DescribesALongVersion(), ROOT)
    assert check.name == "describe"
    assert not check.passed


def test_an_engine_without_an_architecture_is_asked_for_the_next():
    settings = Settings("x", dtypes=("float32",))
    found = {check.name: check for check in smoke.run(settings, adapters.OnlyMixtral(), ROOT)}
    assert found["plain float32"].found == "mixtral-approx-plain: 2 prompts within budget"
    assert all(check.passed for check in found.values())
    *_, last = smoke.run(settings, adapters.HasNothing(), ROOT)
    assert (last.name, last.found) == ("load", "not available: no kernel")
    assert not last.passed


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", "from mone_ref.cli import main; main()", "conform", "--smoke"]
    paths = os.pathsep.join((str(ROOT), str(TESTS)))
    return subprocess.run(
        [*run, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )


def test_the_command_tells_what_to_mend_and_how_to_repeat_it(tmp_path):
    done = command(tmp_path, "--backend=fake_adapters:ReturnsLogits", "--dtype=float32")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    failed = done.stdout.partition("FAIL")[2].splitlines()
    assert failed[0].startswith("  plain float32 ")
    assert failed[1:3] == [
        "      mend    these are unnormalised logits: return torch.log_softmax(logits, dim=-1)",
        "      repeat  mone-ref conform --smoke --backend=fake_adapters:ReturnsLogits "
        "--dtype=float32",
    ]
    assert "verdict" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("smoke  1 of ")
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_names_what_it_was_at(tmp_path):
    done = command(tmp_path, "--backend=fake_engines:Dies", "--dtype=float32")
    assert done.returncode == 1
    assert "the process ended during the smoke run (exit code 0)" in done.stderr
    assert "ok    substituted float32" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case=load/*"], "--smoke runs no case of the suite: leave --case out"),
        (["--report=r.jsonl"], "--smoke runs no case of the suite: leave --report out"),
        (["--backend=none"], "no backend 'none'"),
        (["--dtype=float8"], "--dtype float8: reference runs float32, bfloat16, float16"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(arguments, message, tmp_path):
    done = command(tmp_path, *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stderr
