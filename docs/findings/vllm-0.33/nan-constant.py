from common import show


def poison(config, tensors):
    """The constant is stored, and one of its elements is NaN."""
    tensors["model.layers.0.mlp.experts.5.approx_value"][3] = float("nan")


show("olmoe-approx", poison)
