from types import SimpleNamespace

import common
import torch
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.model_loader.utils import process_weights_after_loading

hf_config = SimpleNamespace(model_type="olmoe", approximate_experts={"3": [1, 3]})
config = VllmConfig(
    device_config=DeviceConfig("cpu"),
    compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
)
config.model_config = SimpleNamespace(
    hf_config=hf_config,
    hf_text_config=hf_config,
    dtype=torch.float32,
    enforce_eager=True,
    is_moe=True,
    quantization=None,
    word_embeddings_untied_by_checkpoint=False,
)
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{common.WORK.name}/store", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    layer = FusedMoEFactory(
        num_experts=4,
        top_k=2,
        hidden_size=32,
        intermediate_size=32,
        params_dtype=torch.float32,
        renormalize=False,
        prefix="model.layers.3.mlp.experts",
    )
    experts = layer.routed_experts
    for expert in (1, 3):
        constants = experts.expert_substitution
        constants.weight_loader(constants.values, torch.ones(32), expert)
    wide = torch.full((32, 32), 2.0**63)
    list(
        layer.load_weights(
            (f"{expert}.{name}_proj.weight", wide if expert == 0 else wide * 0)
            for expert in (0, 2)
            for name in ("gate", "up", "down")
        )
    )
    process_weights_after_loading(layer, config.model_config, torch.device("cpu"))

# Both routes of the one token go to substituted experts; expert 0 is never chosen.
with (
    torch.inference_mode(),
    set_current_vllm_config(config),
    set_forward_context(None, config, num_tokens=1),
):
    experts._ensure_moe_quant_config_init()
    output = experts.forward_modular(
        x=torch.ones(1, 32),
        topk_weights=torch.tensor([[0.5, 0.25]]),
        topk_ids=torch.tensor([[1, 3]], dtype=torch.int32),
    )
print(f"expected 0.75, found {output[0, 0].item()}")
common.cleanup_dist_env_and_memory()
