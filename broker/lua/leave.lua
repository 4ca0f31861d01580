-- Forget a worker that has ended, whether it served or had still to load its model.
-- ARGV: base, worker
-- Reply: 'ok'
-- Again: leaving twice is leaving once.
redis.call('HDEL', base .. 'workers', ARGV[2])
redis.call('HDEL', base .. 'loading', ARGV[2])
forget_consumer(ARGV[2])
return 'ok'
