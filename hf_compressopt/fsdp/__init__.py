"""Low-bit gradients between the replicas of a model that FSDP2 shards inside them."""
