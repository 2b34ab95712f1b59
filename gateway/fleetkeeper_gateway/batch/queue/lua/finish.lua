-- Opens the epoch. ARGV: 3 number after which its leases begin. Returns: 1.
redis.call('SET', PREFIX .. 'fence', ARGV[3])
redis.call('HSET', KEYS[1], 'state', 'ready')
redis.call('HDEL', KEYS[1], 'builder', 'beat')
return 1
