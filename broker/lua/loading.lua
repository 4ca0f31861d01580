-- Note that a worker loads its first model, and since when it does. Those that say so no more are forgotten by heartbeats.
-- ARGV: base, worker, model (as the worker was told it)
-- Reply: 'ok'
-- Again: saying it twice is saying it once.
local FORGOTTEN_MS = 60000
local loading = base .. 'loading'
local now = string.format('%.0f', server_ms())
local since = string.match(redis.call('HGET', loading, ARGV[2]) or '', '^%d+ (%d+) ') or now
redis.call('HSET', loading, ARGV[2], now .. ' ' .. since .. ' ' .. ARGV[3])
redis.call('PEXPIRE', loading, FORGOTTEN_MS)
return 'ok'
