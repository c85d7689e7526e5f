"""Score token ids over ranks: simulated, or one process a rank under ``torchrun``.

    python -m mone_ref.parallel CHECKPOINT --tokens 5,17,3 --tp 2
    torchrun --nproc-per-node 2 -m mone_ref.parallel CHECKPOINT --tokens 5,17,3 --tp 2

Exit code 0 with the answer, 1 when the checkpoint or a change is refused, 2 on wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mone_ref.errors import Rejected, show
from mone_ref.parallel import distributed, model
from mone_ref.parallel.distributed import DistributedModel
from mone_ref.parallel.model import ParallelModel
from mone_ref.parallel.plan import Plan

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    first = os.environ.get("RANK", "0") == "0" if under_torchrun else True
    try:
        with distributed.joined() if under_torchrun else nullcontext():
            answer = score(options, under_torchrun)
            if first:
                tell(answer, options.tokens, options.out)
    except Rejected as rejected:
        return failed(str(rejected), 1, first)
    except (ValueError, OSError, SafetensorError) as error:
        return failed(f"error: {error}", 2, first)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    described = argparse.ArgumentParser(prog="mone_ref.parallel", description=__doc__)
    described.formatter_class = argparse.RawDescriptionHelpFormatter
    described.add_argument("checkpoint", type=Path)
    described.add_argument("--tokens", required=True, type=token_ids, help="ids, as in 5,17,3")
    described.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    described.add_argument("--pp", type=int, default=1, help="stages that share the layers")
    described.add_argument("--dtype", choices=DTYPES, default="float32")
    described.add_argument("--update", type=Path, help="a safetensors file of new constants")
    described.add_argument("--out", type=Path, help="write logprobs [T, V] to a safetensors file")
    return described


def token_ids(text: str) -> list[int]:
    """Ids from ``5,17,3``. Raises ``ArgumentTypeError``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        message = f"found {show(text)}, expected ids such as 5,17,3"
        raise argparse.ArgumentTypeError(message) from error


def score(options: argparse.Namespace, under_torchrun: bool) -> Tensor:
    """Log-probabilities ``[T, V]`` of the tokens, after the update where there is one."""
    plan, dtype = Plan(options.tp, options.pp), getattr(torch, options.dtype)
    loaded: DistributedModel | ParallelModel
    loaded = (distributed if under_torchrun else model).load(options.checkpoint, dtype, plan)
    if options.update:
        loaded.update(load_file(options.update))
    return loaded.score([options.tokens])[0]


def tell(answer: Tensor, tokens: Sequence[int], out: Path | None) -> None:
    """Print the likeliest next token after every token; write all of them where asked."""
    for token, row in zip(tokens, answer, strict=True):
        best = int(row.argmax())
        print(f"after {token}: {best} at {float(row[best]):.6f}")
    if out:
        save_file({"logprobs": answer.contiguous()}, out)


def failed(message: str, code: int, first: bool) -> int:
    """Say why, once for all ranks."""
    if first:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
