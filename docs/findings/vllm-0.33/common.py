"""What the scripts beside this one share: plain vLLM on an edited copy of a small checkpoint.

Run them from the root of mone-ref. Memory that torch hands out without a value reads as NaN, so
that weights which were never loaded show.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

FIXTURES = Path("fixtures")
PROMPT = [token % 20 for token in range(32)]
WORK = tempfile.TemporaryDirectory()
torch.use_deterministic_algorithms(True, warn_only=True)

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def edited(fixture: str, change: Change) -> Path:
    """A copy of a checkpoint after ``change(config, tensors)``."""
    copy = Path(tempfile.mkdtemp(dir=WORK.name))
    shutil.copytree(FIXTURES / fixture / "checkpoint", copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    tensors = load_file(copy / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def engine(checkpoint: Path, dtype: str = "float32", stages: int = 1) -> LLM:
    """vLLM on a checkpoint directory, one process a pipeline stage where there are several."""
    llm = LLM(
        model=str(checkpoint),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_logprobs=-1,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=False,
        compilation_config={"custom_ops": ["none"]},
        pipeline_parallel_size=stages,
    )
    if stages > 1 and not torch.cuda.is_available():
        llm.collective_rpc(make_receive_buffers)
    return llm


def make_receive_buffers(worker: Any) -> None:
    """What a stage receives into: eager mode on a CPU skips the run that allocates it."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )


def answers(llm: LLM) -> Tensor:
    """Log-probabilities of the whole vocabulary at each position of the prompt."""
    every = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], every, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def answers_of(checkpoint: Path, dtype: str = "float32") -> Tensor:
    """The same of a checkpoint directory, whose engine is shut down again."""
    try:
        llm = engine(checkpoint, dtype)
        found = answers(llm)
        llm.llm_engine.engine_core.shutdown()
        del llm
        return found
    finally:
        cleanup_dist_env_and_memory()


@cache
def right(fixture: str, dtype: str = "float32") -> Tensor:
    """Answers of the checkpoint as it is."""
    return answers_of(FIXTURES / fixture / "checkpoint", dtype)


def compared(found: Tensor, expected: Tensor) -> str:
    """One line about answers."""
    if count := int(found.isnan().sum()):
        return f"{count} of {found.numel()} values are NaN"
    if torch.equal(found, expected):
        return "the same answers"
    return f"answers differ by up to {(found - expected).abs().max():.1f} nats"


def show(fixture: str, change: Change, dtype: str = "float32") -> None:
    """Load an edited checkpoint and print what vLLM makes of it, against the unedited one."""
    expected = right(fixture, dtype)
    try:
        found = answers_of(edited(fixture, change), dtype)
    except Exception as error:
        print(f"refused with {type(error).__name__}: {error}")
    else:
        print(f"accepted: {compared(found, expected)}")
