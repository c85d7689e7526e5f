"""Score token ids over ranks: simulated, or one process a rank under ``torchrun``.

    python -m mone_ref.parallel CHECKPOINT --tokens 5,17,3 --tp 2
    torchrun --nproc-per-node 2 -m mone_ref.parallel CHECKPOINT --tokens 5,17,3 --tp 2

Exit code 0 with the answer, 1 when the checkpoint or a change is refused, 2 on wrong usage, 3
when another rank is gone, 74 when standard output cannot be written. torchrun adds a report of
its own and ends with 1 for all but 0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mone_ref import prompt as prompts
from mone_ref import standard_output
from mone_ref.checkpoint.opening import require_regular
from mone_ref.errors import Rejected, reason, show
from mone_ref.parallel import distributed, model
from mone_ref.parallel.distributed import DistributedModel, RankLost
from mone_ref.parallel.model import ParallelModel
from mone_ref.parallel.plan import Plan
from mone_ref.prompt import Prompt, PromptError

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    first = os.environ.get("RANK", "0") == "0" if under_torchrun else True
    try:
        prompt = prompts.read(options.tokens, None)
        with distributed.joined() if under_torchrun else nullcontext():
            answer = score(options, prompt, under_torchrun)
        if first:
            tell(answer, prompt.ids, options.out)
    except (Rejected, PromptError) as error:
        return failed(str(error), 1 if isinstance(error, Rejected) else 2, first)
    except ValueError as error:
        return failed(f"error: {error}", 2, first)
    except RankLost as error:  # the first rank may be the one that is gone
        return failed(f"error: {error}", 3, True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    described = argparse.ArgumentParser(prog="mone_ref.parallel", description=__doc__)
    described.formatter_class = argparse.RawDescriptionHelpFormatter
    described.add_argument("checkpoint", type=Path)
    described.add_argument("--tokens", required=True, help="ids, as in 5,17,3")
    described.add_argument("--tp", type=ranks, default=1, help="ranks that share every layer")
    described.add_argument("--pp", type=ranks, default=1, help="stages that share the layers")
    described.add_argument("--dtype", choices=DTYPES, default="float32")
    described.add_argument("--update", type=Path, help="a safetensors file of new constants")
    described.add_argument("--out", type=Path, help="write logprobs [T, V] to a safetensors file")
    return described


def ranks(text: str) -> int:
    """A number of ranks or stages. Raises ``ArgumentTypeError``."""
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"found {show(text)}, expected a number from 1")
    return int(text)


def score(options: argparse.Namespace, prompt: Prompt, under_torchrun: bool) -> Tensor:
    """Log-probabilities ``[T, V]`` of the tokens, after the update where there is one."""
    plan, dtype = Plan(options.tp, options.pp), getattr(torch, options.dtype)
    loaded: DistributedModel | ParallelModel
    loaded = (distributed if under_torchrun else model).load(options.checkpoint, dtype, plan)
    prompts.check(prompt, loaded.config.model)
    if options.update:
        loaded.update(new_constants(options.update))
    return loaded.score([prompt.ids])[0]


def new_constants(file: Path) -> dict[str, Tensor]:
    """The tensors of an update. Raises ``ValueError``."""
    try:
        require_regular(file)
        return load_file(file)
    except (OSError, SafetensorError) as error:
        told = f"--update {show(str(file))}: found {reason(error)}, expected a safetensors file"
        raise ValueError(told) from error


def tell(answer: Tensor, tokens: Sequence[int], out: Path | None) -> None:
    """Write the answer where asked; print the likeliest next token after every token.

    Raises ``ValueError`` where it cannot be written.
    """
    if out:
        try:
            save_file({"logprobs": answer.contiguous()}, out)
        except (OSError, SafetensorError) as error:
            told = f"--out {show(str(out))}: found {error}, expected a file that can be written"
            raise ValueError(told) from error
    for token, row in zip(tokens, answer, strict=True):
        best = int(row.argmax())
        print(f"after {token}: {best} at {float(row[best]):.6f}")


def failed(message: str, code: int, first: bool) -> int:
    """Say why, once for all ranks."""
    if first:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    with standard_output.watched():
        sys.exit(main())
