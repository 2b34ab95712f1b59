"""Engine profiles: what an administrator sets for the engines of all services that name one."""
