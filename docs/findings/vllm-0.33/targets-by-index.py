from common import show


def move(config, tensors):
    """The target of decoder layer 1 is renamed to one that the model does not have."""
    block = config["compression_config"]["transform_config"]["expert_substitution"]
    targets = block["targets"]
    targets["mtp.layers.1.mlp.experts"] = targets.pop("model.layers.1.mlp.experts")


show("olmoe-explicit", move)
