"""Answers: of substituted models, of their plain controls, token by token, and rows behind them."""

from mone_ref.suite.cases import Kind

KINDS = (Kind.CONTROL, Kind.OUTPUT, Kind.DECODE, Kind.ROWS)


def test_output(case, dtype, judge):
    judge(case, dtype)
