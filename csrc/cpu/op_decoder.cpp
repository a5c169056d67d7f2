// torch.ops.sagc_fast.decoder_{create, forward, sample, bind, steps, free} and keyed_uniforms.
//
// `decoder_bind` takes the arrays of the row table (sagc_fast/rollout/rows.py), one entry per slot, in the order last_token,
// num_computed, num_output, max_output, end_set, seed, prompt_id, sample_index (int64), temperature (float32), group_index,
// shared_blocks (int32), then block_tables [slots, blocks] (int32) and the sets of ending ids [sets, ids] (int64). They are
// read where they lie, at every call of `decoder_steps`, so that a decode step passes nothing but the slots of its rows.
#include <map>
#include <memory>
#include <mutex>

#include "decoder.h"
#include "philox.h"

namespace sagc {
namespace {

std::mutex registry_mutex;
std::map<int64_t, std::shared_ptr<Decoder>>& registry() {
  static auto* decoders = new std::map<int64_t, std::shared_ptr<Decoder>>();  // never destroyed: torch may be gone by then
  return *decoders;
}

std::shared_ptr<Decoder> find(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  STD_TORCH_CHECK(found != registry().end(), "there is no decoder ", handle, "; it has been freed");
  return found->second;
}

int64_t decoder_create(std::vector<Tensor> weights, std::vector<Tensor> caches, int64_t num_heads, double eps) {
  auto decoder = std::make_shared<Decoder>(std::move(weights), std::move(caches), num_heads, eps);
  std::lock_guard<std::mutex> lock(registry_mutex);
  static int64_t num_made = 0;
  registry()[++num_made] = std::move(decoder);
  return num_made;
}

void decoder_free(int64_t handle) {
  std::shared_ptr<Decoder> last;  // dies outside the lock
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  if (found == registry().end()) return;
  last = std::move(found->second);
  registry().erase(found);
}

Tensor decoder_forward(int64_t handle, const Tensor& token_ids, const Tensor& cos, const Tensor& sin, const Tensor& cu_query,
                       const Tensor& context_lens, const Tensor& block_tables, const Tensor& share_group,
                       const Tensor& shared_blocks, const Tensor& logits_rows) {
  return find(handle)->forward(token_ids, cos, sin, cu_query, context_lens, block_tables, share_group, shared_blocks, logits_rows);
}

std::tuple<Tensor, Tensor, double> decoder_sample(int64_t handle, const Tensor& hidden, const Tensor& index,
                                                  const Tensor& uniform, const Tensor& temperature) {
  return find(handle)->sample(hidden, index, uniform, temperature);
}

void decoder_bind(int64_t handle, std::vector<Tensor> rows, Tensor cos, Tensor sin) {
  find(handle)->bind(std::move(rows), std::move(cos), std::move(sin));
}

std::tuple<Tensor, Tensor, Tensor> decoder_steps(int64_t handle, const Tensor& slots, int64_t most_steps, int64_t stop_at_rows) {
  return find(handle)->steps(slots, most_steps, stop_at_rows);
}

Tensor keyed_uniforms(const Tensor& seed, const Tensor& prompt_id, const Tensor& sample_index, const Tensor& position) {
  const int64_t R = seed.numel();
  Tensor uniform = empty({R}, ScalarType::Double);
  const int64_t *seeds = int64_row(seed, "seed"), *prompts = int64_row(prompt_id, "prompt_id");
  const int64_t *samples = int64_row(sample_index, "sample_index"), *positions = int64_row(position, "position");
  STD_TORCH_CHECK(prompt_id.numel() == R && sample_index.numel() == R && position.numel() == R, "all keys must have one length");
  auto* out = static_cast<double*>(uniform.mutable_data_ptr());
  for (int64_t r = 0; r < R; r++)
    out[r] = keyed_uniform(static_cast<uint64_t>(seeds[r]), static_cast<uint64_t>(prompts[r]), static_cast<uint32_t>(samples[r]),
                           static_cast<uint32_t>(positions[r]));
  return uniform;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def("decoder_create(Tensor[] weights, Tensor[] caches, int num_heads, float eps) -> int");
  m.def("decoder_free(int handle) -> ()");
  m.def(
      "decoder_forward(int handle, Tensor token_ids, Tensor cos, Tensor sin, Tensor cu_query, Tensor context_lens, "
      "Tensor block_tables, Tensor share_group, Tensor shared_blocks, Tensor logits_rows) -> Tensor");
  m.def(
      "decoder_sample(int handle, Tensor hidden, Tensor index, Tensor uniform, Tensor temperature) -> (Tensor, Tensor, float)");
  m.def("decoder_bind(int handle, Tensor[] rows, Tensor cos, Tensor sin) -> ()");
  m.def("decoder_steps(int handle, Tensor slots, int most_steps, int stop_at_rows) -> (Tensor, Tensor, Tensor)");
  m.def("keyed_uniforms(Tensor seed, Tensor prompt_id, Tensor sample_index, Tensor position) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CompositeExplicitAutograd, m) { m.impl("decoder_free", TORCH_BOX(&decoder_free)); }
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) {
  m.impl("decoder_create", TORCH_BOX(&decoder_create));
  m.impl("decoder_forward", TORCH_BOX(&decoder_forward));
  m.impl("decoder_sample", TORCH_BOX(&decoder_sample));
  m.impl("decoder_bind", TORCH_BOX(&decoder_bind));
  m.impl("decoder_steps", TORCH_BOX(&decoder_steps));
  m.impl("keyed_uniforms", TORCH_BOX(&keyed_uniforms));
}

}  // namespace sagc
