-- Delete dead letters for good. What their jobs' results hold stays until it expires.
-- ARGV: base, which ('all' | 'these'), then name (the letter's id or the job's) for each
-- Reply: how many were deleted
-- Again: they are gone, so the second call deletes none.
if ARGV[2] == 'all' then
  local purged = redis.call('XLEN', dead)
  redis.call('UNLINK', dead)
  return purged
end
local purged = 0
for i = 3, #ARGV do
  local letter = find_letter(ARGV[i])
  if letter then purged = purged + redis.call('XDEL', dead, letter[1]) end
end
return purged
