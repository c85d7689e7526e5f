import torch
from common import show

EXPERTS = "model.layers.1.mlp.experts"


def fuse(config, tensors):
    """The five retained experts of layer 1 in the layout of transformers 5."""
    stacked = {
        kind: torch.stack(
            [tensors.pop(f"{EXPERTS}.{e}.{kind}_proj.weight") for e in (1, 3, 4, 5, 6)]
        )
        for kind in ("gate", "up", "down")
    }
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
    tensors[f"{EXPERTS}.down_proj"] = stacked["down"]


show("olmoe-approx", fuse)
