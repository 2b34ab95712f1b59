"""Environment variables of engines: names that services may set, and names that only profiles may set.

A profile's `env` lists the names that its services may set. Two rules apply to every list:

- Only the profile's `variables` set names that make the engine load a file, a shared object, or a
  configuration, or that choose where secrets are sent.
- A trailing `*` allows only the names in `HARMLESS`, because each release of NCCL and vLLM adds names.
"""

from __future__ import annotations

import re
from typing import Final

ADMINISTRATORS: Final = "^(LD_|PYTHON|FLEETKEEPER_)|ENDPOINT|PLUGIN|_FILE|_CONF|_PATH|_PRELOAD|_URL|_URI|_CA_BUNDLE|SSL_CERT"
"""Names that services never set. NCCL_NET_PLUGIN and NCCL_CONF_FILE load a shared object. HF_ENDPOINT
and AWS_ENDPOINT_URL receive the token of `tokenSecret`. Python and RE2 (CEL) both accept the syntax."""

_HARMLESS_NCCL = """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_POINTERS COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD COMM_BLOCKING CROSS_NIC CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS
    DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD
    IB_CUDA_SUPPORT IB_DISABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS
    IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
    IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_MODE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS
    MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS
    NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL
    P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE RAS_ENABLE
    RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME
    SOCKET_NTHREADS SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC TREE_THRESHOLD WORK_FIFO_BYTES
"""
_HARMLESS_VLLM = """
    ALLREDUCE_USE_SYMM_MEM CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND DISABLE_PYNCCL
    FLASHINFER_WORKSPACE_BUFFER_SIZE LOGGING_LEVEL LOGGING_PREFIX LOG_STATS_INTERVAL
    MARLIN_USE_ATOMIC_ADD NO_USAGE_STATS RINGBUFFER_WARNING_INTERVAL SKIP_P2P_CHECK
    USE_DEEP_GEMM USE_FLASHINFER_SAMPLER USE_NCCL_SYMM_MEM XGRAMMAR_CACHE_MB
"""

HARMLESS: Final = frozenset(
    {f"NCCL_{ending}" for ending in _HARMLESS_NCCL.split()}
    | {f"VLLM_{ending}" for ending in _HARMLESS_VLLM.split()}
)
"""Documented tuning variables: numbers, switches, interface names, and log levels."""

_ADMINISTRATORS = re.compile(ADMINISTRATORS)


def is_administrators(name: str) -> bool:
    """Return True if only an engine profile may set this variable."""
    return _ADMINISTRATORS.search(name) is not None


def allows(listed: tuple[str, ...], name: str) -> bool:
    """Return True if a service may set this variable if its profile lists these names."""
    if is_administrators(name):
        return False
    return name in listed or (
        name in HARMLESS
        and any(item.endswith("*") and name.startswith(item[:-1]) for item in listed)
    )
