"""Where state lives: layout, slots, block pools, tables and the KV cache with its invariants. Pure."""
