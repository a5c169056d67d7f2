// torch.ops.sagc_fast.{rms_norm_backward, silu_mul_backward, rotary_split, rotary_merge, logits_stats, logits_grad_}
#include <optional>
#include <tuple>
#include <vector>

#include "threads.h"
#include "torch_util.h"

namespace sagc {
namespace {

constexpr double kFlopsPerElement = 8.0;  // memory-bound operations, counted as this much arithmetic

void check_like(const Tensor& t, const Tensor& like, const char* name) {
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type() && t.dim() == like.dim(), name, " has another dtype or rank than its partner");
  for (int64_t d = 0; d < t.dim(); d++) STD_TORCH_CHECK(t.size(d) == like.size(d), name, " has another shape than its partner");
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, double eps,
                                             const std::optional<Tensor>& grad_sum) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1) && weight.scalar_type() == x.scalar_type(),
                  "rms_norm_backward needs x [rows, width] and weight [width] of one dtype");
  check_contiguous(x, "x");
  check_contiguous(weight, "weight");
  check_like(grad_y, x, "grad_y");
  RmsNormBackwardArgs args{};
  args.dtype = dtype_of(x, "x");
  args.T = x.size(0), args.E = x.size(1), args.eps = static_cast<float>(eps);
  args.grad_y = grad_y.const_data_ptr(), args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr();
  if (grad_sum.has_value()) {
    check_like(*grad_sum, x, "grad_sum");
    args.grad_sum = grad_sum->const_data_ptr();
  }
  Tensor grad_x = empty({args.T, args.E}, x.scalar_type());
  args.grad_x = grad_x.mutable_data_ptr();
  const int64_t items = (args.T + kRowsPerSum - 1) / kRowsPerSum;
  std::vector<float> sums(static_cast<size_t>(items * args.E));
  args.grad_weight = sums.data();
  parallel(items, kFlopsPerElement * static_cast<double>(args.T * args.E),
           [&](int64_t b, int64_t e) { kernels().training.rms_norm_backward(args, b, e); });
  Tensor total = empty({args.E}, ScalarType::Float);
  float* out = static_cast<float*>(total.mutable_data_ptr());
  for (int64_t i = 0; i < args.E; i++) out[i] = 0.0f;
  for (int64_t item = 0; item < items; item++)
    for (int64_t i = 0; i < args.E; i++) out[i] += sums[static_cast<size_t>(item * args.E + i)];
  return {grad_x, torch::stable::to(total, x.scalar_type())};
}

Tensor silu_mul_backward(const Tensor& grad_y, const Tensor& gate_up) {
  STD_TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "silu_mul_backward needs gate_up [rows, 2 x width]");
  const int64_t T = gate_up.size(0), F = gate_up.size(1) / 2;
  STD_TORCH_CHECK(grad_y.dim() == 2 && grad_y.size(0) == T && grad_y.size(1) == F && grad_y.scalar_type() == gate_up.scalar_type(),
                  "silu_mul_backward needs grad_y [rows, width] of the dtype of gate_up");
  check_contiguous(gate_up, "gate_up");
  check_contiguous(grad_y, "grad_y");
  Tensor grad = empty({T, 2 * F}, gate_up.scalar_type());
  SiluMulBackwardArgs args{grad_y.const_data_ptr(), gate_up.const_data_ptr(), grad.mutable_data_ptr(), F, dtype_of(gate_up, "gate_up")};
  parallel(T, 4 * kFlopsPerElement * static_cast<double>(T * F),
           [&](int64_t b, int64_t e) { kernels().training.silu_mul_backward(args, b, e); });
  return grad;
}

void read_angles(RotaryArgs& args, const Tensor& cos, const Tensor& sin, int64_t T) {
  for (const Tensor* t : {&cos, &sin}) {
    check_type(*t, ScalarType::Float, "cos and sin", "float32");
    check_contiguous(*t, "cos and sin");
    STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == T && 2 * t->size(1) == args.head_dim,
                    "cos and sin must be [tokens, head width / 2]");
  }
  args.cos = static_cast<const float*>(cos.const_data_ptr()), args.sin = static_cast<const float*>(sin.const_data_ptr());
}

double rotary_flops(const RotaryArgs& args, int64_t T) {
  return kFlopsPerElement * static_cast<double>(T * (args.num_heads + 2 * args.num_kv_heads) * args.head_dim);
}

std::tuple<Tensor, Tensor, Tensor> rotary_split(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t num_heads,
                                                int64_t num_kv_heads) {
  const int64_t T = qkv.size(0), heads = num_heads + 2 * num_kv_heads;
  STD_TORCH_CHECK(num_heads > 0 && num_kv_heads > 0 && qkv.dim() == 2 && qkv.size(1) % (2 * heads) == 0,
                  "rotary_split needs qkv [tokens, (heads + 2 x KV heads) x head width] with an even head width");
  check_contiguous(qkv, "qkv");
  RotaryArgs args{};
  args.dtype = dtype_of(qkv, "qkv");
  args.num_heads = num_heads, args.num_kv_heads = num_kv_heads, args.head_dim = qkv.size(1) / heads;
  read_angles(args, cos, sin, T);
  Tensor q = empty({T, num_heads, args.head_dim}, qkv.scalar_type());
  Tensor k = empty({T, num_kv_heads, args.head_dim}, qkv.scalar_type());
  Tensor v = empty({T, num_kv_heads, args.head_dim}, qkv.scalar_type());
  args.qkv = const_cast<void*>(qkv.const_data_ptr()), args.qkv_stride = qkv.size(1);
  args.q = q.mutable_data_ptr(), args.k = k.mutable_data_ptr(), args.v = v.mutable_data_ptr();
  args.q_stride = num_heads * args.head_dim, args.k_stride = args.v_stride = num_kv_heads * args.head_dim;
  parallel(T, rotary_flops(args, T), [&](int64_t b, int64_t e) { kernels().training.rotary_split(args, b, e); });
  return {q, k, v};
}

Tensor rotary_merge(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin) {
  check_heads(q, "q");
  check_heads(k, "k");
  check_heads(v, "v");
  const int64_t T = q.size(0);
  RotaryArgs args{};
  args.dtype = dtype_of(q, "q");
  args.num_heads = q.size(1), args.num_kv_heads = k.size(1), args.head_dim = q.size(2);
  STD_TORCH_CHECK(k.size(0) == T && v.size(0) == T && v.size(1) == k.size(1) && k.size(2) == q.size(2) && v.size(2) == q.size(2) &&
                      dtype_of(k, "k") == args.dtype && dtype_of(v, "v") == args.dtype,
                  "q, k and v must have the same tokens, head width and dtype");
  read_angles(args, cos, sin, T);
  Tensor qkv = empty({T, (args.num_heads + 2 * args.num_kv_heads) * args.head_dim}, q.scalar_type());
  args.qkv = qkv.mutable_data_ptr(), args.qkv_stride = qkv.size(1);
  args.q = const_cast<void*>(q.const_data_ptr()), args.k = const_cast<void*>(k.const_data_ptr());
  args.v = const_cast<void*>(v.const_data_ptr());
  args.q_stride = q.stride(0), args.k_stride = k.stride(0), args.v_stride = v.stride(0);
  parallel(T, rotary_flops(args, T), [&](int64_t b, int64_t e) { kernels().training.rotary_merge(args, b, e); });
  return qkv;
}

LogitsArgs read_logits(const void* data, const Tensor& logits, const Tensor& targets, double temperature) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "logits must be [tokens, vocabulary] with contiguous rows");
  check_type(targets, ScalarType::Long, "targets", "int64");
  check_contiguous(targets, "targets");
  STD_TORCH_CHECK(targets.dim() == 1 && targets.size(0) == logits.size(0), "targets must have one entry per row of logits");
  STD_TORCH_CHECK(temperature > 0, "temperature must be above 0");
  LogitsArgs args{};
  args.logits = const_cast<void*>(data), args.stride = logits.stride(0), args.width = logits.size(1);
  args.targets = static_cast<const int64_t*>(targets.const_data_ptr());
  args.scale = static_cast<float>(1.0 / temperature), args.dtype = dtype_of(logits, "logits");
  return args;
}

std::tuple<Tensor, Tensor, Tensor> logits_stats(const Tensor& logits, const Tensor& targets, double temperature) {
  LogitsArgs args = read_logits(logits.const_data_ptr(), logits, targets, temperature);
  const int64_t n = logits.size(0);
  for (int64_t i = 0; i < n; i++)
    STD_TORCH_CHECK(args.targets[i] >= 0 && args.targets[i] < args.width, "target ", args.targets[i], " of token ", i,
                    " is outside the vocabulary of ", args.width);
  Tensor logprob = empty({n}, ScalarType::Float), lse = empty({n}, ScalarType::Float), entropy = empty({n}, ScalarType::Float);
  args.logprob = static_cast<float*>(logprob.mutable_data_ptr()), args.lse = static_cast<float*>(lse.mutable_data_ptr());
  args.entropy = static_cast<float*>(entropy.mutable_data_ptr());
  parallel(n, 4 * kFlopsPerElement * static_cast<double>(n * args.width),
           [&](int64_t b, int64_t e) { kernels().training.logits_stats(args, b, e); });
  return {logprob, lse, entropy};
}

float* column(const Tensor& t, int64_t n, const char* name) {
  check_type(t, ScalarType::Float, name, "float32");
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == n, name, " must have one entry per row of logits");
  return const_cast<float*>(static_cast<const float*>(t.const_data_ptr()));
}

void logits_grad(Tensor logits, const Tensor& targets, const Tensor& lse, const Tensor& entropy, const Tensor& grad_logprob,
                 const Tensor& grad_entropy, double temperature, int64_t first_column) {
  LogitsArgs args = read_logits(logits.mutable_data_ptr(), logits, targets, temperature);
  const int64_t n = logits.size(0);
  args.first_column = first_column;
  args.lse = column(lse, n, "lse"), args.entropy = column(entropy, n, "entropy");
  args.grad_logprob = column(grad_logprob, n, "grad_logprob"), args.grad_entropy = column(grad_entropy, n, "grad_entropy");
  parallel(n, 4 * kFlopsPerElement * static_cast<double>(n * args.width),
           [&](int64_t b, int64_t e) { kernels().training.logits_grad(args, b, e); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def("rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, float eps, Tensor? grad_sum) -> (Tensor, Tensor)");
  m.def("silu_mul_backward(Tensor grad_y, Tensor gate_up) -> Tensor");
  m.def("rotary_split(Tensor qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads) -> (Tensor, Tensor, Tensor)");
  m.def("rotary_merge(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor");
  m.def("logits_stats(Tensor logits, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)");
  m.def(
      "logits_grad_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor entropy, Tensor grad_logprob, Tensor grad_entropy, "
      "float temperature, int first_column) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) {
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("silu_mul_backward", TORCH_BOX(&silu_mul_backward));
  m.impl("rotary_split", TORCH_BOX(&rotary_split));
  m.impl("rotary_merge", TORCH_BOX(&rotary_merge));
  m.impl("logits_stats", TORCH_BOX(&logits_stats));
  m.impl("logits_grad_", TORCH_BOX(&logits_grad));
}

}  // namespace sagc
