-- Register a batch; its first slice may work on it.
-- ARGV: base, id, completion window (s), then field, value for what the producer says of it
-- Reply: 1 registered | 0 it is there
-- Again: the id tells.
local batch = base .. 'batch:' .. ARGV[2]
if redis.call('EXISTS', batch) == 1 then return 0 end
local now = math.floor(server_ms() / 1000)
redis.call('HSET', batch, 'status', 'validating', 'ending', 'completed', 'slice', 1, 'created_at', now,
  'expires_at', now + ARGV[3], 'total', 0, 'completed', 0, 'failed', 0, unpack(ARGV, 4))
redis.call('ZADD', base .. 'batches', server_ms(), ARGV[2])
return 1
