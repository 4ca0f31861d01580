"""The engine: requests, slots, KV, batches, sampling, text. No redis, no sockets."""
