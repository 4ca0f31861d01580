-- Cancel a job. One that waits, or whose lease has lapsed, ends here; one that runs is marked, and its owner told.
-- ARGV: base, id
-- Reply: {'cancelled'} | {'cancelling'} | {'ended', state} | {'unknown'}
-- Again: a cancelled job has ended; the mark can be set twice.
local outcome, state = cancel_now(ARGV[2], 'cancelled while it waited', server_ms())
return {outcome, state}
