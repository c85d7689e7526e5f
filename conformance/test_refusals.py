"""Refusals: broken checkpoints and unsupported configurations, each beside a twin that loads."""

from mone_ref.suite.cases import Kind

KINDS = (Kind.REFUSAL,)


def test_refusal(case, dtype, judge):
    judge(case, dtype)
