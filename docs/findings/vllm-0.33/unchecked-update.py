import torch
from common import FIXTURES, answers, compared, engine


def update(model):
    """A constant of NaN."""
    name = "model.layers.1.mlp.experts.2.approx_value"
    model.load_weights([(name, torch.full((96,), float("nan")))])


llm = engine(FIXTURES / "olmoe-approx" / "checkpoint")
before = answers(llm)
llm.apply_model(update)
print(f"accepted: {compared(answers(llm), before)}")
llm.llm_engine.engine_core.shutdown()
