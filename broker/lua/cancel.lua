-- Cancel a job. One that waits, or whose lease has lapsed, ends here, unless its log is too long for a script; that one,
-- and one that runs, is marked, and its owner told, or the worker that is granted it.
-- ARGV: base, id
-- Reply: {'cancelled'} | {'cancelling'} | {'ended', state} | {'unknown'}
-- Again: a cancelled job has ended; the mark can be set twice.
local outcome, state = cancel_now(ARGV[2], 'cancelled while it waited', server_ms())
return {outcome, state}
