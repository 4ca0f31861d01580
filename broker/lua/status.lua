-- The queue at a glance. Reads only.
-- ARGV: base
-- Reply: {server ms, fingerprint | false, entries, bytes, running, dead letters, paused, delayed,
--        {worker, beat, ...}, {worker, loading, ...}}
local now = server_ms()
local m = redis.call('HMGET', meta, 'fingerprint', 'entries', 'bytes', 'paused')
return {now, m[1], number_of(m[2]), number_of(m[3]), redis.call('ZCOUNT', leases, '(' .. now, '+inf'),
  redis.call('XLEN', dead), m[4] == '1' and 1 or 0, redis.call('ZCARD', delayed),
  redis.call('HGETALL', base .. 'workers'), redis.call('HGETALL', base .. 'loading')}
