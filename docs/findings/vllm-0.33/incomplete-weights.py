from common import show


def drop(config, tensors):
    """Expert 4 of layer 1 is retained, and one of its projections is not stored."""
    del tensors["model.layers.1.mlp.experts.4.down_proj.weight"]


show("olmoe-approx", drop)
