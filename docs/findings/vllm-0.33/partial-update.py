import torch
from common import FIXTURES, answers, compared, engine

NAME = "model.layers.1.mlp.experts.{}.approx_value"


def update(model):
    """A good constant, then one with a shape that is refused."""
    model.load_weights([(NAME.format(2), torch.ones(96)), (NAME.format(7), torch.ones(1, 96))])


llm = engine(FIXTURES / "olmoe-approx" / "checkpoint")
before = answers(llm)
try:
    llm.apply_model(update)
except ValueError as error:
    print(f"refused: {error}")
print(f"afterwards: {compared(answers(llm), before)}")
llm.llm_engine.engine_core.shutdown()
