-- Give a tenant a weight, or ask for all of them.
-- ARGV: base, tenant ('' none), weight (above 0; 1, which every tenant has, is not kept)
-- Reply: {tenant, weight, ...} of every tenant that has another one
-- Again: setting twice is setting once. It counts from the tenant's next pick on.
local weights = base .. 'weights'
if ARGV[2] ~= '' then
  if tonumber(ARGV[3]) == 1 then
    redis.call('HDEL', weights, ARGV[2])
  else
    redis.call('HSET', weights, ARGV[2], ARGV[3])
  end
end
return redis.call('HGETALL', weights)
