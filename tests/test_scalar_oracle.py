"""The scalar oracle against transformers in float32, and every golden against the scalar oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import scalar_oracle
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
FIXTURES = sorted(path.parent for path in ROOT.glob("fixtures/*/recipe.yaml"))
FLOAT32, FLOAT64 = 2.0**-24, 2.0**-53  # unit roundoffs


def roundings(config: Mapping[str, Any], tokens: int) -> int:
    """Roundings on the longest path from an embedding to a log-probability.

    A sum of n products counts n, a norm of n elements n + 4 (sum, mean, root, two
    products), a softmax of n scores n + 3. Router and expert meet in one product, so
    both of their paths count.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    norm, columns = hidden + 4, heads * head_dim
    projections = hidden + 1 + (columns + 4)
    if "kv_lora_rank" in config:  # down, the norm of the latent, and up again
        rank = max(config["kv_lora_rank"], config["q_lora_rank"] or 0)
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        projections, columns = hidden + (rank + 4) + rank, heads * config["v_head_dim"]
    rope_and_scores = 4 + head_dim + 1
    attention = norm + projections + rope_and_scores + (tokens + 3) + tokens
    attention += columns + 1
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(config[key] for key in keys if key in config)
    top_k = config["num_experts_per_tok"]
    router = hidden + (experts + 3) + 1 + top_k + 1 + 1  # the correction, and the factor
    sizes = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    widest = max(config.get(key) or 0 for key in sizes) * max(
        1, config.get("n_shared_experts") or 0
    )
    expert = hidden + 5 + widest
    combine = 1 + top_k + 1 + 2  # shared experts, and their gate
    layer = attention + norm + router + expert + combine
    return config["num_hidden_layers"] * layer + norm + hidden + config["vocab_size"] + 3


def roundoff(directory: Path, expected: torch.Tensor, unit: float) -> float:
    """How far two computations of ``expected`` ``[T, V]`` may be apart.

    First-order count: each rounding on the path moves its tensor by at most ``unit``
    relative to its size, and a pre-norm stack passes a relative change on at about the
    same size, so the output moves by at most ``roundings * unit`` of the largest
    log-probability. Real roundings partly cancel and grow as the root of their number;
    that slack pays for the places where softmax or a norm amplifies.
    """
    config = scalar_oracle.read_config(directory)
    return roundings(config, len(expected)) * unit * expected.abs().max().item()


def scalar(directory: Path, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T, V]`` of the scalar oracle."""
    return torch.tensor(scalar_oracle.log_probabilities(directory, prompt), dtype=torch.float64)


# Against transformers


PROMPT = [3, 17, 5, 30, 11, 0, 8, 25]
BASE = {
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
OWN = {  # grouped_mm wants rows of a multiple of 16 bytes: intermediate sizes of 4 n
    "olmoe": {"num_experts": 6, "intermediate_size": 12},
    "qwen3_moe": {
        "num_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20, "head_dim": 10
    },
    "mixtral": {"num_local_experts": 6, "intermediate_size": 12},
    "qwen2_moe": {
        "num_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20,
        "shared_expert_intermediate_size": 16,
    },
    "glm4_moe": {
        "n_routed_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20,
        "head_dim": 12, "num_hidden_layers": 3, "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {
        "n_routed_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20,
        "routed_scaling_factor": 2.0, "q_lora_rank": None, **LATENT,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 12, "intermediate_size": 20,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
        "q_lora_rank": 10, **LATENT,
    },
    "minimax_m2": {"num_local_experts": 6, "intermediate_size": 12, "head_dim": 12},
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped-heads": ("olmoe", {}),
    "normalised": ("olmoe", {"norm_topk_prob": True}),
    "tied": ("olmoe", {"tie_word_embeddings": True}),
    "every-head": (
        "olmoe",
        {"num_key_value_heads": 3, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "clipped": ("olmoe", {"clip_qkv": 0.5, "num_experts_per_tok": 3}),
    "qwen3": ("qwen3_moe", {}),
    "qwen3-normalised": ("qwen3_moe", {"norm_topk_prob": True, "num_key_value_heads": 3}),
    "qwen3-dense": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-step": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-oblong": ("mixtral", {"head_dim": 12, "num_key_value_heads": 3}),
    "mixtral-every-expert": ("mixtral", {"num_experts_per_tok": 6}),
    "mixtral-top-1": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen2": ("qwen2_moe", {}),
    "qwen2-dense": ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [0]}),
    "glm4": ("glm4_moe", {}),
    "glm4-norms-and-biases": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_group": 3, "topk_group": 2},
    ),
    "deepseek2": ("deepseek_v2", {}),
    "deepseek2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "q_lora_rank": 10,
            "rope_parameters": YARN,
        },
    ),
    "deepseek3": ("deepseek_v3", {}),
    "deepseek3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "norm_topk_prob": False, "rope_parameters": YARN},
    ),
    "minimax": ("minimax_m2", {}),
    "minimax-partial": ("minimax_m2", {"rotary_dim": 6}),
}
# One wrong reading of the config each: the bound must tell it from roundoff.
MISREADINGS: list[tuple[str, str, Any]] = [
    ("olmoe", "norm_topk_prob", True),
    ("olmoe", "num_experts_per_tok", 3),
    ("olmoe", "rms_norm_eps", 1e-2),
    ("olmoe", "rope_theta", 100.0),
    ("olmoe", "clip_qkv", 0.5),
    ("olmoe", "tie_word_embeddings", True),
    ("qwen3_moe", "norm_topk_prob", True),
    ("qwen3_moe", "rms_norm_eps", 1e-2),
    ("mixtral", "num_experts_per_tok", 3),
    ("mixtral", "rope_theta", 100.0),
    ("qwen2_moe", "norm_topk_prob", True),
    ("glm4_moe", "routed_scaling_factor", 1.0),
    ("glm4_moe", "partial_rotary_factor", 1.0),
    ("deepseek_v2", "routed_scaling_factor", 1.0),
    ("deepseek_v3", "topk_group", 1),
    ("deepseek_v3", "rope_interleave", False),
    ("minimax_m2", "rotary_dim", 6),
]


def plain_model(directory: Path, changes: Mapping[str, Any], kind: str = "olmoe"):
    """A tiny model that transformers saved, with weights loud enough for every part to count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = deepcopy({**BASE, **OWN[kind], **changes})  # transformers writes into them
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    numbers = random.Random(7)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            bias = name.endswith("bias")
            centre, spread = (1.0, 0.2) if parameter.dim() == 1 and not bias else (0.0, 0.3)
            values = [numbers.gauss(centre, spread) for _ in range(parameter.numel())]
            parameter.copy_(torch.tensor(values).view_as(parameter))
    model.save_pretrained(directory, save_original_format=True)
    return model


def transformers_log_probabilities(model, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_transformers(tmp_path: Path, shape: str):
    kind, changes = SHAPES[shape]
    model = plain_model(tmp_path, changes, kind)
    expected = transformers_log_probabilities(model, PROMPT)
    difference = (scalar(tmp_path, PROMPT) - expected).abs().max().item()
    assert difference <= roundoff(tmp_path, expected, FLOAT32)


@pytest.mark.parametrize(("kind", "key", "value"), MISREADINGS)
def test_the_bound_tells_a_misreading_from_roundoff(
    tmp_path: Path, kind: str, key: str, value: Any
):
    model = plain_model(tmp_path, {}, kind)
    expected = transformers_log_probabilities(model, PROMPT)
    config = json.loads((tmp_path / "config.json").read_text())
    for holder in (config, config["rope_parameters"]):
        if key in holder or holder is config:
            holder[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    difference = (scalar(tmp_path, PROMPT) - expected).abs().max().item()
    assert difference > roundoff(tmp_path, expected, FLOAT32)


@pytest.mark.parametrize("kind", OWN)
def test_agrees_with_transformers_on_substituted_experts(tmp_path: Path, kind: str):
    """transformers, its substituted experts silenced and their constants added by a hook."""
    model = plain_model(tmp_path, {}, kind)
    block = scalar_oracle.ARCHITECTURES[kind].block
    first = 0 if hasattr(model.model.layers[0].mlp, "experts") else 1
    substituted = {first: [4, 1], first + 1: [0, 2, 5]}  # unsorted, as a config may list them
    stored = load_checkpoint(tmp_path)
    numbers = random.Random(11)
    for layer, ids in substituted.items():
        experts = model.model.layers[layer].mlp.experts
        constants = torch.zeros(8, BASE["hidden_size"])  # [E, H], or more
        for expert in ids:
            constants[expert] = torch.tensor([numbers.gauss(0, 1) for _ in constants[expert]])
            experts.down_proj.data[expert].zero_()
            substitute(stored, f"model.layers.{layer}.{block}.experts.{expert}", constants[expert])
        experts.register_forward_hook(adding(constants))
    save_checkpoint(tmp_path, stored, substituted)

    expected = transformers_log_probabilities(model, PROMPT)
    difference = (scalar(tmp_path, PROMPT) - expected).abs().max().item()
    assert difference <= roundoff(tmp_path, expected, FLOAT32)


def adding(constants: torch.Tensor):
    """Forward hook of an experts module: its output plus ``w * constants[id]`` per route."""

    def hook(module, arguments, output):
        _, ids, weights = arguments  # [T, K]
        return output + (weights[..., None] * constants[ids]).sum(1)

    return hook


def load_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def substitute(stored: dict[str, torch.Tensor], expert: str, constant: torch.Tensor) -> None:
    for name in [name for name in stored if name.startswith(f"{expert}.")]:
        del stored[name]
    stored[f"{expert}.approx_value"] = constant.clone()


def save_checkpoint(
    directory: Path, stored: dict[str, torch.Tensor], substituted: Mapping[int, list[int]]
) -> None:
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["approximate_experts"] = {str(layer): ids for layer, ids in substituted.items()}
    (directory / "config.json").write_text(json.dumps(config))


# Reading checkpoints


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        # ordinary, negative, the largest number and the smallest subnormal of each type
        (torch.bfloat16, [1.5, -0.0078125, 2.0**127 * (2 - 2.0**-7), 2.0**-133]),
        (torch.float16, [1.5, -0.0078125, 65504.0, 2.0**-24]),
        (torch.float32, [1.5, -0.1015625, 2.0**127 * (2 - 2.0**-23), 2.0**-149]),
        (torch.float64, [0.1, -1 / 3, 2.0**1023 * (2 - 2.0**-52), 2.0**-1074]),
    ],
    ids=str,
)
def test_reads_every_stored_type_exactly(tmp_path: Path, dtype: torch.dtype, values: list[float]):
    stored = torch.tensor(values, dtype=torch.float64).to(dtype)
    table = stored.reshape(2, 2).clone()
    save_file({"row": stored, "table": table}, tmp_path / "model.safetensors")
    tensors = scalar_oracle.read_weights(tmp_path)
    assert tensors == {"row": values, "table": [values[:2], values[2:]]}


def test_reads_the_shards_of_an_index(tmp_path: Path):
    for number in (1, 2):
        save_file({f"t{number}": torch.tensor([float(number)])}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {"t1": "1.safetensors", "t2": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert scalar_oracle.read_weights(tmp_path) == {"t1": [1.0], "t2": [2.0]}


def test_reads_shards_without_an_index(tmp_path: Path):
    for number in (1, 2):
        save_file({f"t{number}": torch.tensor([float(number)])}, tmp_path / f"{number}.safetensors")
    assert scalar_oracle.read_weights(tmp_path) == {"t1": [1.0], "t2": [2.0]}


def test_reads_the_names_of_constants_in_both_forms():
    approx = {"model_type": "olmoe", "approximate_experts": {"0": None, "12": [5, 1]}}
    path = "model.layers.12.mlp.experts"
    derived = {5: f"{path}.5.approx_value", 1: f"{path}.1.approx_value"}
    assert scalar_oracle.constant_names(approx) == {0: {}, 12: derived}
    replacements = {str(j): {"tensors": {"value": name}} for j, name in ((5, "a"), (1, "a"))}
    block = {"targets": {path: {"replacements": replacements}}}
    explicit = {"compression_config": {"transform_config": {"expert_substitution": block}}}
    assert scalar_oracle.constant_names(explicit) == {12: {5: "a", 1: "a"}}
    assert scalar_oracle.constant_names({"model_type": "mixtral"}) == {}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"hidden_act": "gelu"},
        {"sliding_window": 4096},
        {"attention_bias": True},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
    ],
    ids=lambda config: next(iter(config)),
)
def test_refuses_what_it_does_not_compute(tmp_path: Path, config: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe"} | config))
    with pytest.raises(ValueError, match="not computed here"):
        scalar_oracle.read_config(tmp_path)


# Against the goldens


def test_there_are_fixtures():
    assert FIXTURES


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)
def test_agrees_with_the_golden(fixture: Path):
    golden = load_file(fixture / "golden.safetensors")
    prompts = sum(name.endswith(".ids") for name in golden)
    assert prompts
    for number in range(prompts):
        expected = torch.from_numpy(golden[f"prompt.{number}.logprobs"])
        actual = scalar(fixture / "checkpoint", golden[f"prompt.{number}.ids"].tolist())
        difference = (actual - expected).abs().max().item()
        assert difference <= roundoff(fixture / "checkpoint", expected, FLOAT64)
