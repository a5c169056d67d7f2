// torch.ops.sagc_fast.linear
#include <optional>

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
  args.weight = weight.const_data_ptr(), args.weight_stride = weight.stride(0);
  args.weight_dtype = dtype_of(weight, "weight"), args.y_dtype = dtype;
  args.y = y.mutable_data_ptr();
  args.M = M, args.N = N, args.K = K;
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == N && bias->is_contiguous() && dtype_of(*bias, "bias") == dtype,
                    "linear needs a contiguous bias [N] of the dtype of x");
    args.bias = bias->const_data_ptr();
  }
  Tensor x32 = x;
  if (dtype == Dtype::kBFloat16) {
    x32 = empty({M, K}, ScalarType::Float);
    float* out = static_cast<float*>(x32.mutable_data_ptr());
    const bf16_t* in = static_cast<const bf16_t*>(x.const_data_ptr());
    const int64_t stride = x.stride(0);
    parallel(M, static_cast<double>(M * K), [&](int64_t b, int64_t e) { kernels().widen(in, stride, out, K, b, e); });
  }
  args.x = static_cast<const float*>(x32.const_data_ptr()), args.x_stride = x32.stride(0);
  parallel(kernels().linear_items(args), 2.0 * M * N * K, [&](int64_t b, int64_t e) { kernels().linear(args, b, e); });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) { m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace sagc
