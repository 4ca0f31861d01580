-- Where a job stands. One past its deadline that nobody runs ends here: it must not look as if it still waited. Likewise
-- one that somebody spoilt.
-- ARGV: base, id
-- Reply: {state | false, result | false, attempt, worker}
-- Again: a job that has ended stays as it is.
expire(ARGV[2], server_ms())
local f = redis.call('HMGET', job_key(ARGV[2]), 'state', 'attempt', 'worker')
local result = redis.pcall('GET', base .. 'result:' .. ARGV[2])
return {f[1], type(result) == 'string' and result, whole(f[2]) or 0, f[3] or ''}
