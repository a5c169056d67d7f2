// torch.ops.sagc_fast.{sample_keyed_tokens, place_rows, advance_rows} for CUDA tensors, through torch's stable ABI. Compiled by
// the C++ compiler and linked against no CUDA library of torch, so that one file serves every torch from 2.11 on and
// also loads, without a device to run on, beside a CPU torch.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "operations.h"

namespace sagc {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The stream that torch has current on a device; found at run time, because only CUDA builds of torch export it.
void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(function != nullptr, "this torch was built without CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "torch names no current stream for CUDA device ", device);
  return stream;
}

void check_launch(int error, const char* name) {
  STD_TORCH_CHECK(error == 0, name, " was not launched: CUDA error ", error);
}

// A contiguous tensor of one type and shape on the device of the call, as a raw pointer.
template <typename T>
T* checked(const Tensor& t, const char* name, ScalarType type, const char* type_name, std::initializer_list<int64_t> shape,
           int32_t device) {
  bool is_shape = static_cast<size_t>(t.dim()) == shape.size();
  int64_t axis = 0;
  for (int64_t size : shape) is_shape = is_shape && t.size(axis++) == size;
  STD_TORCH_CHECK(t.scalar_type() == type && is_shape && t.is_contiguous(), name, " must be a contiguous ", type_name,
                  " tensor of the documented shape");
  STD_TORCH_CHECK(t.get_device_index() == device, name, " is on another device");
  return static_cast<T*>(t.mutable_data_ptr());
}

// The same for a matrix of `rows` rows, which may stand apart.
template <typename T>
T* checked_rows(const Tensor& t, const char* name, ScalarType type, const char* type_name, int64_t rows, int32_t device) {
  const bool is_shape = t.dim() == 2 && t.size(0) == rows && (t.size(1) <= 1 || t.stride(1) == 1);
  STD_TORCH_CHECK(t.scalar_type() == type && is_shape, name, " must be a ", type_name,
                  " matrix of the documented shape with contiguous rows");
  STD_TORCH_CHECK(t.get_device_index() == device, name, " is on another device");
  return static_cast<T*>(t.mutable_data_ptr());
}

#define SAGC_INT32(t, ...) checked<int32_t>(t, #t, ScalarType::Int, "int32", {__VA_ARGS__}, device)
#define SAGC_INT64(t, ...) checked<int64_t>(t, #t, ScalarType::Long, "int64", {__VA_ARGS__}, device)

std::tuple<Tensor, Tensor> sample_keyed_tokens(const Tensor& logits, const Tensor& seed, const Tensor& prompt_id,
                                               const Tensor& sample_index, const Tensor& position,
                                               const Tensor& temperature) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "logits must be [rows, vocabulary] with contiguous rows");
  const int64_t rows = logits.size(0), vocab_size = logits.size(1);
  STD_TORCH_CHECK(vocab_size <= kMaxVocab, "a vocabulary of ", vocab_size, " is more than the ", kMaxVocab, " served");
  const int32_t device = logits.get_device_index();
  const ScalarType type = logits.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "logits must be float32, bfloat16 or float16");
  torch::stable::accelerator::DeviceGuard guard(device);
  Tensor token = torch::stable::empty({rows}, ScalarType::Long, std::nullopt, logits.device());
  Tensor logprob = torch::stable::empty({rows}, ScalarType::Float, std::nullopt, logits.device());
  SampleArgs args{};
  args.logits = logits.const_data_ptr();
  args.type = type == ScalarType::Float      ? LogitsType::kFloat32
              : type == ScalarType::BFloat16 ? LogitsType::kBFloat16
                                             : LogitsType::kFloat16;
  args.num_rows = rows, args.vocab_size = vocab_size, args.stride = logits.stride(0);
  args.temperature = checked<float>(temperature, "temperature", ScalarType::Float, "float32", {rows}, device);
  args.seed = SAGC_INT64(seed, rows), args.prompt_id = SAGC_INT64(prompt_id, rows);
  args.sample_index = SAGC_INT64(sample_index, rows), args.position = SAGC_INT64(position, rows);
  args.token = static_cast<int64_t*>(token.mutable_data_ptr());
  args.logprob = static_cast<float*>(logprob.mutable_data_ptr());
  check_launch(sagc_cuda_sample_keyed(current_stream(device), &args), "sample_keyed_tokens");
  return {token, logprob};
}

void place_rows(const Tensor& position, Tensor is_live, const Tensor& is_kept, const Tensor& shared_blocks,
                const Tensor& block_tables, Tensor context, Tensor slot, int64_t block_size, int64_t scratch_slot) {
  STD_TORCH_CHECK(block_size > 0, "block_size is ", block_size, " and must be positive");
  const int32_t device = position.get_device_index();
  const int64_t rows = position.numel();
  torch::stable::accelerator::DeviceGuard guard(device);
  PlaceArgs args{};
  args.num_rows = rows, args.block_size = block_size, args.scratch_slot = scratch_slot;
  args.position = SAGC_INT64(position, rows), args.is_live = SAGC_INT32(is_live, rows);
  args.is_kept = SAGC_INT32(is_kept, rows), args.shared_blocks = SAGC_INT32(shared_blocks, rows);
  args.tables = checked_rows<int32_t>(block_tables, "block_tables", ScalarType::Int, "int32", rows, device);
  args.table_stride = block_tables.stride(0);
  args.context = SAGC_INT32(context, rows), args.slot = SAGC_INT64(slot, rows);
  check_launch(sagc_cuda_place_rows(current_stream(device), &args), "place_rows");
}

void advance_rows(const Tensor& drawn, const Tensor& logprob, Tensor token, Tensor position, Tensor index,
                  const Tensor& max_output, Tensor is_live, const Tensor& end_set, Tensor step, const Tensor& end_ids,
                  Tensor record, Tensor record_logprobs) {
  const int32_t device = drawn.get_device_index();
  const int64_t rows = drawn.numel(), steps = record.size(0);
  torch::stable::accelerator::DeviceGuard guard(device);
  AdvanceArgs args{};
  args.num_rows = rows, args.num_ids = end_ids.size(1), args.num_steps = steps;
  args.drawn = SAGC_INT64(drawn, rows);
  args.logprob = checked<float>(logprob, "logprob", ScalarType::Float, "float32", {rows}, device);
  args.token = SAGC_INT64(token, rows), args.position = SAGC_INT64(position, rows);
  args.index = SAGC_INT64(index, rows), args.max_output = SAGC_INT64(max_output, rows);
  args.is_live = SAGC_INT32(is_live, rows), args.end_set = SAGC_INT64(end_set, rows), args.step = SAGC_INT64(step, rows);
  args.end_ids = checked_rows<int64_t>(end_ids, "end_ids", ScalarType::Long, "int64", end_ids.size(0), device);
  args.record = checked_rows<int64_t>(record, "record", ScalarType::Long, "int64", steps, device);
  args.record_logprob =
      checked_rows<float>(record_logprobs, "record_logprobs", ScalarType::Float, "float32", steps, device);
  args.end_stride = end_ids.stride(0), args.record_stride = record.stride(0);
  args.record_logprob_stride = record_logprobs.stride(0);
  check_launch(sagc_cuda_advance_rows(current_stream(device), &args), "advance_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def(
      "sample_keyed_tokens(Tensor logits, Tensor seed, Tensor prompt_id, Tensor sample_index, Tensor position, Tensor "
      "temperature) -> (Tensor, Tensor)");
  m.def(
      "place_rows(Tensor position, Tensor(a!) is_live, Tensor is_kept, Tensor shared_blocks, Tensor block_tables, "
      "Tensor(b!) context, Tensor(c!) slot, int block_size, int scratch_slot) -> ()");
  m.def(
      "advance_rows(Tensor drawn, Tensor logprob, Tensor(a!) token, Tensor(b!) position, Tensor(c!) index, Tensor "
      "max_output, Tensor(d!) is_live, Tensor end_set, Tensor(e!) step, Tensor end_ids, Tensor(f!) record, Tensor(g!) "
      "record_logprobs) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CUDA, m) {
  m.impl("sample_keyed_tokens", TORCH_BOX(&sample_keyed_tokens));
  m.impl("place_rows", TORCH_BOX(&place_rows));
  m.impl("advance_rows", TORCH_BOX(&advance_rows));
}

}  // namespace sagc
