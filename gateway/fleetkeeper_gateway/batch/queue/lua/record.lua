-- ARGV: 3 ID. Returns: 0, and the record of the batch if it is known.
return { 0, redis.call('HGET', key_of(ARGV[3], 'meta'), 'record') or nil }
