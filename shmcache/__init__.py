"""One KV-state cache in shared memory for all llama.cpp workers of a machine."""
