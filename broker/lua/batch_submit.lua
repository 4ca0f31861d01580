-- Register a batch; its first slice may work on it.
-- ARGV: base, id, by (who says so), completion window (s), then field, value for what the producer says of it
-- Reply: 1 registered | 0 it is there
-- Again: who says so tells.
local batch = base .. 'batch:' .. ARGV[2]
if redis.call('EXISTS', batch) == 1 then return redis.call('HGET', batch, 'submitted_by') == ARGV[3] and 1 or 0 end
local now = math.floor(server_ms() / 1000)
redis.call('HSET', batch, 'status', 'validating', 'ending', 'completed', 'slice', 1, 'created_at', now,
  'expires_at', now + ARGV[4], 'total', 0, 'completed', 0, 'failed', 0, 'submitted_by', ARGV[3], unpack(ARGV, 5))
redis.call('ZADD', base .. 'batches', server_ms(), ARGV[2])
return 1
