-- Have a batch stop; what is done of it is kept.
-- ARGV: base, id
-- Reply: status, which is 'cancelling' unless it is too late | nil where there is no such batch
-- Again: it is cancelling already.
local batch = base .. 'batch:' .. ARGV[2]
local status = redis.call('HGET', batch, 'status')
if status ~= 'validating' and status ~= 'in_progress' then return status end
redis.call('HSET', batch, 'status', 'cancelling', 'cancelling_at', math.floor(server_ms() / 1000), 'ending', 'cancelled')
return 'cancelling'
