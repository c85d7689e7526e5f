"""What is known of an honest model is what a wrong engine would answer."""

from __future__ import annotations

import contextlib
import importlib

import pytest

from mone_ref.backend import LoadOptions
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.suite import data, golden
from mone_ref.suite.planted import REPLAYED, Planted, Watched, digest, steps

FIXTURE = data.root() / "fixtures" / "olmoe-approx"
CONTROL = data.root() / "fixtures" / "olmoe-approx-plain"
PROMPTS = [tuple(ids) for ids in golden.read(FIXTURE / "golden.safetensors").ids]


class Honest:
    """One honest model that has answered every prompt."""

    def __init__(self, fixture):
        self.backend = Watched(ReferenceBackend(), FAULTS.values())
        self.session = self.backend.load(fixture / "checkpoint", options())
        self.answers = self.session.score([list(prompt) for prompt in PROMPTS])
        self.digest = self.session.digest()

    def known_with(self, fault):
        """What a backend with a fault knows of the answers, prompt by prompt."""
        planted = Planted(ReferenceBackend(), fault, self.backend.honest)
        return [planted.known(self.digest, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def honest():
    return Honest(FIXTURE)


@pytest.fixture(scope="module")
def plain():
    return Honest(CONTROL)


def itself(step):
    """A fault that is none."""
    module, _, name = step.rpartition(".")
    patch = Patch(module, name, getattr(importlib.import_module(module), name))
    return Fault("same", "It is right.", (), "run", (patch,), "")


@pytest.mark.parametrize("step", sorted(REPLAYED))
def test_a_step_that_is_called_again_gives_what_it_gave(honest, step):
    """It would not if anything had changed what the step was given, the model or a tensor."""
    assert any(call.step == step for call in honest.backend.noted)
    known = honest.known_with(itself(step))
    assert all(one is two for one, two in zip(known, honest.answers, strict=True))


def test_an_answer_is_not_known_where_a_step_gives_something_else(honest, plain):
    assert honest.known_with(FAULTS["dropped"]) == [None] * len(PROMPTS)
    assert all(plain.known_with(FAULTS["dropped"]))  # nothing is substituted there


def test_an_answer_is_not_known_where_a_step_changes_what_it_is_given(honest):
    assert honest.known_with(FAULTS["routes-rewritten-in-place"]) == [None] * len(PROMPTS)


def test_an_answer_is_not_known_where_the_step_cannot_be_called_by_itself(honest):
    assert honest.known_with(itself("mone_ref.moe.forward")) == [None] * len(PROMPTS)


def test_an_answer_is_not_known_of_another_model_or_prompt(honest):
    planted = Planted(ReferenceBackend(), FAULTS["update-lost"], honest.backend.honest)
    assert planted.known(honest.digest, PROMPTS[0]) is honest.answers[0]
    assert planted.known(b"another", PROMPTS[0]) is None
    assert planted.known(honest.digest, (*PROMPTS[0], 0)) is None


def options(tensor_parallel=1):
    return LoadOptions(
        dtype="float32",
        max_tokens=max(map(len, PROMPTS)),
        max_prompts=len(PROMPTS),
        tensor_parallel=tensor_parallel,
    )


def test_a_report_is_that_of_the_honest_check_where_no_replaced_step_is_called_in_it(honest):
    checkpoint = FIXTURE / "checkpoint"
    (checked,) = honest.backend.honest.checks.values()
    loaded = Planted(ReferenceBackend(), FAULTS["neighbour"], honest.backend.honest)
    assert loaded.check(checkpoint, "float32") is checked.report
    ruled = Planted(ReferenceBackend(), FAULTS["missing-constant-is-zero"], honest.backend.honest)
    assert ruled.check(checkpoint, "float32") is not checked.report


def test_no_fault_changes_the_report_that_its_load_rests_on(honest):
    (checked,) = honest.backend.honest.checks.values()
    before = digest(checked.report)
    lent = [f for f in FAULTS.values() if f.stage == "load" and not steps(f) & checked.called]
    assert lent
    for fault in lent:
        planted = Planted(ReferenceBackend(), fault, honest.backend.honest)
        for ranks in (1, 3):
            with contextlib.suppress(Exception):
                planted.load(FIXTURE / "checkpoint", options(ranks))
        assert digest(checked.report) == before, fault.id


def test_no_fault_changes_the_model_that_its_step_is_given(honest):
    replayed = [fault for fault in FAULTS.values() if steps(fault) & REPLAYED]
    assert replayed
    for fault in replayed:
        honest.known_with(fault)
        assert digest(vars(honest.session.inner)) == honest.digest, fault.id
