from common import show


def add(config, tensors):
    """The model has layers 0 and 1."""
    config["approximate_experts"]["9"] = [0, 3]


show("olmoe-approx", add)
