-- Note that a worker loads its first model, since when it does, and forget those that say so no more.
-- ARGV: base, worker, model (as the worker was told it)
-- Reply: 'ok'
-- Again: saying it twice is saying it once.
local FORGOTTEN_MS = 60000
local loading = base .. 'loading'
local now = server_ms()
local since = string.format('%.0f', now)
local told = redis.call('HGETALL', loading)
for i = 1, #told, 2 do
  local at, began = string.match(told[i + 1], '^(%d+) (%d+) ')
  if told[i] == ARGV[2] then
    since = began or since
  elseif (tonumber(at) or 0) < now - FORGOTTEN_MS then
    redis.call('HDEL', loading, told[i])
  end
end
redis.call('HSET', loading, ARGV[2], string.format('%.0f', now) .. ' ' .. since .. ' ' .. ARGV[3])
redis.call('PEXPIRE', loading, FORGOTTEN_MS)
return 'ok'
