"""Group-first rollout: paged KV, continuous batching, keyed sampling. This package itself loads nothing."""
