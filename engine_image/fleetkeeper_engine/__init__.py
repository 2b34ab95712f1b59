"""Supervisor of one vLLM inside its pod. Folders name the process that a module runs in.

`supervisor`    pid 1: `launch` prepares the start, `control_api` is its HTTP port, `memory` measures
`in_vllm`       vLLM's EngineCore and workers: the scheduler class and the memory cap
`in_vllm.http`  vLLM's API server: the ASGI middleware that queues and sheds requests
`shm`           shared memory through which these processes talk
`tools`         commands that supervise no pod, and a program of the image build

`spec`, `exit_codes`, `policy` and `limits` are pure, and several processes share them.
This package never imports the operator.
"""
