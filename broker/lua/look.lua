-- Where a job stands. Reads only.
-- ARGV: base, id
-- Reply: {state | false, result | false, attempt, worker}
local f = redis.call('HMGET', job_key(ARGV[2]), 'state', 'attempt', 'worker')
return {f[1], redis.call('GET', base .. 'result:' .. ARGV[2]), tonumber(f[2] or 0), f[3] or ''}
