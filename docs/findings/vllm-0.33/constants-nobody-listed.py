import torch
from common import show


def second(config, tensors):
    """Expert 2 of layer 1 has a declared constant; this is another under the derived name."""
    name = "model.layers.1.mlp.experts.2.approx_value"
    tensors[name] = torch.full((96,), 4.0, dtype=torch.bfloat16)


show("olmoe-explicit", second)
