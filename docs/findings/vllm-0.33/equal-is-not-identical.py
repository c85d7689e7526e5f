from common import show


def loosen(config, tensors):
    """A version and a flag of other JSON types."""
    block = config["compression_config"]["transform_config"]["expert_substitution"]
    block["version"] = True
    block["router_semantics"]["renormalize_after_substitution"] = 0


show("olmoe-explicit", loosen)
