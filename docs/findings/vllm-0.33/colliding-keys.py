from common import show


def collide(config, tensors):
    """Two lists for layer 1: the first one is lost."""
    config["approximate_experts"] = {"0": [1, 5], "1": [3, 4], "01": [0, 2, 7]}


show("olmoe-approx", collide)
