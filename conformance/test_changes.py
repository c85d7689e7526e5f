"""Changes of a loaded model: updates that are right, and changes that must leave it as it was."""

from mone_ref.suite.cases import Kind

KINDS = (Kind.UPDATE, Kind.UPDATE_REFUSAL, Kind.RELOAD_REFUSAL)


def test_change(case, dtype, judge):
    judge(case, dtype)
