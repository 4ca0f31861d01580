-- Delete ended jobs of a bulk run whose rows are durable elsewhere.
-- ARGV: base, run, then id, entry of the run's stream ('' not to be deleted) for each
-- Reply: how many jobs were deleted
-- A job that has not ended is left alone. The run's stream stays, even empty: it remembers its last id.
-- Again: they are gone, so the second call deletes none.
-- Many keys in one command: a write in a script costs about 2.5 us, most of it for the append-only file.
local jobs, rest, entries = {}, {}, {}
for i = 3, #ARGV, 2 do
  local id, entry = ARGV[i], ARGV[i + 1]
  local state = redis.pcall('HGET', job_key(id), 'state') -- an error: it is no hash, so no job
  if type(state) ~= 'string' or TERMINAL[state] then
    jobs[#jobs + 1] = job_key(id)
    rest[#rest + 1], rest[#rest + 2] = base .. 'log:' .. id, base .. 'result:' .. id
  end
  if entry ~= '' then entries[#entries + 1] = entry end
end

local forgotten = 0
for from, to in pieces(jobs) do forgotten = forgotten + redis.call('DEL', unpack(jobs, from, to)) end
for from, to in pieces(rest) do redis.call('DEL', unpack(rest, from, to)) end
for from, to in pieces(entries) do redis.call('XDEL', base .. 'done:' .. ARGV[2], unpack(entries, from, to)) end
return forgotten
