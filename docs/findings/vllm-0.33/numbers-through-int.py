from common import show


def disguise(config, tensors):
    """The right list is {"0": [1, 5], "1": [0, 2, 7]}."""
    config["approximate_experts"] = {"00": [True, 5.9], " +1": "027"}


show("olmoe-approx", disguise)
