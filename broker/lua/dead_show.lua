-- One dead letter. Reads only.
-- ARGV: base, name (the letter's id or the job's)
-- Reply: {letter, job id, reason, attempt, worker, bytes, raw, history (JSON objects of earlier lives, a line each)} | {}
-- Again: as before.
local letter = find_letter(ARGV[2])
if not letter then return {} end
local f = table_of(letter[2])
local raw, history = f.raw or '', redis.pcall('HGET', job_key(f.id or ''), 'history')
return {letter[1], f.id or '', f.reason or '', whole(f.attempt) or 0, f.worker or '', #raw, raw,
  type(history) == 'string' and history or ''}
