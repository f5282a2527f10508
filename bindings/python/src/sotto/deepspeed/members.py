"""The public members of DeepSpeed's engine, one by one, and what each of them is here.

Every name that DeepSpeed 0.18.9's engine has stands in exactly one of the tables below, or is an
attribute of Engine. What is refused says what to do in its place; it is never an AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from ..errors import UnsupportedError
from .sections import check_keys

# Methods that return a value of the configuration: path of the key, DeepSpeed's default.
FROM_FILE: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "checkpoint_serialization_enabled": ("checkpoint.serialization", True),
        "dataloader_drop_last": ("dataloader_drop_last", False),
        "dump_state": ("dump_state", False),
        "fp16_auto_cast": ("fp16.auto_cast", False),
        "gradient_clipping": ("gradient_clipping", 0.0),
        "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
        "memory_breakdown": ("memory_breakdown", False),
        "steps_per_print": ("steps_per_print", None),
        "torch_autocast_enabled": ("torch_autocast.enabled", False),
        "wall_clock_breakdown": ("wall_clock_breakdown", False),
        "zero_allgather_bucket_size": ("zero_optimization.allgather_bucket_size", 500000000),
        "zero_allgather_partitions": ("zero_optimization.allgather_partitions", True),
        "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
        "zero_contiguous_gradients": ("zero_optimization.contiguous_gradients", True),
        "zero_elastic_checkpoint": ("zero_optimization.elastic_checkpoint", False),
        "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
        "zero_grad_hooks": ("zero_optimization.grad_hooks", True),
        "zero_ignore_unused_parameters": ("zero_optimization.ignore_unused_parameters", True),
        "zero_legacy_stage1": ("zero_optimization.legacy_stage1", False),
        "zero_load_from_fp32_weights": ("zero_optimization.load_from_fp32_weights", True),
        "zero_log_trace_cache_warnings": ("zero_optimization.log_trace_cache_warnings", False),
        "zero_max_live_parameters": ("zero_optimization.max_live_parameters", 1000000000),
        "zero_max_reuse_distance": ("zero_optimization.max_reuse_distance", 1000000000),
        "zero_model_persistence_threshold": (
            "zero_optimization.model_persistence_threshold",
            9223372036854775807,
        ),
        "zero_module_granularity_threshold": (
            "zero_optimization.stage3_module_granularity_threshold",
            0,
        ),
        "zero_multi_rank_bucket_allreduce": (
            "zero_optimization.use_multi_rank_bucket_allreduce",
            True,
        ),
        "zero_overlap_comm": ("zero_optimization.overlap_comm", False),
        "zero_param_persistence_threshold": (
            "zero_optimization.param_persistence_threshold",
            100000,
        ),
        "zero_prefetch_bucket_size": ("zero_optimization.prefetch_bucket_size", 50000000),
        "zero_reduce_bucket_size": ("zero_optimization.reduce_bucket_size", 500000000),
        "zero_reduce_scatter": ("zero_optimization.reduce_scatter", True),
        "zero_round_robin_gradients": ("zero_optimization.round_robin_gradients", False),
        "zero_sub_group_size": ("zero_optimization.sub_group_size", 1000000000),
    }
)
# Methods that return what holds for every engine here: stage 0, and none of DeepSpeed's additions.
CONSTANT: Mapping[str, Any] = MappingProxyType(
    {
        "amp_enabled": False,
        "amp_params": None,
        "autotp_size": 0,
        "autotuning_enabled": False,
        "autotuning_profile_model_info": False,
        "bf16_master_weights_and_gradients": False,
        "bf16_optimizer_states": False,
        "checkpoint_tag_validation_enabled": True,
        "checkpoint_tag_validation_fail": True,
        "checkpoint_writer_enabled": False,
        "compile_autosp": False,
        "compile_zero_optimization_stage": False,
        "curriculum_enabled_legacy": False,
        "curriculum_learning_enabled": False,
        "data_efficiency_enabled": False,
        "data_sampling_enabled": False,
        "eigenvalue_enabled": False,
        "elasticity_enabled": False,
        "flops_profiler_enabled": False,
        "fp16_master_weights_and_gradients": False,
        "get_model_parallel_rank": 0,
        "get_pld_theta": None,
        "get_sequence_parallel_group": None,
        "get_tensor_parallel_rank": 0,
        "graph_harvesting": False,
        "is_deepcompile_active": False,
        "is_deepcompile_enabled": False,
        "is_elastic_model_parallel_supported": False,
        "is_first_weights_partition_group": False,
        "is_sanity_checks_enabled": False,
        "load_universal_checkpoint": False,
        "mics_shard_size": -1,
        "optimizer_legacy_fusion": False,
        "pld_enabled": False,
        "random_ltd_enabled": False,
        "sparse_gradients_enabled": False,
        "super_offload": False,
        "use_node_local_storage": False,
        "zero_allgather_sequential": False,
        "zero_cpu_offload": False,
        "zero_gather_16bit_weights_on_model_save": False,
        "zero_hpz_partition_size": 1,
        "zero_nvme_offload_optimizer": False,
        "zero_offload_optimizer": None,
        "zero_offload_param": None,
        "zero_optimization": False,
        "zero_optimization_partition_gradients": False,
        "zero_optimization_partition_weights": False,
        "zero_optimization_stage": 0,
        "zero_partial_offload": 1.0,
        "zero_quantized_gradients": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_weights": False,
        "zero_save_muon_momentum_buffer_in_memory": False,
        "zero_use_cpu_optimizer": False,
    }
)
# Attributes that are the same for every engine here.
ATTRIBUTES: Mapping[str, Any] = MappingProxyType(
    {
        "all_to_all_group": None,
        "block_eigenvalue": None,
        "eigenvalue": None,
        "enable_backward_allreduce": False,  # step() averages
        "gradient_average": True,
        "has_moe_layers": False,
        "local_all_to_all_group": None,
        "losses": None,
        "mesh_device": None,
        "mp_world_size": 1,
        "optimized_linear_base_weight_sharding": False,
        "optimized_linear_lora_enabled": False,
        "pipeline_parallelism": False,
        "progressive_layer_drop": None,
        "quantizer": None,
        "save_zero_checkpoint": False,
        "seq_parallel_group": None,
        "sequence_parallel_size": 1,
        "torch_autocast_z0_gradscaler": None,
        "use_ds_comm": False,
        "warn_unscaled_loss": True,
    }
)
_ZERO = "parameters and state are whole on every rank: there is nothing of ZeRO to ask for"
_AVERAGE = "step() averages the gradients; use deepspeed.comm for other tensors"
_CURRICULUM = "give training_data in the order that is wanted, or a data_sampler to deepspeed_io()"
_PROFILE = "use torch.profiler around the steps, and optimizer.report() for bytes and times"
_PLD = "drop layers in the model's forward()"
_COMPRESSION = (
    "weights are neither quantized nor pruned during training; use torch.ao.quantization or "
    "torch.nn.utils.prune"
)
_EXPERTS = (
    "mixtures of experts are averaged over other ranks than the rest; keep DeepSpeed for them"
)
_AUTOTUNING = "give train_micro_batch_size_per_gpu in the configuration"
_OFFLOAD = "optimizer state stays where the parameters are"
_COMPILE = "use engine.compile(), which is torch.compile"
# Methods that raise UnsupportedError with this hint when they are called.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "aio_config": _OFFLOAD,
        "all_gather_scalar": _AVERAGE,
        "allreduce_and_copy": _AVERAGE,
        "allreduce_bucket": _AVERAGE,
        "allreduce_no_retain": _AVERAGE,
        "autotuning_end_profile_step": _AUTOTUNING,
        "autotuning_metric": _AUTOTUNING,
        "autotuning_metric_path": _AUTOTUNING,
        "autotuning_model_info_path": _AUTOTUNING,
        "autotuning_start_profile_step": _AUTOTUNING,
        "buffered_allreduce_fallback": _AVERAGE,
        "clip_fp32_gradients": "step() clips the averaged gradient: set gradient_clipping",
        "cpuadam_cores_perc": _OFFLOAD,
        "curriculum_learning_config": _CURRICULUM,
        "curriculum_params_legacy": _CURRICULUM,
        "data_efficiency_config": _CURRICULUM,
        "data_sampling_config": _CURRICULUM,
        "eigenvalue_gas_boundary_resolution": _COMPRESSION,
        "eigenvalue_layer_name": _COMPRESSION,
        "eigenvalue_layer_num": _COMPRESSION,
        "eigenvalue_max_iter": _COMPRESSION,
        "eigenvalue_stability": _COMPRESSION,
        "eigenvalue_tol": _COMPRESSION,
        "eigenvalue_verbose": _COMPRESSION,
        "flops_profiler_detailed": _PROFILE,
        "flops_profiler_module_depth": _PROFILE,
        "flops_profiler_output_file": _PROFILE,
        "flops_profiler_profile_step": _PROFILE,
        "flops_profiler_recompute_fwd_factor": _PROFILE,
        "flops_profiler_top_modules": _PROFILE,
        "get_autosp_backend": _COMPILE,
        "get_deepcompile_backend": _COMPILE,
        "get_deepspeed_compile_backend": _COMPILE,
        "load_moe_state_dict": _EXPERTS,
        "offload_states": _OFFLOAD,
        "pld_gamma": _PLD,
        "pld_params": _PLD,
        "pld_theta": _PLD,
        "print_forward_breakdown": _EXPERTS,
        "quantize_training": _COMPRESSION,
        "random_ltd_config": _CURRICULUM,
        "random_ltd_initialize": _CURRICULUM,
        "register_compile_pass": _COMPILE,
        "reload_states": _OFFLOAD,
        "set_custom_curriculum_learning_schedule": _CURRICULUM,
        "sparse_all_gather": _AVERAGE,
        "sparse_allreduce": _AVERAGE,
        "sparse_allreduce_bucket": _AVERAGE,
        "sparse_allreduce_no_retain": _AVERAGE,
        "swap_tensor_config": _OFFLOAD,
        "tensor_parallel_config": "pass mpu= or comm= of the data-parallel ranks of each shard",
        "torch_autocast_lower_precision_safe_modules": "torch.autocast chooses among operations",
        "train_batch": "this engine runs no pipeline: call forward, backward and step",
        "eval_batch": "this engine runs no pipeline: call engine.eval() and the engine",
        "zenflow_config": _OFFLOAD,
        "zeropp_loco_param": _ZERO,
    }
)
# Attributes that raise UnsupportedError with this hint when they are read.
REFUSED_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "autotuning_model_info": _AUTOTUNING,
        "backward_inner_timers": _PROFILE,
        "backward_reduce_timers": _PROFILE,
        "backward_timers": _PROFILE,
        "checkpoint_engine": "use save_checkpoint() and load_checkpoint()",
        "compression_scheduler": _COMPRESSION,
        "curriculum_scheduler_legacy": _CURRICULUM,
        "dont_change_device": "move the model before initialize()",
        "expert_data_parallel_group": _EXPERTS,
        "expert_parallel_group": _EXPERTS,
        "first_dataloader_check": "all data-parallel ranks read data of their own",
        "flatten": "use torch.nn.utils.parameters_to_vector",
        "flops": _PROFILE,
        "flops_profiler": _PROFILE,
        "forward_timers": _PROFILE,
        "fwd_duration": _PROFILE,
        "global_timers": _PROFILE,
        "micro_timers": _PROFILE,
        "module_forward_post_hook": "use engine.module.register_forward_hook()",
        "module_forward_pre_hook": "use engine.module.register_forward_pre_hook()",
        "random_ltd_scheduler": _CURRICULUM,
        "step_timers": _PROFILE,
        "unflatten": "use torch.nn.utils.vector_to_parameters",
    }
)
# Sections that change what is trained where all of their switches are on, which this engine does
# not do.
REFUSED_SECTIONS: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        ("curriculum_learning.enabled",): _CURRICULUM,
        ("data_efficiency.enabled", "data_efficiency.data_routing.enabled"): _PLD,
        ("data_efficiency.enabled", "data_efficiency.data_sampling.enabled"): _CURRICULUM,
        ("progressive_layer_drop.enabled",): _PLD,
        **{
            (f"compression_training.{technique}.shared_parameters.enabled",): _COMPRESSION
            for technique in (
                "weight_quantization",
                "activation_quantization",
                "sparse_pruning",
                "row_pruning",
                "head_pruning",
                "channel_pruning",
            )
        },
    }
)
# Switches without effect on what is trained here.
IDLE_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "compile.deepcompile": _COMPILE,
        "dump_state": "print engine.config",
        "eigenvalue.enabled": _COMPRESSION,
        "elasticity.enabled": "give the batch sizes that it leads to",
        "flops_profiler.enabled": _PROFILE,
        "hybrid_engine.enabled": "engine.generate() is the module's own",
        "memory_breakdown": "use torch.cuda.memory_summary()",
        "nebula.enabled": "save_checkpoint() writes files",
        "quantize_training.enabled": _COMPRESSION,
    }
)
# Empty lists and sets of every engine.
EMPTY: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "gate_modules": list,
        "moe_layers": list,
        "num_experts": list,
        "sparse_tensor_module_names": set,
    }
)


def value_at(file: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of a configuration at "a.b"; a key that is absent or null has the default."""
    value: Any = file
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def refuse(what: str, hint: str) -> NoReturn:
    """Errors: UnsupportedError, always."""
    raise UnsupportedError(f"{what} is not a part of this engine: {hint}")


def check_sections(file: Mapping[str, Any]) -> list[str]:
    """Warnings of sections that change nothing here.

    Errors: UnsupportedError (sections that do), InvalidArgumentError (names a key).
    """
    check_keys(file)
    for switches, hint in REFUSED_SECTIONS.items():
        if all(value_at(file, switch, False) is True for switch in switches):
            refuse(f"{switches[-1]}: true", hint)
    return [
        f"{switch} is true, which changes nothing in this engine: {hint}"
        for switch, hint in IDLE_SECTIONS.items()
        if value_at(file, switch, False) is True
    ]


def member(name: str, file: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether a name is one of the tables', and its value. Errors: UnsupportedError."""
    if name in ATTRIBUTES:
        return True, ATTRIBUTES[name]
    if name in EMPTY:
        return True, EMPTY[name]()
    if name in REFUSED_ATTRIBUTES:
        refuse(f"engine.{name}", REFUSED_ATTRIBUTES[name])
    if name in CONSTANT:
        value = CONSTANT[name]
    elif name in FROM_FILE:
        value = value_at(file, *FROM_FILE[name])
    elif name in REFUSED:

        def refused(*_: Any, **__: Any) -> NoReturn:
            refuse(f"engine.{name}()", REFUSED[name])

        return True, refused
    else:
        return False, None

    def answer() -> Any:
        return value

    return True, answer
