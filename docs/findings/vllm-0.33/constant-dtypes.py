import torch
from common import show


def quantise(config, tensors):
    """A constant stored as integers, without a scale."""
    name = "model.layers.0.mlp.experts.1.approx_value"
    tensors[name] = tensors[name].to(torch.int8)


show("olmoe-approx", quantise)
