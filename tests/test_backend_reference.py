"""The reference as an engine: what it refuses by name."""

from pathlib import Path

import pytest

from mone_ref.backend import FEATURES, LoadOptions, Refused
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.errors import Phase


@pytest.mark.parametrize("asked", [{"lora"}, {"lora", "eplb", "expert_parallel"}, set(FEATURES)])
def test_one_message_has_every_reason_and_nothing_is_read_before(asked):
    nowhere = Path("no such checkpoint")
    with pytest.raises(Refused) as raised:
        ReferenceBackend().load(nowhere, LoadOptions(features=frozenset(asked)))
    assert raised.value.phase is Phase.INIT
    (message,) = raised.value.evidence
    named = message.partition(": ")[2].split(", ")
    assert named == sorted(asked)
