// abi_layout: sizes and offsets of every struct of the C API on 64-bit machines, checked while
// compiling. A number that has to change here breaks every program that was compiled against the
// header.
#include <cstddef>
#include <type_traits>

#include "sotto/sotto.h"

#define SIZE(type, bytes)                                                 \
  static_assert(sizeof(type) == (bytes) && alignof(type) <= 8, "layout"); \
  static_assert(std::is_standard_layout_v<type> && std::is_trivially_copyable_v<type>, "layout")
// Where there is no floating-point field: no byte of padding.
#define NO_PADDING(type) static_assert(std::has_unique_object_representations_v<type>, "padding")
#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset), "layout")

static_assert(sizeof(void*) == 8 && sizeof(sotto_done_fn) == 8,
              "only 64-bit machines are supported");

SIZE(sotto_buffer, 32);
NO_PADDING(sotto_buffer);
AT(sotto_buffer, data, 0);
AT(sotto_buffer, count, 8);
AT(sotto_buffer, dtype, 16);
AT(sotto_buffer, device_type, 20);
AT(sotto_buffer, device_id, 24);
AT(sotto_buffer, flags, 28);

SIZE(sotto_unique_id, 128);
NO_PADDING(sotto_unique_id);

SIZE(sotto_context_config, 16);
NO_PADDING(sotto_context_config);
AT(sotto_context_config, struct_size, 0);
AT(sotto_context_config, no_progress_thread, 4);
AT(sotto_context_config, cpu_threads, 8);
AT(sotto_context_config, max_ops, 12);

SIZE(sotto_comm_config, 64);
NO_PADDING(sotto_comm_config);
AT(sotto_comm_config, struct_size, 0);
AT(sotto_comm_config, rank, 4);
AT(sotto_comm_config, size, 8);
AT(sotto_comm_config, reserved, 12);
AT(sotto_comm_config, id, 16);
AT(sotto_comm_config, transport, 24);
AT(sotto_comm_config, timeout_us, 32);
AT(sotto_comm_config, all_gather, 40);
AT(sotto_comm_config, user, 48);
AT(sotto_comm_config, native_comm, 56);

SIZE(sotto_call, 64);
NO_PADDING(sotto_call);
AT(sotto_call, struct_size, 0);
AT(sotto_call, flags, 4);
AT(sotto_call, tag, 8);
AT(sotto_call, stream, 16);
AT(sotto_call, timeout_us, 24);
AT(sotto_call, priority, 32);
AT(sotto_call, reduce, 36);
AT(sotto_call, codec, 40);
AT(sotto_call, on_done, 48);
AT(sotto_call, user, 56);

SIZE(sotto_parts, 40);
NO_PADDING(sotto_parts);
AT(sotto_parts, struct_size, 0);
AT(sotto_parts, reserved, 4);
AT(sotto_parts, in_counts, 8);
AT(sotto_parts, in_offsets, 16);
AT(sotto_parts, out_counts, 24);
AT(sotto_parts, out_offsets, 32);

SIZE(sotto_param, 152);
NO_PADDING(sotto_param);
AT(sotto_param, struct_size, 0);
AT(sotto_param, group, 4);
AT(sotto_param, name, 8);
AT(sotto_param, param, 16);
AT(sotto_param, grad, 48);
AT(sotto_param, model_copy, 80);
AT(sotto_param, mask, 112);
AT(sotto_param, models, 144);

SIZE(sotto_named_array, 48);
NO_PADDING(sotto_named_array);
AT(sotto_named_array, struct_size, 0);
AT(sotto_named_array, reserved, 4);
AT(sotto_named_array, name, 8);
AT(sotto_named_array, values, 16);

SIZE(sotto_comm_counters, 104);
NO_PADDING(sotto_comm_counters);
AT(sotto_comm_counters, struct_size, 0);
AT(sotto_comm_counters, payload_bytes_sent, 8);
AT(sotto_comm_counters, payload_bytes_received, 16);
AT(sotto_comm_counters, header_bytes_sent, 24);
AT(sotto_comm_counters, header_bytes_received, 32);
AT(sotto_comm_counters, service_bytes_sent, 40);
AT(sotto_comm_counters, service_bytes_received, 48);
AT(sotto_comm_counters, messages_sent, 56);
AT(sotto_comm_counters, messages_received, 64);
AT(sotto_comm_counters, payload_bytes_planned, 72);
AT(sotto_comm_counters, header_bytes_planned, 80);
AT(sotto_comm_counters, kernel_ns, 88);
AT(sotto_comm_counters, ops_completed, 96);

SIZE(sotto_op_stats, 64);
NO_PADDING(sotto_op_stats);
AT(sotto_op_stats, struct_size, 0);
AT(sotto_op_stats, launch_ns, 8);
AT(sotto_op_stats, start_ns, 16);
AT(sotto_op_stats, end_ns, 24);
AT(sotto_op_stats, kernel_ns, 32);
AT(sotto_op_stats, payload_bytes_planned, 40);
AT(sotto_op_stats, header_bytes_planned, 48);
AT(sotto_op_stats, exposed_ns, 56);

SIZE(sotto_optim_info, 88);
AT(sotto_optim_info, struct_size, 0);
AT(sotto_optim_info, stage, 4);
AT(sotto_optim_info, step, 8);
AT(sotto_optim_info, state_step, 16);
AT(sotto_optim_info, lr, 24);
AT(sotto_optim_info, grad_norm, 32);
AT(sotto_optim_info, payload_bytes_next_step, 40);
AT(sotto_optim_info, header_bytes_next_step, 48);
AT(sotto_optim_info, state_bytes, 56);
AT(sotto_optim_info, skipped_steps, 64);
AT(sotto_optim_info, loss_scale, 72);
AT(sotto_optim_info, micro_batches, 80);
