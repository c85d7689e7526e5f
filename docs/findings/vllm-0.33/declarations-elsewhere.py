from common import show


def restate(config, tensors):
    """The block of another tool, on a checkpoint that still stores every expert."""
    config["mone"] = {
        "version": 1,
        "replacement_type": "constant",
        "experts_by_layer": {"0": [1, 5]},
    }


show("olmoe-approx-plain", restate)
