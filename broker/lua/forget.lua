-- Delete ended jobs of a bulk run whose rows are durable elsewhere.
-- ARGV: base, run, then id, entry of the run's stream for each
-- Reply: how many jobs were deleted
-- A job that has not ended is left alone. The run's stream stays, even empty: it remembers its last id.
-- Many keys in one command: a write in a script costs about 2.5 us, most of it for the append-only file.
local MOST = 1000 -- keys in a command: unpack takes some 8,000
local forgotten = 0
local jobs, rest, entries = {}, {}, {}
local function flush()
  if #jobs == 0 then return end
  forgotten = forgotten + redis.call('DEL', unpack(jobs))
  redis.call('DEL', unpack(rest))
  redis.call('XDEL', base .. 'done:' .. ARGV[2], unpack(entries))
  jobs, rest, entries = {}, {}, {}
end
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local state = redis.call('HGET', job_key(id), 'state')
  if not state or TERMINAL[state] then
    jobs[#jobs + 1] = job_key(id)
    rest[#rest + 1] = base .. 'log:' .. id
    rest[#rest + 1] = base .. 'result:' .. id
    entries[#entries + 1] = ARGV[i + 1]
    if #jobs == MOST then flush() end
  end
end
flush()
return forgotten
