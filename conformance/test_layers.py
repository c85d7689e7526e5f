"""Single MoE layers, of engines that can build one without a model."""

from mone_ref.suite.cases import Kind

KINDS = (Kind.LAYER,)


def test_layer(case, dtype, judge):
    judge(case, dtype)
