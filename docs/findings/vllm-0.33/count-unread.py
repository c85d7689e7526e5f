from common import show


def miscount(config, tensors):
    """The model has 8 experts."""
    block = config["compression_config"]["transform_config"]["expert_substitution"]
    for target in block["targets"].values():
        target["num_logical_experts"] = 99


show("olmoe-explicit", miscount)
