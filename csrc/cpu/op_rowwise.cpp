// torch.ops.sagc_fast.{rms_norm, add_rms_norm, silu_mul, rope_and_cache, sample_tokens}
#include <tuple>

#include "operations.h"
#include "threads.h"

namespace sagc {

void run_rms_norm(const RmsNormArgs& args, int64_t rows) {
  parallel(rows, kFlopsPerElement * rows * args.E, [&](int64_t b, int64_t e) { kernels().rms_norm(args, b, e); });
}

void run_silu_mul(const SiluMulArgs& args, int64_t rows) {
  parallel(rows, 2 * kFlopsPerElement * rows * args.F, [&](int64_t b, int64_t e) { kernels().silu_mul(args, b, e); });
}

void run_rope_and_cache(const RopeArgs& args, int64_t tokens) {
  const int64_t width = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
  parallel(tokens, kFlopsPerElement * tokens * width, [&](int64_t b, int64_t e) { kernels().rope_and_cache(args, b, e); });
}

void check_sampled(const float* logprob, int64_t rows) {
  int64_t broken = 0;
  for (int64_t r = 0; r < rows; r++) broken += logprob[r] != logprob[r];
  STD_TORCH_CHECK(broken == 0, "Logits are not finite in ", broken, " of ", rows,
                  " rows; the policy's weights have most likely diverged (lower the learning rate or resume from an earlier "
                  "checkpoint).");
}

namespace {

void norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, Tensor& y, Tensor* new_residual) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1),
                  "rms_norm needs x [rows, width] and weight [width]");
  check_contiguous(x, "x");
  check_contiguous(weight, "weight");
  RmsNormArgs args{};
  args.dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(dtype_of(weight, "weight") == args.dtype, "rms_norm needs x and weight of one dtype");
  args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr(), args.y = y.mutable_data_ptr();
  args.E = x.size(1), args.eps = static_cast<float>(eps);
  if (residual != nullptr) {
    check_contiguous(*residual, "residual");
    STD_TORCH_CHECK(residual->dim() == 2 && residual->size(0) == x.size(0) && residual->size(1) == x.size(1) &&
                        residual->scalar_type() == x.scalar_type(),
                    "add_rms_norm needs x and residual of one shape and dtype");
    args.residual = residual->const_data_ptr(), args.new_residual = new_residual->mutable_data_ptr();
  }
  run_rms_norm(args, x.size(0));
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor y = torch::stable::empty(x.sizes(), x.scalar_type());
  norm(x, nullptr, weight, eps, y, nullptr);
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor y = torch::stable::empty(x.sizes(), x.scalar_type());
  Tensor new_residual = torch::stable::empty(x.sizes(), x.scalar_type());
  norm(x, &residual, weight, eps, y, &new_residual);
  return {y, new_residual};
}

Tensor silu_mul(const Tensor& gate_up) {
  STD_TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "silu_mul needs [rows, 2 x width]");
  check_contiguous(gate_up, "gate_up");
  const int64_t T = gate_up.size(0), F = gate_up.size(1) / 2;
  Tensor y = empty({T, F}, gate_up.scalar_type());
  SiluMulArgs args{gate_up.const_data_ptr(), y.mutable_data_ptr(), F, dtype_of(gate_up, "gate_up")};
  run_silu_mul(args, T);
  return y;
}

const int64_t* index_row(const Tensor& t, int64_t size, int64_t limit, const char* name) {
  check_type(t, ScalarType::Long, name, "int64");
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size, name, " must have one entry per token");
  const int64_t* p = static_cast<const int64_t*>(t.const_data_ptr());
  for (int64_t i = 0; i < size; i++)
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < limit, name, " of token ", i, " is ", p[i], ", outside [0, ", limit, ")");
  return p;
}

Tensor rope_and_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                      const Tensor& positions, Tensor k_cache, Tensor v_cache, const Tensor& slots) {
  check_heads(q, "q");
  check_heads(k, "k");
  check_heads(v, "v");
  const int64_t T = q.size(0), H = q.size(1), K = k.size(1), D = q.size(2);
  STD_TORCH_CHECK(k.size(0) == T && v.size(0) == T && v.size(1) == K && k.size(2) == D && v.size(2) == D && D % 2 == 0,
                  "q, k and v must have the same tokens and the same even head width");
  STD_TORCH_CHECK(k_cache.dim() == 4 && k_cache.size(1) == K && k_cache.size(3) == D && v_cache.dim() == 4 &&
                      v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == K && v_cache.size(2) == k_cache.size(2) &&
                      v_cache.size(3) == D,
                  "the KV cache must be [blocks, KV heads, block size, head width]");
  check_contiguous(k_cache, "k_cache");
  check_contiguous(v_cache, "v_cache");
  check_contiguous(cos, "cos");
  check_contiguous(sin, "sin");
  check_type(cos, ScalarType::Float, "cos", "float32");
  check_type(sin, ScalarType::Float, "sin", "float32");
  STD_TORCH_CHECK(cos.dim() == 2 && sin.dim() == 2 && cos.size(1) == D / 2 && sin.size(1) == D / 2 && cos.size(0) == sin.size(0),
                  "cos and sin must be [positions, head width / 2]");
  RopeArgs args{};
  args.dtype = dtype_of(q, "q"), args.cache_dtype = cache_dtype_of(k_cache, "k_cache");
  STD_TORCH_CHECK(dtype_of(k, "k") == args.dtype && dtype_of(v, "v") == args.dtype, "q, k and v differ in dtype");
  STD_TORCH_CHECK(cache_dtype_of(v_cache, "v_cache") == args.cache_dtype, "k_cache and v_cache differ in dtype");
  Tensor out = empty({T, H, D}, q.scalar_type());
  args.q = q.const_data_ptr(), args.k = k.const_data_ptr(), args.v = v.const_data_ptr();
  args.q_stride = q.stride(0), args.k_stride = k.stride(0), args.v_stride = v.stride(0);
  args.cos = static_cast<const float*>(cos.const_data_ptr()), args.sin = static_cast<const float*>(sin.const_data_ptr());
  args.positions = index_row(positions, T, cos.size(0), "position");
  args.slots = index_row(slots, T, k_cache.size(0) * k_cache.size(2), "slot");
  args.q_out = out.mutable_data_ptr(), args.k_cache = k_cache.mutable_data_ptr(), args.v_cache = v_cache.mutable_data_ptr();
  args.num_heads = H, args.num_kv_heads = K, args.head_dim = D, args.block_size = k_cache.size(2);
  run_rope_and_cache(args, T);
  return out;
}

std::tuple<Tensor, Tensor> sample_tokens(const Tensor& logits, const Tensor& uniform, const Tensor& temperature) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "logits must be [rows, vocabulary] with contiguous rows");
  const int64_t R = logits.size(0), V = logits.size(1);
  const Dtype dtype = dtype_of(logits, "logits");
  check_type(uniform, ScalarType::Double, "uniform", "float64");
  check_type(temperature, ScalarType::Float, "temperature", "float32");
  check_contiguous(uniform, "uniform");
  check_contiguous(temperature, "temperature");
  STD_TORCH_CHECK(uniform.dim() == 1 && uniform.size(0) == R && temperature.dim() == 1 && temperature.size(0) == R,
                  "uniform and temperature must have one entry per row");
  Tensor token = empty({R}, ScalarType::Long), logprob = empty({R}, ScalarType::Float);
  SampleArgs args{logits.const_data_ptr(),
                  logits.stride(0),
                  static_cast<const double*>(uniform.const_data_ptr()),
                  static_cast<const float*>(temperature.const_data_ptr()),
                  V,
                  static_cast<int64_t*>(token.mutable_data_ptr()),
                  static_cast<float*>(logprob.mutable_data_ptr()),
                  dtype};
  parallel(R, 2 * kFlopsPerElement * R * V, [&](int64_t b, int64_t e) { kernels().sample(args, b, e); });
  check_sampled(args.logprob, R);
  return {token, logprob};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def(
      "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, Tensor slots) -> Tensor");
  m.def("sample_tokens(Tensor logits, Tensor uniform, Tensor temperature) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("rope_and_cache", TORCH_BOX(&rope_and_cache));
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
}

}  // namespace sagc
