"""Acts on plans with torch: the executor, the arena, step tensors and the sampler. Decides nothing."""
