from common import show


def poison(config, tensors):
    """One infinite element in the constant of expert 5 of layer 0."""
    tensors["model.layers.0.mlp.experts.5.approx_value"][3] = float("inf")


def overflow(config, tensors):
    """Finite as stored, infinite once cast to float16."""
    name = "model.layers.0.mlp.experts.5.approx_value"
    tensors[name] = tensors[name].float()
    tensors[name][3] = 1e5


show("olmoe-approx", poison)
show("olmoe-approx", overflow, dtype="float16")
