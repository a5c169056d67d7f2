// torch.ops.sagc_fast.{sample_keyed_tokens, pack_decode_rows} for CUDA tensors, through torch's stable ABI. Compiled by
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

void pack_decode_rows(const Tensor& rows, const Tensor& num_rows, const Tensor& is_over, const Tensor& num_computed,
                      const Tensor& block_tables, const Tensor& share_group, const Tensor& shared_blocks, int64_t block_size,
                      int64_t padding_slot, Tensor out_rows, Tensor out_num_rows, Tensor out_positions, Tensor out_slots,
                      Tensor out_context_lens, Tensor out_cu_query, Tensor out_block_tables, Tensor out_share_group,
                      Tensor out_shared_blocks) {
  STD_TORCH_CHECK(rows.dim() == 1 && out_rows.dim() == 1 && block_tables.dim() == 2, "pack_decode_rows needs rows [C], "
                  "block_tables [slots, columns] and out_rows [R]");
  STD_TORCH_CHECK(block_size > 0, "block_size is ", block_size, " and must be positive");
  const int64_t slots = block_tables.size(0), bucket = out_rows.size(0);
  const int32_t device = rows.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  PackArgs args{};
  args.capacity = rows.size(0), args.num_columns = block_tables.size(1), args.bucket = bucket;
  args.block_size = block_size, args.padding_slot = padding_slot;
  args.rows = SAGC_INT32(rows, args.capacity), args.num_rows = SAGC_INT32(num_rows, 1);
  args.is_over = checked<bool>(is_over, "is_over", ScalarType::Bool, "bool", {slots}, device);
  args.num_computed = SAGC_INT64(num_computed, slots), args.tables = SAGC_INT32(block_tables, slots, args.num_columns);
  args.share_group = SAGC_INT32(share_group, slots), args.shared_blocks = SAGC_INT32(shared_blocks, slots);
  args.out_rows = SAGC_INT32(out_rows, bucket), args.out_num_rows = SAGC_INT32(out_num_rows, 1);
  args.out_positions = SAGC_INT64(out_positions, bucket), args.out_slots = SAGC_INT64(out_slots, bucket);
  args.out_context_lens = SAGC_INT32(out_context_lens, bucket);
  args.out_cu_query = SAGC_INT32(out_cu_query, bucket + 1);
  args.out_tables = SAGC_INT32(out_block_tables, bucket, args.num_columns);
  args.out_share_group = SAGC_INT32(out_share_group, bucket);
  args.out_shared_blocks = SAGC_INT32(out_shared_blocks, bucket);
  check_launch(sagc_cuda_pack_decode_rows(current_stream(device), &args), "pack_decode_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def(
      "sample_keyed_tokens(Tensor logits, Tensor seed, Tensor prompt_id, Tensor sample_index, Tensor position, Tensor "
      "temperature) -> (Tensor, Tensor)");
  m.def(
      "pack_decode_rows(Tensor rows, Tensor num_rows, Tensor is_over, Tensor num_computed, Tensor block_tables, Tensor "
      "share_group, Tensor shared_blocks, int block_size, int padding_slot, Tensor(a!) out_rows, Tensor(b!) out_num_rows, "
      "Tensor(c!) out_positions, Tensor(d!) out_slots, Tensor(e!) out_context_lens, Tensor(f!) out_cu_query, Tensor(g!) "
      "out_block_tables, Tensor(h!) out_share_group, Tensor(i!) out_shared_blocks) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CUDA, m) {
  m.impl("sample_keyed_tokens", TORCH_BOX(&sample_keyed_tokens));
  m.impl("pack_decode_rows", TORCH_BOX(&pack_decode_rows));
}

}  // namespace sagc
