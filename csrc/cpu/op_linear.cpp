// torch.ops.sagc_fast.linear
#include <optional>

#include "linear_run.h"
#include "torch_util.h"

namespace sagc {
namespace {

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                  "linear needs x [rows, K] and weight [N, K] with the same K");
  STD_TORCH_CHECK((x.size(1) <= 1 || x.stride(1) == 1) && (x.size(1) <= 1 || weight.stride(1) == 1),
                  "linear needs contiguous rows of x and weight");
  const Dtype dtype = dtype_of(x, "x");
  const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
  Tensor y = empty({M, N}, x.scalar_type());
  LinearArgs args{};
  args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr(), args.y = y.mutable_data_ptr();
  args.x_stride = x.stride(0), args.weight_stride = weight.stride(0), args.y_stride = N;
  args.M = M, args.N = N, args.K = K;
  args.x_dtype = args.y_dtype = dtype, args.weight_dtype = dtype_of(weight, "weight");
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == N && bias->is_contiguous() && dtype_of(*bias, "bias") == dtype,
                    "linear needs a contiguous bias [N] of the dtype of x");
    args.bias = bias->const_data_ptr();
  }
  std::optional<Tensor> scratch;
  if (const int64_t bytes = kernels().linear_scratch(args); bytes > 0) {
    scratch = empty({bytes}, ScalarType::Byte);
    args.scratch = scratch->mutable_data_ptr();
  }
  run_linear(args);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) { m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace sagc
