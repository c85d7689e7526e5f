import torch
from common import FIXTURES, answers, compared, engine

NAME = "model.layers.{}.mlp.experts.{}.approx_value"
GOOD = {NAME.format(0, 1): torch.ones(96)}
BAD = {NAME.format(1, 2): torch.ones(1, 96)}


def update(model):
    """A good constant of the first stage, and one of the second whose shape is refused."""
    model.load_weights((GOOD | BAD).items())


if __name__ == "__main__":  # the processes of the stages import this file
    llm = engine(FIXTURES / "olmoe-approx" / "checkpoint", stages=2)
    before = answers(llm)
    try:
        llm.apply_model(update)
    except RuntimeError as error:
        print(f"refused: {error}")
    print(f"afterwards: {compared(answers(llm), before)}")
    llm.llm_engine.engine_core.shutdown()
