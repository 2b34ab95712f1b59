-- Deletes keys of earlier epochs. KEYS: from 2 on. Returns: 1.
for index = 2, #KEYS do
  redis.call('UNLINK', KEYS[index])
end
return 1
