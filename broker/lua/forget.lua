-- Delete ended jobs of a bulk run whose rows are durable elsewhere.
-- ARGV: base, run, then id, entry of the run's stream for each
-- Reply: how many jobs were deleted
-- A job that has not ended is left alone. The run's stream stays, even empty: it remembers its last id.
local forgotten = 0
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local state = redis.call('HGET', job_key(id), 'state')
  if not state or TERMINAL[state] then
    forgotten = forgotten + redis.call('DEL', job_key(id))
    redis.call('DEL', base .. 'log:' .. id, base .. 'result:' .. id)
    redis.call('XDEL', base .. 'done:' .. ARGV[2], ARGV[i + 1])
  end
end
return forgotten
